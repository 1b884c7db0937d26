"""From the policy's failure rate to the preference: (α, β) step by step.

Every schedule has `alpha_beta()` (None until it can tell), `update(failure_rate)` after a step, and a JSON-able state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

from coba_core.state import State, check_state, finite_number, whole_number

Direction = Literal["exploit_first", "explore_first"]


def transformed_failure_rate(mean_failure_rate: float, gamma: float = 10.0) -> float:
    """F̃ = F̄ if F̄ > ½, else σ(γ(F̄ - ½)) (2602.03048 eq. 6).

    >>> transformed_failure_rate(0.75), round(transformed_failure_rate(0.25), 4)
    (0.75, 0.0759)
    """
    if mean_failure_rate > 0.5:
        return mean_failure_rate
    x = gamma * (mean_failure_rate - 0.5)
    return 1.0 / (1.0 + math.exp(-x)) if x > -700.0 else math.exp(x)


class Schedule(ABC):
    """(α, β) of the Beta preference, step by step."""

    kind: str

    @abstractmethod
    def alpha_beta(self) -> tuple[float, float] | None:
        """The preference for the next step; None while nothing is known."""

    @abstractmethod
    def update(self, failure_rate: float) -> None:
        """Takes the failure rate 1 - S of the step that has just been scored."""

    def state_dict(self) -> State:
        """JSON-able state; ``load_state_dict`` of a like schedule restores it."""
        return {"kind": self.kind, "version": 1}

    def load_state_dict(self, state: State) -> None:
        """ValueError, and nothing changed, if the state is of another kind, newer, or not whole."""
        check_state(state, self.kind, 1, ())


class FixedSchedule(Schedule):
    """The same (α, β) at every step: the papers' fixed preferences, such as (10.5, 1.5).

    >>> FixedSchedule(10.5, 1.5).alpha_beta()
    (10.5, 1.5)
    """

    kind = "FixedSchedule"

    def __init__(self, alpha: float, beta: float) -> None:
        self.alpha = finite_number("alpha", alpha, above=0.0)
        self.beta = finite_number("beta", beta, above=0.0)

    def alpha_beta(self) -> tuple[float, float]:
        return self.alpha, self.beta

    def update(self, failure_rate: float) -> None:
        finite_number("failure_rate", failure_rate, at_least=0.0, at_most=1.0)


class LinearSchedule(Schedule):
    """α goes from `start` to `end` in `steps` equal steps and stays there; β = κ - α (the paper's stepping baseline,
    α 10 → 1).

    >>> schedule = LinearSchedule(start=10, end=1, steps=3)
    >>> for _ in range(2):
    ...     schedule.update(0.5)
    >>> schedule.alpha_beta()
    (4.0, 7.0)
    """

    kind = "LinearSchedule"

    def __init__(self, steps: int, start: float = 10.0, end: float = 1.0, kappa: float = 11.0) -> None:
        self.steps = whole_number("steps", steps, at_least=1)
        self.kappa = finite_number("kappa", kappa, above=0.0)
        self.start = finite_number("start", start, above=0.0, below=self.kappa)
        self.end = finite_number("end", end, above=0.0, below=self.kappa)
        self.step = 0

    def alpha_beta(self) -> tuple[float, float]:
        done = min(self.step / self.steps, 1.0)
        alpha = self.start + done * (self.end - self.start)
        return alpha, self.kappa - alpha

    def update(self, failure_rate: float) -> None:
        finite_number("failure_rate", failure_rate, at_least=0.0, at_most=1.0)
        self.step += 1

    def state_dict(self) -> State:
        return {**super().state_dict(), "step": self.step}

    def load_state_dict(self, state: State) -> None:
        check_state(state, self.kind, 1, ("step",))
        self.step = whole_number(f"state of {self.kind}: step", state["step"], at_least=0)


class CapabilitySchedule(Schedule):
    """α = clip(α_min + λ F̃, α_min, α_max), β = κ - α, F̃ of the mean F̄ of the last `window` failure rates
    (2602.03048 eqs. 4-7).

    kappa: α + β. lam: how far α moves. gamma: steepness of F̃ below ½. alpha_min, alpha_max: (κ-λ)/2 and κ-α_min
    unless given, so that F̃ = ½ gives α = β; lam = kappa - 2 gives the released code's range, 1 to κ-1.
    direction: "exploit_first" (the paper: much failure, large α, easy prompts first) or "explore_first" (α and β
    change places).

    >>> schedule = CapabilitySchedule()
    >>> schedule.alpha_beta() is None
    True
    >>> schedule.update(0.75)
    >>> schedule.alpha_beta()
    (7.5, 3.5)
    """

    kind = "CapabilitySchedule"

    def __init__(
        self,
        kappa: float = 11.0,
        lam: float = 8.0,
        gamma: float = 10.0,
        window: int = 10,
        alpha_min: float | None = None,
        alpha_max: float | None = None,
        direction: Direction = "exploit_first",
    ) -> None:
        self.kappa = finite_number("kappa", kappa, above=0.0)
        self.lam = finite_number("lam", lam, at_least=0.0)
        self.gamma = finite_number("gamma", gamma, at_least=0.0)
        self.window = whole_number("window", window, at_least=1)
        if direction not in ("exploit_first", "explore_first"):
            raise ValueError(f"direction is {direction!r}, not 'exploit_first' or 'explore_first'")
        self.alpha_min = (self.kappa - self.lam) / 2.0 if alpha_min is None else finite_number("alpha_min", alpha_min)
        self.alpha_max = self.kappa - self.alpha_min if alpha_max is None else finite_number("alpha_max", alpha_max)
        if not 0.0 < self.alpha_min <= self.alpha_max < self.kappa:
            raise ValueError(
                f"alpha_min is {self.alpha_min} and alpha_max is {self.alpha_max}: "
                f"0 < alpha_min <= alpha_max < kappa = {self.kappa} does not hold; "
                "a lam of kappa - 2 gives a range from 1 to kappa - 1"
            )
        self.direction: Direction = direction
        self.failure_rates: list[float] = []

    def mean_failure_rate(self) -> float | None:
        """F̄; None before the first update."""
        return math.fsum(self.failure_rates) / len(self.failure_rates) if self.failure_rates else None

    def alpha_beta(self) -> tuple[float, float] | None:
        mean = self.mean_failure_rate()
        return None if mean is None else self.at(mean)

    def at(self, mean_failure_rate: float) -> tuple[float, float]:
        """(α, β) at a given F̄."""
        alpha = self.alpha_min + self.lam * transformed_failure_rate(mean_failure_rate, self.gamma)
        alpha = min(max(alpha, self.alpha_min), self.alpha_max)
        beta = self.kappa - alpha
        return (alpha, beta) if self.direction == "exploit_first" else (beta, alpha)

    def update(self, failure_rate: float) -> None:
        rate = finite_number("failure_rate", failure_rate, at_least=0.0, at_most=1.0)
        self.failure_rates = [*self.failure_rates, rate][-self.window :]

    def state_dict(self) -> State:
        return {**super().state_dict(), "failure_rates": list(self.failure_rates)}

    def load_state_dict(self, state: State) -> None:
        check_state(state, self.kind, 1, ("failure_rates",))
        rates: Any = state["failure_rates"]
        if not isinstance(rates, list):
            raise ValueError(f"state of {self.kind}: failure_rates is {rates!r}, not a list")
        checked = [
            finite_number(f"state of {self.kind}: failure_rates[{i}]", rate, at_least=0.0, at_most=1.0)
            for i, rate in enumerate(rates)
        ]
        self.failure_rates = checked[-self.window :]
