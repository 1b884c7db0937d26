"""coba_core: how many rollouts each prompt of a reinforcement-learning step gets, decided exactly and in microseconds.

A training loop needs five names::

    >>> import coba_core
    >>> allocator = coba_core.CapabilityAllocator(high=16)
    >>> prompt_ids = ["easy", "medium", "hard"]
    >>> budgets = allocator.allocate(prompt_ids, 24)
    >>> rows = coba_core.repeat_index(budgets)
    >>> rewards = [1.0] * 8 + [0.0, 1.0] * 4 + [0.0] * 8  # one rollout a row, generated and scored by the trainer
    >>> advantages = coba_core.group_advantages(rewards, rows)
    >>> allocator.update(prompt_ids, rewards, rows)
    >>> allocator.allocate(prompt_ids, 24)
    array([ 4, 16,  4])

and the stateless call is ``coba_core.allocate(pass_rates, total_budget)``.
"""

from coba_core.allocate import BudgetError, allocate
from coba_core.allocators import (
    Allocator,
    BudgetWarning,
    CapabilityAllocator,
    KnapsackAllocator,
    ReleasedAllocator,
    UniformAllocator,
    ValueAllocator,
)
from coba_core.groups import group_advantages, pad_to_multiple, prompt_weights, repeat_index
from coba_core.history import PassRateHistory
from coba_core.rank import RankAllocator
from coba_core.schedules import CapabilitySchedule, FixedSchedule, LinearSchedule
from coba_core.temperature import EntropyTemperature
from coba_core.values import (
    BetaPreference,
    CapabilityValue,
    CustomValue,
    Exponential,
    FirstSuccess,
    GainTable,
    InverseVariance,
    KnapsackValue,
    MixedGroup,
    PowerPreference,
    Value,
)

__version__ = "0.1.0"

__all__ = [
    "Allocator",
    "BetaPreference",
    "BudgetError",
    "BudgetWarning",
    "CapabilityAllocator",
    "CapabilitySchedule",
    "CapabilityValue",
    "CustomValue",
    "EntropyTemperature",
    "Exponential",
    "FirstSuccess",
    "FixedSchedule",
    "GainTable",
    "InverseVariance",
    "KnapsackAllocator",
    "KnapsackValue",
    "LinearSchedule",
    "MixedGroup",
    "PassRateHistory",
    "PowerPreference",
    "RankAllocator",
    "ReleasedAllocator",
    "UniformAllocator",
    "Value",
    "ValueAllocator",
    "allocate",
    "group_advantages",
    "pad_to_multiple",
    "prompt_weights",
    "repeat_index",
]
