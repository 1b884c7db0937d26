"""The stateless call: every kind of input, and every row of what is refused."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import coba_core
from coba_core import (
    BetaPreference,
    BudgetError,
    CapabilityValue,
    CustomValue,
    FirstSuccess,
    GainTable,
    InverseVariance,
    KnapsackValue,
    MixedGroup,
    PowerPreference,
    allocate,
    kernels,
)
from coba_core.schedules import CapabilitySchedule

RATES = [0.1, 0.5, 0.9, 0.3]
EXPECTED = [2, 31, 2, 5]  # α = 1.5 + 8 × 0.55: ln(w·k at ½ over that at 0.3) is 26 steps of k = 1/20


def refused(message: str, *args: Any, error: type[Exception] = ValueError, **options: Any) -> None:
    """`allocate` raises this very text."""
    with pytest.raises(error, match=f"^{re.escape(message)}") as caught:
        allocate(*args, **options)
    assert type(caught.value) is error


# ---- kinds of input -----------------------------------------------------------------------------------------------


def strided(x: list[float]) -> np.ndarray:
    return np.repeat(np.array(x), 3)[::3]


def reverse_view(x: list[float]) -> np.ndarray:
    return np.array(x[::-1])[::-1]


def read_only(x: list[float]) -> np.ndarray:
    array = np.array(x)
    array.flags.writeable = False
    return array


def column(x: list[float]) -> np.ndarray:
    return np.stack([np.array(x)] * 2, axis=1)[:, 0]


def big_endian(x: list[float]) -> np.ndarray:
    return np.array(x, dtype=">f8")


KINDS = [list, tuple, np.array, strided, reverse_view, read_only, column, big_endian]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_input(solver: Any, kind: Any) -> None:
    value = CapabilityValue(7.26, 3.74)
    expected = allocate(RATES, 40, value=value, solver="reference", backend="numpy").tolist()
    given = kind(RATES)
    before = np.array(given)
    found = solver(given, 40, value=value)
    assert type(found) is np.ndarray and found.dtype == np.int64 and found.shape == (4,)
    assert found.tolist() == expected
    assert np.array_equal(np.array(given), before)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.longdouble])
def test_other_floats(solver: Any, dtype: Any) -> None:
    rates = np.array([0.125, 0.5, 0.75, 0.25], dtype=dtype)  # the same number in all of them
    assert solver(rates, 40).tolist() == solver(rates.astype(np.float64), 40).tolist()


@pytest.mark.parametrize("dtype", [int, np.int32, np.uint8, bool])
def test_integers_are_rates_of_zero_and_one(solver: Any, dtype: Any) -> None:
    assert solver(np.array([0, 1, 1, 0], dtype=dtype), 18).tolist() == [5, 5, 4, 4]


def test_float32_is_taken_as_it_is() -> None:
    rates = np.array([0.1, 0.9], dtype=np.float32)
    assert allocate(rates, 40).tolist() == allocate([float(x) for x in rates], 40).tolist()


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.tensor(RATES, dtype=torch.float64),
        torch.tensor(RATES, dtype=torch.float64, requires_grad=True),
        torch.nn.Parameter(torch.tensor(RATES, dtype=torch.float64)),
        torch.tensor(RATES, dtype=torch.float64).repeat_interleave(2)[::2],
    ):
        before = tensor.detach().clone()
        found = allocate(tensor, 40)
        assert isinstance(found, torch.Tensor) and found.dtype == torch.int64 and found.device == tensor.device
        assert found.tolist() == allocate(RATES, 40).tolist()
        assert torch.equal(tensor.detach(), before)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        tensor = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=dtype)
        assert allocate(tensor, 18).tolist() == [5, 5, 4, 4]
    assert allocate(torch.empty(0), 0).shape == (0,)
    refused("pass_rates[1] is nan, not in [0, 1]", torch.tensor([0.5, float("nan")]), 8)
    refused("pass_rates has shape (1, 2), not [prompts]", torch.zeros(1, 2), 8)
    refused("total_budget is 3; 2 prompts with budgets in [2, 128]", torch.zeros(2), 3, error=BudgetError)


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint16])
def test_numpy_integers_as_budgets(integer: Any) -> None:
    found = allocate(RATES, integer(40), low=integer(2), high=integer(30))
    assert found.tolist() == allocate(RATES, 40, low=2, high=30).tolist()


def test_parameters_one_a_prompt(solver: Any) -> None:
    """Prompt by prompt what each would have with its own numbers."""
    alpha = np.array([2.0, 8.0, 5.0, 2.0])
    value = CapabilityValue(alpha, 11.0 - alpha, np.array([5.0, 1.0, 5.0, 5.0]))
    assert solver(RATES, 40, value=value).tolist() == allocate(RATES, 40, value=value, solver="reference").tolist()
    singles = [
        float(CapabilityValue(a, 11.0 - a, t).log_gains([p], [7])[0])
        for a, t, p in zip(alpha, [5.0, 1.0, 5.0, 5.0], RATES, strict=True)
    ]
    assert value.log_gains(RATES, [7] * 4).tolist() == pytest.approx(singles, rel=1e-12)


# ---- the default value ---------------------------------------------------------------------------------------------


def test_default_value_follows_the_batch() -> None:
    """The published schedule at this batch's own failure rate, with τ = 5."""
    for rates in (RATES, [0.0, 0.1, 0.2], [0.9, 1.0, 0.95]):
        alpha, beta = CapabilitySchedule().at(1.0 - float(np.mean(rates)))
        expected = allocate(rates, 40, value=CapabilityValue(alpha, beta, 5.0))
        assert allocate(rates, 40).tolist() == expected.tolist()
    assert allocate(RATES, 40, solver="heap", backend="numpy").tolist() == EXPECTED


