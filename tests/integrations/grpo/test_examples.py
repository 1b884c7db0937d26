"""The examples in the docstrings of the loop's modules."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import coba_core.integrations.grpo as grpo
import pytest

MODULES = [module.name for module in pkgutil.iter_modules(grpo.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"coba_core.integrations.grpo.{name}")
    assert doctest.testmod(module).failed == 0
