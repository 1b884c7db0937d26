"""The stateless call: pass rates and a budget in, rollouts a prompt out."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import numpy.typing as npt

from coba_core import kernels
from coba_core.groups import is_tensor
from coba_core.kernels.numpy_backend import Form, Gains, Ints
from coba_core.schedules import CapabilitySchedule
from coba_core.state import whole_number
from coba_core.values import AnyValue, CapabilityValue, CustomValue, GainTable, Value


class BudgetError(ValueError):
    """The total budget lies outside [prompts × low, prompts × high]."""


_PUBLISHED = CapabilitySchedule()
_LARGEST = 2**31 - 1


@overload
def allocate(
    pass_rates: npt.NDArray[Any],
    total_budget: int,
    *,
    low: int = 2,
    high: int = 128,
    value: AnyValue | None = None,
    solver: str = "auto",
    backend: str = "auto",
    threads: int = 1,
) -> Ints: ...
@overload
def allocate(
    pass_rates: Any,
    total_budget: int,
    *,
    low: int = 2,
    high: int = 128,
    value: AnyValue | None = None,
    solver: str = "auto",
    backend: str = "auto",
    threads: int = 1,
) -> Any: ...
def allocate(
    pass_rates: Any,
    total_budget: int,
    *,
    low: int = 2,
    high: int = 128,
    value: AnyValue | None = None,
    solver: str = "auto",
    backend: str = "auto",
    threads: int = 1,
) -> Any:
    """max Σ V(Bᵢ, pᵢ) with ΣBᵢ = total_budget, low <= Bᵢ <= high: how many rollouts each prompt gets.

    pass_rates: [M], in [0, 1]; any array, sequence or torch tensor. total_budget: rollouts in all. low, high: bounds a
    prompt. value: any of :mod:`coba_core.values`; None is CoBA-RL's capability value at this batch's own failure rate,
    with the published defaults (2602.03048 eqs. 4-9). solver: "auto" ("threshold"), "heap" (2602.03048 Algorithm 1),
    "dp" or "reference"; all return the same allocation: units in order of larger gain, then smaller current budget,
    then lower index. backend: "auto", "cython", "numba", "numpy" or "triton". threads: for the Cython threshold solver
    at large M.

    Returns int64 [M], on the device of the input. A tensor on a GPU is allocated there (any value but tables and custom
    gains, by threshold) and nothing waits for it; so its pass rates are not checked, and what is none gains nothing.
    Raises BudgetError if no allocation has that total, ValueError naming the argument (and the first index and its
    value) for anything else that is wrong.

    >>> allocate([0.1, 0.5, 0.9], 24)
    array([ 2, 20,  2])
    >>> from coba_core import KnapsackValue
    >>> allocate([0.4, 0.1], 6, high=16, value=KnapsackValue())
    array([4, 2])
    """
    if type(pass_rates) is not np.ndarray and is_tensor(pass_rates):
        return _allocate_tensor(pass_rates, total_budget, low, high, value, solver, backend, threads)
    try:
        p = np.ascontiguousarray(pass_rates, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"pass_rates is not numbers [prompts]: {error}") from error
    if p.ndim != 1 or np.ndim(pass_rates) != 1:
        raise ValueError(f"pass_rates has shape {np.shape(pass_rates)}, not [prompts]")
    total = whole_number("total_budget", total_budget)
    low, high = whole_number("low", low), whole_number("high", high)
    size = p.shape[0]
    _check_bounds(size, total, low, high)
    if whole_number("threads", threads) < 1:
        raise ValueError(f"threads is {threads}, not at least 1")
    solver = "threshold" if solver == "auto" else solver
    module = kernels.select(backend, solver, type(value) is CustomValue)
    if (wrong := module.first_invalid(p)) >= 0:
        raise ValueError(f"pass_rates[{wrong}] is {p[wrong]}, not in [0, 1]")
    if value is None:
        value = CapabilityValue(*_PUBLISHED.at(1.0 - float(p.mean()) if size else 0.5))
    elif not isinstance(value, AnyValue):
        raise ValueError(f"value is {value!r}, not one of coba_core.values")
    elif low < value.concave_from:
        raise _not_concave(low, value)
    source: Gains | CustomValue
    if isinstance(value, Value):
        source = _form(value, size)
    elif isinstance(value, GainTable):
        source = value.table
        if source.shape[0] != size or source.shape[1] < high:
            raise ValueError(f"gains has shape {source.shape}, not [{size}, at least {high}]")
    elif isinstance(value, CustomValue):
        source = value
    else:
        raise ValueError(f"value is {value!r}, not one of coba_core.values")
    if threads > 1 and solver == "threshold":
        return module.threshold(p, source, low, high, total, threads)
    return getattr(module, solver)(p, source, low, high, total)


def _check_bounds(size: int, total: int, low: int, high: int) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"low is {low} and high is {high}: 0 <= low <= high does not hold")
    if not size * low <= total <= size * high:
        raise BudgetError(
            f"total_budget is {total}; {size} prompts with budgets in [{low}, {high}] take "
            f"from {size * low} to {size * high}"
        )
    if max(size, high) >= _LARGEST:
        raise ValueError(f"{size} prompts with budgets up to {high}: both must be below {_LARGEST}")


def _not_concave(low: int, value: AnyValue) -> ValueError:
    return ValueError(
        f"low is {low}, below {value.concave_from}, from where the gains of this value fall: "
        "an allocation by gains would be wrong"
    )


def _form(value: Value, size: int) -> Form:
    if value.prompts is not None and value.prompts != size:
        raise ValueError(f"the value has parameters for {value.prompts} prompts, pass_rates {size}")
    return value.form


def _allocate_tensor(
    pass_rates: Any,
    total_budget: int,
    low: int,
    high: int,
    value: AnyValue | None,
    solver: str,
    backend: str,
    threads: int,
) -> Any:
    """On a GPU by its kernels, without waiting for it (so pass rates are not looked at); else by the CPU's."""
    import torch

    if pass_rates.device.type == "cuda":
        solver = "threshold" if solver == "auto" else solver
        module = kernels.for_gpu(backend, solver, value is None or isinstance(value, Value))
        if module is not None:
            if pass_rates.ndim != 1:
                raise ValueError(f"pass_rates has shape {tuple(pass_rates.shape)}, not [prompts]")
            total = whole_number("total_budget", total_budget)
            low, high, size = whole_number("low", low), whole_number("high", high), pass_rates.shape[0]
            _check_bounds(size, total, low, high)
            if isinstance(value, Value):
                if low < value.concave_from:
                    raise _not_concave(low, value)
                form = _form(value, size)
            else:
                form = module.batch_form(pass_rates, _PUBLISHED, 5.0)
            return module.threshold(pass_rates, form, low, high, total)
    host = pass_rates.detach().to("cpu", torch.float64).numpy()
    budgets = allocate(
        host, total_budget, low=low, high=high, value=value, solver=solver, backend=backend, threads=threads
    )
    return torch.from_numpy(budgets).to(pass_rates.device)