def test_much_failure_goes_to_the_easy_and_little_to_the_hard() -> None:
    failing = allocate([0.05, 0.3, 0.6, *[0.0] * 20], 100)
    assert failing[2] > failing[0]
    solving = allocate([0.05, 0.3, 0.6, *[1.0] * 20], 100)
    assert solving[0] > failing[0]


def test_low_of_zero() -> None:
    assert allocate([0.0, 0.5, 1.0], 3, low=0, value=CapabilityValue(7.26, 3.74)).tolist() == [0, 3, 0]


def test_huge_bounds_cost_nothing() -> None:
    budgets = allocate([0.5, 0.5], 10**9, high=2**31 - 2)
    assert budgets.tolist() == [5 * 10**8, 5 * 10**8]


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -1e-300, -0.25, np.nextafter(1.0, 2.0), 1.5])
@pytest.mark.parametrize("place", [0, 3, 700])
def test_pass_rates_outside(implementation: Any, wrong: float, place: int) -> None:
    rates = np.full(1000, 0.5)
    rates[place] = wrong
    rates[place + 1] = np.nan  # the first one counts
    with implementation.module():
        refused(f"pass_rates[{place}] is {wrong}, not in [0, 1]", rates, 8000, backend=implementation.backend)


def test_negative_zero_is_zero(solver: Any) -> None:
    assert solver([-0.0, 0.5], 10, value=KnapsackValue()).tolist() == [2, 8]


@pytest.mark.parametrize("total", [-1, 0, 7, 513, 10**30])
def test_total_outside(total: int) -> None:
    message = f"total_budget is {total}; 4 prompts with budgets in [2, 128] take from 8 to 512"
    refused(message, RATES, total, error=BudgetError)
    assert issubclass(BudgetError, ValueError)


def test_no_prompts(solver: Any) -> None:
    found = solver([], 0)
    assert found.shape == (0,) and found.dtype == np.int64
    assert solver(np.empty(0, dtype=np.float32), 0, value=KnapsackValue()).shape == (0,)
    refused("total_budget is 1; 0 prompts with budgets in [2, 128] take from 0 to 0", [], 1, error=BudgetError)


def test_bounds() -> None:
    refused("low is 5 and high is 4: 0 <= low <= high does not hold", RATES, 20, low=5, high=4)
    refused("low is -1 and high is 4: 0 <= low <= high does not hold", RATES, 12, low=-1, high=4)
    refused("low is -2 and high is -1: 0 <= low <= high does not hold", RATES, -6, low=-2, high=-1)
    assert allocate(RATES, 20, low=5, high=5).tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize("saturation", [MixedGroup(), InverseVariance()])
def test_low_below_the_concave_bound(solver: Any, saturation: Any) -> None:
    value = PowerPreference(1, 2) * saturation
    with pytest.raises(ValueError, match=r"^low is 0, below 1, from where the gains of this value fall"):
        solver(RATES, 40, low=0, value=value)
    assert solver(RATES, 40, low=1, value=value).sum() == 40
    assert solver(RATES, 40, low=0, value=PowerPreference(1, 2) * FirstSuccess()).sum() == 40


def test_shapes() -> None:
    refused("pass_rates has shape (2, 2), not [prompts]", [[0.1, 0.2], [0.3, 0.4]], 8)
    refused("pass_rates has shape (), not [prompts]", 0.5, 8)
    value = CapabilityValue(np.array([1.0, 2.0, 3.0]), 2.0)
    refused("the value has parameters for 3 prompts, pass_rates 4", RATES, 40, value=value)
    with pytest.raises(ValueError, match=r"^preference has 4 and tau has 2 numbers"):
        allocate(RATES, 40, value=CapabilityValue(np.ones(4), 1.0, np.ones(2)))
    table = GainTable(np.ones((4, 20)))
    refused("gains has shape (4, 20), not [4, at least 128]", RATES, 40, value=table)
    refused("gains has shape (4, 20), not [3, at least 20]", RATES[:3], 40, high=20, value=table)


