"""The kernels on a card, under the names that they have in the other backends; triton_*.py hold them.

`threshold` and the gains are numpy_backend.py's, bit for bit. No host round trip, no waiting, no gradients.
"""

from __future__ import annotations

import torch
import triton

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
from coba_core.kernels.triton_threshold import threshold

__all__ = [
    "capability_form",
    "capability_numbers",
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
]


def runs_on(device: torch.device) -> bool:
    """Whether the kernels take tensors of this device: a card's, or the host's under Triton's interpreter."""
    return device.type == "cuda" or (device.type == "cpu" and bool(triton.knobs.runtime.interpret))
