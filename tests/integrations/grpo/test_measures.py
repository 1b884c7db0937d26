"""What is measured of a cell."""

from __future__ import annotations

import json

import numpy as np
import pytest
from coba_core.integrations.grpo import measures
from coba_core.integrations.grpo.config import TrainConfig

from .conftest import SMALL


def test_gini_area_and_reach():
    assert measures.gini([1, 2, 3]) == pytest.approx(2 / 9)
    assert measures.gini([0, 0]) == 0
    assert measures.gini([5]) == 0
    by_problem = measures.area([0, 2, 6], [[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    assert by_problem == pytest.approx([5 / 6, 4 / 6])
    assert measures.rollouts_to_reach([0, 4, 8], [0.3, 0.2, 0.6], 0.4) == 6
    assert measures.rollouts_to_reach([0, 4], [0.3, 0.2], 0.3) == 0
    assert measures.rollouts_to_reach([0, 4], [0.3, 0.2], 0.5) is None


def test_transitions_count_every_problem_once():
    rng = np.random.default_rng(0)
    before, after = rng.integers(0, 5, (2, 50)) / 4
    table = np.array(measures.transitions(before, after))
    assert table.shape == (5, 5) and table.sum() == 50
    assert table[0].sum() == (before == 0).sum() and table[:, 4].sum() == (after == 1).sum()


def test_budgets_by_rate_average_within_tenths():
    found = measures.budgets_by_rate([np.array([0.0, 0.05]), np.array([1.0])], [np.array([2, 4]), np.array([9])])
    assert found == [[0.025, 3.0, 2.0], [1.0, 9.0, 1.0]]


@pytest.mark.parametrize("changes", [{"allocator": "coba"}, {"allocator": "lean"}, {"filter_zero_spread": True}])
def test_a_cell_measures_the_run_it_makes(changes):
    config = TrainConfig(**{**SMALL, "allocator": "uniform", **changes})
    found = json.loads(json.dumps(measures.run_cell(config), allow_nan=False))
    assert found["rollouts"] == 6 * 48
    spent = [e["rollouts"] for e in found["evaluations"]]
    assert spent == sorted(spent) and spent[0] == 0 and spent[-1] == 6 * 48
    held = [e["avg@4"] for e in found["evaluations"]]
    assert found["final"] == held[-1] == pytest.approx(np.mean(found["correct"]) / 4, abs=1e-5)
    assert found["area"] == pytest.approx(measures.area(spent, held), abs=1e-4)
    assert np.mean(found["area_by_problem"]) == pytest.approx(found["area"], abs=1e-4)
    assert np.sum(found["transitions"]) == 24 == SMALL["task_args"]["train"]
    assert [e["rollouts"] for e in found["estimate_errors"]][-1] == 6 * 48
    assert 0 < found["rows_with_gradient"] <= 1
    assert (found["gini"] > 0) == ("allocator" in changes)
    assert ("alpha" in found["curves"]) == ("allocator" in changes)
    assert {len(curve) for curve in found["curves"].values()} == {len(found["curves"]["share"])}
    total = sum(count for part in found["budget_by_rate"].values() for *_, count in part)
    assert total >= 6 * 8
    assert measures.run_cell(config)["correct"] == found["correct"], "a cell is repeatable"
