"""Doctests are short examples, and a step of few prompts is what BudgetWarning warns of."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Doctests of allocators need not say that their three prompts are an example."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.filterwarnings("ignore::coba_core.BudgetWarning"))
