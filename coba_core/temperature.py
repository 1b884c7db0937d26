"""The temperature that holds the policy's entropy at its first value (2505.18573 eqs. 4 and 5)."""

from __future__ import annotations

import math
from typing import Any

from coba_core.state import State, check_state, finite_number, whole_number


def _checked_entropy(name: str, entropy: Any) -> float:
    """A number above 0 out of a Python or NumPy number or a tensor of one element; ValueError otherwise."""
    if getattr(entropy, "ndim", 0):
        raise ValueError(f"{name} has {entropy.ndim} dimensions, not one number")
    number = finite_number(name, entropy)
    if number <= 0.0:
        raise ValueError(f"{name} is {number}: a policy without entropy has no temperature that would restore it")
    return number


class EntropyTemperature:
    """``τ ← clip(τ (1 + τ ln(H*/H) / (ln V + ln ln V)), low, high)``, once a step (2505.18573 eq. 4).

    H: the step's mean token entropy, in nats, of the sampled positions at the temperature they were sampled at. V:
    `vocab_size`, at least 3. H*: `target_entropy`, or the mean entropy of the first `measure_steps` steps, during which
    τ stays at `initial`.

    Annealing (eq. 5), if `total_steps` T is given: from step t_a = `anneal_start` (⌊0.6 T⌋) on, the target of step t is
    H* (η + (1-η) ½ (1 + cos(π (t-t_a)/(T-t_a)))), η = `eta`, and it stays at η H* after T. Steps count from 1; what
    :meth:`update` returns after the t-th entropy is the temperature of step t+1, made for the target of step t+1.

    Bounds. The published rule has none, and an entropy that is stuck low drives its τ to infinity, as τ multiplies its
    own growth. low = ½ and high = 2 let the rule undo any sharpening or flattening of the logits up to a factor of two,
    which is more than it is meant for. Beyond 2 the tail of a large vocabulary takes over: 150,000 tokens that lie 25
    below the best logit weigh 150,000 e^(-25/2) = 0.6 of it at τ = 2 and 36 times it at τ = 3; samples become noise,
    whatever their entropy. Below ½ the samples of a group become copies, and a group without spread teaches nothing.
    With over 10⁵ tokens high = 1.5 is the more careful choice. As τ itself is clipped, and not a sum behind it, it
    leaves a bound at the first step that asks for it.

    Sampling and log-probabilities both have to divide the logits by :attr:`temperature`. Raises ValueError for
    settings that contradict each other and for an entropy that is not a finite number above 0.

    >>> control = EntropyTemperature(vocab_size=151_936)
    >>> control.update(0.5)  # measures H*
    1.0
    >>> round(control.update(0.25), 4)  # half the entropy: hotter
    1.0481
    """

    kind = "EntropyTemperature"

    def __init__(
        self,
        vocab_size: int,
        *,
        initial: float = 1.0,
        target_entropy: float | None = None,
        measure_steps: int = 1,
        total_steps: int | None = None,
        anneal_start: int | None = None,
        eta: float = 0.9,
        low: float = 0.5,
        high: float = 2.0,
    ) -> None:
        self.vocab_size = whole_number("vocab_size", vocab_size, at_least=3)  # from 3 on ln ln|V| is positive
        self.measure_steps = whole_number("measure_steps", measure_steps, at_least=1)
        self.low = finite_number("low", low, above=0.0)
        self.high = finite_number("high", high, at_least=self.low)
        self.eta = finite_number("eta", eta, above=0.0, at_most=1.0)
        if total_steps is None:
            if anneal_start is not None:
                raise ValueError(f"anneal_start is {anneal_start}, which needs total_steps")
        else:
            total_steps = whole_number("total_steps", total_steps, at_least=1)
            anneal_start = 3 * total_steps // 5 if anneal_start is None else whole_number("anneal_start", anneal_start)
            if not 0 <= anneal_start < total_steps:
                raise ValueError(
                    f"anneal_start is {anneal_start} and total_steps is {total_steps}: "
                    "0 <= anneal_start < total_steps does not hold"
                )
        self.total_steps, self.anneal_start = total_steps, anneal_start
        self._tau = finite_number("initial", initial, at_least=self.low, at_most=self.high)
        self._target = None if target_entropy is None else _checked_entropy("target_entropy", target_entropy)
        self._measured: list[float] = []
        self._steps = 0
        self._entropy: float | None = None

    @property
    def temperature(self) -> float:
        """τ of the next step."""
        return self._tau

    @property
    def target_entropy(self) -> float | None:
        """H*, before annealing; None while it is being measured."""
        return self._target

    def annealing(self, step: int) -> float:
        """The factor on H* at a step (counted from 1), from 1 down to η (eq. 5).

        >>> [round(EntropyTemperature(32_000, total_steps=10).annealing(t), 3) for t in (6, 8, 10, 11)]
        [1.0, 0.95, 0.9, 0.9]
        """
        if self.total_steps is None or self.anneal_start is None or step <= self.anneal_start:
            return 1.0
        done = min((step - self.anneal_start) / (self.total_steps - self.anneal_start), 1.0)
        return self.eta + (1.0 - self.eta) * 0.5 * (1.0 + math.cos(math.pi * done))

    def update(self, entropy: Any) -> float:
        """Takes the entropy of the step just sampled and returns the temperature of the next.

        entropy: a Python or NumPy number or a tensor of no dimension. ValueError, and nothing changed, if it is not a
        finite number above 0.
        """
        observed = _checked_entropy("entropy", entropy)
        self._steps += 1
        self._entropy = observed
        if self._target is None:
            self._measured.append(observed)
            if len(self._measured) == self.measure_steps:
                self._target = math.fsum(self._measured) / self.measure_steps
                self._measured = []
        else:
            target = self._target * self.annealing(self._steps + 1)
            scale = math.log(self.vocab_size) + math.log(math.log(self.vocab_size))
            tau = self._tau * (1.0 + self._tau * math.log(target / observed) / scale)
            self._tau = min(max(tau, self.low), self.high)
        return self._tau

    @property
    def metrics(self) -> dict[str, float]:
        """What a logger takes: the next step's temperature, its target where known, and the last entropy taken."""
        metrics = {"temperature": self._tau}
        if self._target is not None:
            metrics["target_entropy"] = self._target * self.annealing(self._steps + 1)
        if self._entropy is not None:
            metrics["entropy"] = self._entropy
        return metrics

    def state_dict(self) -> State:
        """JSON-able state, H* with it, so that a resumed run does not measure it anew."""
        return {
            "kind": self.kind,
            "version": 1,
            "vocab_size": self.vocab_size,
            "temperature": self._tau,
            "target_entropy": self._target,
            "measured": list(self._measured),
            "steps": self._steps,
            "entropy": self._entropy,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores a state; ValueError, and nothing changed, if it is not whole or of another vocabulary or bounds."""
        check_state(
            state, self.kind, 1, ("vocab_size", "temperature", "target_entropy", "measured", "steps", "entropy")
        )
        where = f"state of {self.kind}"
        if state["vocab_size"] != self.vocab_size:
            raise ValueError(f"{where}: its vocab_size is {state['vocab_size']!r}, this one's is {self.vocab_size}")
        tau = finite_number(f"{where}: temperature", state["temperature"], at_least=self.low, at_most=self.high)
        target, steps, measured, entropy = (state[k] for k in ("target_entropy", "steps", "measured", "entropy"))
        if target is not None:
            target = _checked_entropy(f"{where}: target_entropy", target)
        if entropy is not None:
            entropy = _checked_entropy(f"{where}: entropy", entropy)
        if type(steps) is not int or steps < 0:
            raise ValueError(f"{where}: steps is {steps!r}, not a count")
        if not isinstance(measured, list) or len(measured) >= self.measure_steps or (measured and target is not None):
            raise ValueError(f"{where}: measured is {measured!r}, not fewer than {self.measure_steps} entropies")
        if (target is None and len(measured) != steps) or (entropy is None) != (steps == 0):
            raise ValueError(f"{where}: steps is {steps}, which contradicts measured, target_entropy or entropy")
        measured = [_checked_entropy(f"{where}: measured[{i}]", x) for i, x in enumerate(measured)]
        self._tau, self._target, self._measured, self._steps, self._entropy = tau, target, measured, steps, entropy