@pytest.mark.parametrize("name", ["total_budget", "low", "high", "threads"])
@pytest.mark.parametrize("wrong", [8.0, "8", None])
def test_not_an_integer(name: str, wrong: Any) -> None:
    options: dict[str, Any] = {"total_budget": 40, name: wrong}
    with pytest.raises(ValueError, match=f"^{name} is {re.escape(repr(wrong))}"):
        allocate(RATES, **options)


def test_not_numbers() -> None:
    with pytest.raises(ValueError, match=r"^pass_rates"):
        allocate(["a", "b"], 8)


@pytest.mark.parametrize("wrong", ["capability", 1.0, BetaPreference(1.0, 1.0), MixedGroup()])
def test_not_a_value(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^value is .* not one of coba_core\.values"):
        allocate(RATES, 40, value=wrong)


def test_solver_and_backend() -> None:
    message = "solver is 'greedy', not one of 'auto', 'threshold', 'heap', 'dp', 'reference'"
    refused(message, RATES, 40, solver="greedy")
    with pytest.raises(ValueError, match=r"^backend is 'cuda', not one of 'auto', 'cython', 'numba', 'numpy'"):
        allocate(RATES, 40, backend="cuda")
    refused("threads is 0, not at least 1", RATES, 40, threads=0)
    if kernels.available()["cython"][0]:
        refused("backend 'cython' cannot run here: it has no solver 'dp'", RATES, 40, solver="dp", backend="cython")
    assert allocate(RATES, 40, solver="auto", backend="auto").tolist() == EXPECTED


def test_custom_values_need_a_backend_that_takes_them() -> None:
    numba = pytest.importorskip("numba")

    @numba.njit
    def gain(p: float, budget: int) -> float:
        return p * (1.0 - p) ** budget

    value = CustomValue(gain)
    expected = allocate(RATES, 40, low=1, value=PowerPreference(0, 0) * FirstSuccess()).tolist()
    for solver in kernels.SOLVERS:
        assert allocate(RATES, 40, low=1, value=value, solver=solver).tolist() == expected
        assert allocate(RATES, 40, low=1, value=value, solver=solver, backend="numpy").tolist() == expected
    message = "backend 'cython' cannot run here: it cannot inline a custom gain"
    refused(message, RATES, 40, value=value, backend="cython")


# ---- which backend runs --------------------------------------------------------------------------------------------


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter."""
    import os

    variables = {k: v for k, v in os.environ.items() if not k.startswith("COBA_CORE_")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=variables | environment, capture_output=True, text=True
    )


def test_the_environment_names_a_backend() -> None:
    code = (
        "import sys, coba_core; coba_core.allocate([.1, .5], 8)\n"
        "print(sorted(m for m in sys.modules if m.startswith('coba_core.kernels.')))"
    )
    assert "cython_backend" not in run(code, COBA_CORE_BACKEND="numpy").stdout
    failed = run(code, COBA_CORE_BACKEND="abacus")
    assert failed.returncode != 0 and "backend is 'abacus'" in failed.stderr


def test_both_import_forms() -> None:
    code = (
        "import coba_core.allocate\n"
        "from coba_core import allocate\n"
        "from coba_core.allocate import allocate as again, BudgetError\n"
        "assert coba_core.allocate is allocate is again and coba_core.BudgetError is BudgetError\n"
        "print(coba_core.allocate([0.1, 0.5, 0.9, 0.3], 40).tolist())"
    )
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{EXPECTED}\n", "")


def test_a_missing_extension_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without the compiled kernels the answer is the same, and the log says why, one time."""
    code = (
        "import sys, logging; logging.basicConfig(); sys.modules['coba_core.kernels.cython_backend'] = None\n"
        "import coba_core\n"
        "for solver in ('auto', 'heap'):\n"
        "    for _ in range(3):\n"
        "        print(coba_core.allocate([0.1, 0.5, 0.9, 0.3], 40, solver=solver).tolist())"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(EXPECTED)] * 6
    assert done.stderr.count("compiled kernels are not used") == 1
    with caplog.at_level(logging.WARNING, logger="coba_core"):
        allocate(RATES, 40)
    if kernels.available()["cython"][0]:
        assert not caplog.records


def test_public_names() -> None:
    for name in coba_core.__all__:
        assert getattr(coba_core, name).__doc__, name
