"""The kernels on a card, under the names that they have in the other backends; triton_*.py hold them.

`threshold` and the gains are numpy_backend.py's, bit for bit. No host round trip, no waiting, no gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from coba_core.kernels.numpy_backend import EXPONENTIAL, Form
from coba_core.kernels.triton_gains import (
    capability_form,
    gains,
    log_density,
    log_gains,
    log_gains_and_gains,
    saturation,
)
from coba_core.kernels.triton_groups import (
    capability_numbers,
    group_advantages,
    group_statistics,
    history_rates,
    history_update,
    observe_failure_rate,
    repeat_index,
    success_counts,
)
from coba_core.kernels.triton_threshold import threshold, threshold_kernel
from coba_core.schedules import CapabilitySchedule

__all__ = [
    "INTERPRETED",
    "batch_form",
    "capability_form",
    "capability_numbers",
    "device_form",
    "gains",
    "group_advantages",
    "group_statistics",
    "history_rates",
    "history_update",
    "log_density",
    "log_gains",
    "log_gains_and_gains",
    "observe_failure_rate",
    "repeat_index",
    "runs_on",
    "saturation",
    "success_counts",
    "threshold",
    "usable",
]


INTERPRETED = not isinstance(threshold_kernel, triton.JITFunction)
"""Whether TRITON_INTERPRET was set when Triton was imported: the kernels then run on the CPU, slowly, for tests."""


def usable() -> tuple[bool, str]:
    """Whether there is a GPU to compile for, and if not why."""
    if INTERPRETED:
        return False, "TRITON_INTERPRET is set"
    return (True, "") if torch.cuda.is_available() else (False, "no CUDA or ROCm device")


def device_form(saturation: int, numbers: torch.Tensor) -> Form:
    """A form whose four numbers are the first of a tensor."""
    parts: list[Any] = [numbers[i : i + 1] for i in range(4)]
    return Form(saturation, *parts)


def batch_form(p: torch.Tensor, schedule: CapabilitySchedule, tau: float) -> Form:
    """The capability value at this batch's own failure rate (2602.03048 eqs. 4-9), its numbers on the card."""
    failures = (1.0 - p.detach().double().mean()).reshape(1)
    updates = torch.ones(1, dtype=torch.int64, device=p.device)
    numbers = capability_numbers(failures, updates, schedule, math.log(tau), 1.0 / tau, 1.0)
    return device_form(EXPONENTIAL, numbers)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels take tensors of this device: a card's, or the host's under Triton's interpreter."""
    return device.type == "cuda" or (device.type == "cpu" and INTERPRETED)
