"""Allocators by the names that configurations use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import coba_core
from coba_core.rank import RankAllocator
from coba_core.state import finite_number

from .config import TrainConfig

PREFERENCES: dict[str, Callable[..., Any]] = {"beta": coba_core.BetaPreference, "power": coba_core.PowerPreference}
SATURATIONS: dict[str, Callable[..., Any]] = {
    "exponential": coba_core.Exponential,
    "mixed_group": coba_core.MixedGroup,
    "first_success": coba_core.FirstSuccess,
    "inverse_variance": coba_core.InverseVariance,
}


class LeanSchedule(coba_core.CapabilitySchedule):
    """α = 1, β = 1 + lean (1 - F̄): (1-p)^γ with γ = lean (1 - F̄), so that the abler the policy, the more goes to hard
    prompts. Of CapabilitySchedule it has the mean F̄ of the last `window` failure rates.

    >>> schedule = LeanSchedule(lean=4.0)
    >>> schedule.update(0.25)
    >>> schedule.alpha_beta()
    (1.0, 4.0)
    """

    kind = "LeanSchedule"

    def __init__(self, lean: float = 3.0, window: int = 10) -> None:
        super().__init__(window=window)
        self.lean = finite_number("lean", lean, at_least=0.0)

    def at(self, mean_failure_rate: float) -> tuple[float, float]:
        return 1.0, 1.0 + self.lean * (1.0 - mean_failure_rate)


def _named(table: dict[str, Callable[..., Any]], what: str, entry: Any) -> Any:
    """``"mixed_group"``, or ``{"name": "exponential", "tau": 5}``."""
    arguments = {"name": entry} if isinstance(entry, str) else dict(entry)
    name = arguments.pop("name", None)
    if name not in table:
        raise ValueError(f"allocator_args: {what}: {name!r} is none of {', '.join(table)}")
    return table[name](**arguments)


def make_allocator(config: TrainConfig, dataset_size: int, device: torch.device) -> coba_core.Allocator:
    """The allocator that ``config.allocator`` and ``allocator_args`` describe.

    With a policy on a GPU, ``coba`` and ``coba_explore_first`` keep history and budgets there
    (:mod:`coba_core.device`), where Triton is installed, unless they ask for what only the CPU's has: noise, a solver
    or a backend.

    coba, coba_explore_first, linear, fixed, lean: ``saturation``, ``history`` (fields of PassRateHistory), ``noise``;
    the rest goes to the schedule. knapsack, rank, coba_released, uniform: their own keyword arguments. value:
    ``preference`` and ``saturation``, such as ``{name: power, a: 0, b: 2}`` and ``mixed_group``.
    """
    name, arguments = config.allocator, dict(config.allocator_args)
    common: dict[str, Any] = {"low": config.budget_low, "high": config.budget_high}
    for key in ("solver", "backend"):
        if key in arguments:
            common[key] = arguments.pop(key)
    usual = "mixed_group" if name == "lean" else "exponential"
    saturation = _named(SATURATIONS, "saturation", arguments.pop("saturation", usual))
    try:
        if "history" in arguments:
            common["history"] = coba_core.PassRateHistory(**arguments.pop("history"))
        if name == "uniform":
            return coba_core.UniformAllocator(**common, **arguments)
        if name == "rank":
            passes = {} if "refresh_every" in arguments else {"dataset_size": dataset_size}
            return RankAllocator(**{**passes, **common, **arguments})
        common |= {"noise": arguments.pop("noise", 0.0), "seed": config.seed}
        if name == "coba_released":
            return coba_core.CapabilityAllocator.released(**common, **arguments)
        if name == "knapsack":
            return coba_core.KnapsackAllocator(**common, **arguments)
        if name == "value":
            flat = {"name": "power", "a": 0, "b": 0}
            preference = _named(PREFERENCES, "preference", arguments.pop("preference", flat))
            return coba_core.ValueAllocator(preference * saturation, **common, **arguments)
        schedule: coba_core.CapabilitySchedule | coba_core.FixedSchedule | coba_core.LinearSchedule
        if name == "fixed":
            schedule = coba_core.FixedSchedule(**arguments)
        elif name == "lean":
            schedule = LeanSchedule(**arguments)
        elif name == "linear":
            schedule = coba_core.LinearSchedule(**{"steps": config.steps, **arguments})
        else:
            direction = "explore_first" if name == "coba_explore_first" else "exploit_first"
            schedule = coba_core.CapabilitySchedule(**{"direction": direction, **arguments})
        plain = not common["noise"] and not {"solver", "backend"} & set(common)
        if device.type == "cuda" and plain and type(schedule) is coba_core.CapabilitySchedule:
            if coba_core.kernels.for_gpu() is not None:
                return on_device(dataset_size, saturation, schedule, config, device)
        return coba_core.CapabilityAllocator(saturation, schedule, **common)
    except TypeError as error:  # an argument that the class does not know
        raise ValueError(f"allocator_args: {error}") from error


def on_device(
    dataset_size: int,
    saturation: coba_core.values.Saturation,
    schedule: coba_core.CapabilitySchedule,
    config: TrainConfig,
    device: torch.device,
) -> coba_core.Allocator:
    """CoBA's allocator kept on `device`; its prompts are their places in the data set."""
    from coba_core.device import DeviceCapabilityAllocator, DevicePassRateHistory

    history = DevicePassRateHistory(dataset_size, device=device, **dict(config.allocator_args).get("history", {}))
    bounds: dict[str, Any] = {"low": config.budget_low, "high": config.budget_high}
    return DeviceCapabilityAllocator(dataset_size, saturation, schedule, history=history, device=device, **bounds)
