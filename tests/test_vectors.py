"""Budgets and values against the independent oracle, by every solver of every CPU backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coba_core import (
    BetaPreference,
    CapabilityValue,
    Exponential,
    FirstSuccess,
    InverseVariance,
    KnapsackValue,
    MixedGroup,
    PowerPreference,
    Value,
)

Vectors = Callable[[str], list[dict[str, Any]]]
NEAR_TIE = 1e-9  # below this relative gap the oracle's order is not ours to promise, only its value
SATURATIONS = {
    "exponential": Exponential,
    "mixed_group": MixedGroup,
    "first_success": FirstSuccess,
    "inverse_variance": InverseVariance,
}
PREFERENCES = {"beta": BetaPreference, "power": PowerPreference}


def value_of(case: dict[str, Any]) -> Value:
    """The value that a case is about."""
    if "alpha" in case:
        return CapabilityValue(case["alpha"], case["beta"], case["tau"])
    if "preference" not in case:
        return KnapsackValue()
    preference, *exponents = case["preference"]
    saturation, *tau = case["saturation"]
    return PREFERENCES[preference](*exponents) * SATURATIONS[saturation](*tau)


def gain_above_low(value: Value, case: dict[str, Any], budgets: np.ndarray) -> float:
    """Σ of the gains of every unit above `low`."""
    table = np.exp(value.log_gain_table(case["pass_rates"], case["low"], case["high"]))
    return math.fsum(x for row, b in zip(table, budgets, strict=True) for x in row[: b - case["low"]].tolist())


@pytest.mark.parametrize("name", ["capability_allocations", "knapsack_allocations", "value_allocations"])
def test_budgets_and_values(solver: Callable[..., np.ndarray], vectors: Vectors, name: str) -> None:
    cases = vectors(name)
    assert len(cases) >= 23
    for case in cases:
        value = value_of(case)
        budgets = solver(case["pass_rates"], case["total_budget"], low=case["low"], high=case["high"], value=value)
        gap = case["relative_gap_at_cut"]
        if gap is None or gap > NEAR_TIE or gap == 0.0:
            assert budgets.tolist() == case["budgets"], case["name"]
        assert budgets.sum() == case["total_budget"], case["name"]
        expected = float(case["value"] if "value" in case else case["gain_above_low"])
        found = value.total(case["pass_rates"], budgets) if "value" in case else gain_above_low(value, case, budgets)
        assert found == pytest.approx(expected, rel=1e-12, abs=0.0), case["name"]


def test_near_ties_are_few(vectors: Vectors) -> None:
    """The exemption above is not what makes it pass."""
    cases = [case for name in ("capability", "knapsack", "value") for case in vectors(f"{name}_allocations")]
    assert sum(0.0 < (case["relative_gap_at_cut"] or 0.0) <= NEAR_TIE for case in cases) <= 3
