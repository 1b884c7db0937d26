"""What a rollout is worth: V(B, p) = w(p) s(B, p), a preference times a saturation.

The preference w says which pass rates are worth learning from now; the saturation s says how fast more rollouts of one
prompt stop helping. Every preference goes with every saturation::

    >>> value = BetaPreference(2.0, 3.0) * MixedGroup()
    >>> value.gains([0.25, 0.5], [2, 2]).round(4)
    array([0.3164, 0.375 ])

A table of gains (:class:`GainTable`) and a user's own compiled gain (:class:`CustomValue`) are values too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coba_core.kernels.numpy_backend import (
    EXPONENTIAL,
    FIRST_SUCCESS,
    INVERSE_VARIANCE,
    MIXED_GROUP,
    Floats,
    Form,
    Ints,
    exp,
    first_invalid,
    log_gain_table,
    log_gains,
)

Parameter = float | Floats
"""A number for all prompts, or a float64 array [M] with one a prompt."""

_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)


def log_beta(alpha: Parameter, beta: Parameter) -> Parameter:
    """ln B(α, β), α, β > 0, to some 2e-15 of max(1, abs(ln B)), without the cancellation of three large log-gammas.

    >>> round(log_beta(2.0, 3.0), 12) == round(math.log(1 / 12), 12)
    True
    """
    if isinstance(alpha, float) and isinstance(beta, float):
        return _log_beta_of(alpha, beta)
    return np.asarray(np.vectorize(_log_beta_of, otypes=[np.float64])(alpha, beta))


def _log_beta_of(alpha: float, beta: float) -> float:
    a, b = (alpha, beta) if alpha < beta else (beta, alpha)
    total = a + b
    if b < 20.0:
        if a > 1e-280:
            return math.log(math.gamma(a) * math.gamma(b) / math.gamma(total))
        return math.log1p(a / b) - math.log(a)  # B(a, b) is 1/a + 1/b, for a so small
    if a < 10.0:  # ln Γ(a) less Stirling's series for ln Γ(a+b) - ln Γ(b)
        rise = (b - 0.5) * math.log1p(a / b) + a * (math.log(total) - 1.0) + _stirling_rest(total) - _stirling_rest(b)
        return math.lgamma(a) - rise
    return (
        0.5 * math.log(2.0 * math.pi * (1.0 / a + 1.0 / b))
        - a * math.log1p(b / a)
        - b * math.log1p(a / b)
        + (_stirling_rest(a) + _stirling_rest(b) - _stirling_rest(total))
    )


def _stirling_rest(x: float) -> float:
    """ln Γ(x) - ((x-½) ln x - x + ½ ln 2π) for x >= 10."""
    square = 1.0 / x / x
    rest = _STIRLING[-1]
    for coefficient in _STIRLING[-2::-1]:
        rest = rest * square + coefficient
    return rest / x


def _parameter(name: str, x: Any, *, positive: bool = False) -> Parameter:
    """x as a float or float64 [M]; finite (and above 0 if positive)."""
    if isinstance(x, float) and math.isfinite(x) and (x > 0.0 or not positive):
        return x
    array = np.asarray(x, dtype=np.float64)
    if array.ndim > 1:
        raise ValueError(f"{name} is a number or one number a prompt, not an array of shape {array.shape}")
    wrong = ~np.isfinite(array) | ((array <= 0.0) if positive else False)
    if np.any(wrong):
        need = "a finite number above 0" if positive else "a finite number"
        where = "" if array.ndim == 0 else f"[{int(np.flatnonzero(wrong)[0])}]"
        raise ValueError(f"{name}{where} is {np.atleast_1d(array)[np.atleast_1d(wrong)][0]}, not {need}")
    return float(array) if array.ndim == 0 else np.ascontiguousarray(array)


def _same_prompts(**parameters: Parameter) -> None:
    """ValueError if two parameters are arrays of different lengths."""
    sizes = {name: len(x) for name, x in parameters.items() if isinstance(x, np.ndarray)}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{' and '.join(f'{name} has {n}' for name, n in sizes.items())} numbers: not one a prompt")


class Preference(ABC):
    """w(p) = p^a (1-p)^b / e^c."""

    @abstractmethod
    def exponents(self) -> tuple[Parameter, Parameter, Parameter]:
        """(a, b, c)."""

    def log_weights(self, pass_rates: npt.ArrayLike) -> Floats:
        """ln w(p), [M]; -inf where the weight is 0."""
        p = np.asarray(pass_rates, dtype=np.float64)
        a, b, c = self.exponents()
        with np.errstate(divide="ignore", invalid="ignore"):
            log_p = np.where(np.equal(a, 0.0), 0.0, a * np.log(p))
            log_q = np.where(np.equal(b, 0.0), 0.0, b * np.log1p(-p))
            return log_p + log_q - c

    def __mul__(self, saturation: Saturation) -> Value:
        return Value(self, saturation)


@dataclass(frozen=True, eq=False)
class BetaPreference(Preference):
    """w(p) = p^(α-1) (1-p)^(β-1) / B(α, β): the Beta density (2602.03048 eq. 5).

    alpha, beta: above 0; numbers, or float64 [M]. ValueError otherwise.

    >>> round(float(np.exp(BetaPreference(2.0, 2.0).log_weights([0.5])[0])), 12)
    1.5
    """

    alpha: Parameter
    beta: Parameter

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", _parameter("alpha", self.alpha, positive=True))
        object.__setattr__(self, "beta", _parameter("beta", self.beta, positive=True))
        _same_prompts(alpha=self.alpha, beta=self.beta)

    def exponents(self) -> tuple[Parameter, Parameter, Parameter]:
        return self.alpha - 1.0, self.beta - 1.0, log_beta(self.alpha, self.beta)


@dataclass(frozen=True, eq=False)
class PowerPreference(Preference):
    """w(p) = p^a (1-p)^b, a, b >= 0. (1, 2) is Knapsack-RL's information gain (2509.25849), (0, γ) leans to what is
    left to learn, (0, 0) is no preference.

    >>> round(float(np.exp(PowerPreference(1, 2).log_weights([0.5])[0])), 12)
    0.125
    """

    a: Parameter = 0.0
    b: Parameter = 0.0

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            x = _parameter(name, getattr(self, name))
            if np.any(np.asarray(x) < 0.0):
                raise ValueError(f"{name} is {np.min(x)}, not a finite number of at least 0")
            object.__setattr__(self, name, x)
        _same_prompts(a=self.a, b=self.b)

    def exponents(self) -> tuple[Parameter, Parameter, Parameter]:
        return self.a, self.b, 0.0


class Saturation(ABC):
    """s(B, p); `concave_from` is the smallest B from which its gains fall, below which a greedy rule is wrong."""

    concave_from: ClassVar[int]

    @abstractmethod
    def form(self, a: Parameter, b: Parameter, c: Parameter) -> Form:
        """The kernels' form of p^a (1-p)^b e^-c s(B, p)."""

    @abstractmethod
    def levels(self, p: Floats, budgets: Floats) -> Floats:
        """s(B, p), [M]."""


@dataclass(frozen=True, eq=False)
class Exponential(Saturation):
    """s = 1 - e^(-kB), k = p(1-p)/τ; gain e^(-kB) (1 - e^-k) (2602.03048 eq. 8). τ: rollouts, above 0.

    >>> Exponential(5.0).levels(np.array([0.5]), np.array([20.0])).round(4)
    array([0.6321])
    """

    tau: Parameter = 5.0
    concave_from: ClassVar[int] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", _parameter("tau", self.tau, positive=True))
        if np.min(self.tau) < 1e-300:
            raise ValueError(f"tau is {np.min(self.tau)}, too small: 1/tau is not finite")

    def form(self, a: Parameter, b: Parameter, c: Parameter) -> Form:
        _same_prompts(preference=a if isinstance(a, np.ndarray) else b, tau=self.tau)
        scale = c + (math.log(self.tau) if isinstance(self.tau, float) else np.log(self.tau))
        return Form(EXPONENTIAL, a + 1.0, b + 1.0, scale, 1.0 / self.tau)

    def levels(self, p: Floats, budgets: Floats) -> Floats:
        return -np.expm1(-(p * (1.0 - p) * budgets) / self.tau)


@dataclass(frozen=True, eq=False)
class MixedGroup(Saturation):
    """s = 1 - p^B - (1-p)^B, the chance that a group of B holds a success and a failure; gain p^B (1-p) + (1-p)^B p,
    falling from B = 1 (2509.25849).

    >>> MixedGroup().levels(np.array([0.5]), np.array([2.0]))
    array([0.5])
    """

    concave_from: ClassVar[int] = 1

    def form(self, a: Parameter, b: Parameter, c: Parameter) -> Form:
        return Form(MIXED_GROUP, a + 1.0, b + 1.0, c, 1.0)

    def levels(self, p: Floats, budgets: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            rare = np.minimum(p, 1.0 - p)
            return np.where(rare > 0.0, -np.expm1(budgets * np.log1p(-rare)) - rare**budgets, 0.0)


@dataclass(frozen=True, eq=False)
class FirstSuccess(Saturation):
    """s = 1 - (1-p)^B, the chance of at least one success; gain p (1-p)^B.

    >>> FirstSuccess().levels(np.array([0.5]), np.array([3.0]))
    array([0.875])
    """

    concave_from: ClassVar[int] = 0

    def form(self, a: Parameter, b: Parameter, c: Parameter) -> Form:
        return Form(FIRST_SUCCESS, a + 1.0, b, c, 1.0)

    def levels(self, p: Floats, budgets: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(budgets > 0.0, -np.expm1(budgets * np.log1p(-p)), 0.0)


@dataclass(frozen=True, eq=False)
class InverseVariance(Saturation):
    """s = -p(1-p)/B, minus the variance of the estimated pass rate; gain p(1-p)/(B(B+1)), falling from B = 1. With
    PowerPreference(0, 0) the allocation is Neyman's, B ∝ sqrt(p(1-p)).

    >>> InverseVariance().levels(np.array([0.5]), np.array([4.0]))
    array([-0.0625])
    """

    concave_from: ClassVar[int] = 1

    def form(self, a: Parameter, b: Parameter, c: Parameter) -> Form:
        return Form(INVERSE_VARIANCE, a + 1.0, b + 1.0, c, 1.0)

    def levels(self, p: Floats, budgets: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((p > 0.0) & (p < 1.0), -(p * (1.0 - p)) / budgets, 0.0)


def _counts(budgets: npt.ArrayLike, prompts: int) -> Ints:
    """budgets as int64 [M]; ValueError if they are no counts, or not one a prompt."""
    b = np.asarray(budgets)
    if b.shape != (prompts,) or (prompts and b.dtype.kind not in "iu"):
        raise ValueError(f"budgets has shape {b.shape} and dtype {b.dtype}, not {prompts} integers")
    if prompts and b.min() < 0:
        i = int((b < 0).argmax())
        raise ValueError(f"budgets[{i}] is {b[i]}, which must not be negative")
    return b.astype(np.int64, copy=False)


class AnyValue(ABC):
    """What every value offers; :func:`coba_core.allocate` takes any of them."""

    concave_from: int
    """The smallest budget from which the gains fall: `low` may not lie below it."""

    @abstractmethod
    def log_gains(self, pass_rates: npt.ArrayLike, budgets: npt.ArrayLike) -> Floats:
        """ln(V(B+1, p) - V(B, p)), [M], without computing the difference."""

    def gains(self, pass_rates: npt.ArrayLike, budgets: npt.ArrayLike) -> Floats:
        """V(B+1, p) - V(B, p), [M]."""
        return exp(self.log_gains(pass_rates, budgets))

    def log_gain_table(self, pass_rates: npt.ArrayLike, low: int, high: int) -> Floats:
        """Log gains at budgets low .. high-1, [M, high-low]."""
        columns = [self.log_gains(pass_rates, np.full(np.shape(pass_rates), b)) for b in range(low, high)]
        return np.stack(columns, axis=1) if columns else np.empty((len(np.asarray(pass_rates)), 0))

    @abstractmethod
    def reweighted(self, factors: Floats) -> AnyValue:
        """The same value with prompt i's worth multiplied by factors[i] > 0."""


@dataclass(frozen=True, eq=False)
class Value(AnyValue):
    """V(B, p) = w(p) s(B, p): a preference times a saturation.

    >>> value = Value(PowerPreference(0, 0), FirstSuccess())
    >>> value.gains([0.5], [1])
    array([0.25])
    >>> value.total([0.5, 0.5], [1, 2])
    1.25
    """

    preference: Preference
    saturation: Saturation
    factors: Floats | None = None

    @property
    def concave_from(self) -> int:  # type: ignore[override]
        return self.saturation.concave_from

    @cached_property
    def form(self) -> Form:
        """What the kernels compute with."""
        form = self.saturation.form(*self.preference.exponents())
        return form if self.factors is None else form._replace(log_scale=form.log_scale - np.log(self.factors))

    @cached_property
    def prompts(self) -> int | None:
        """How many prompts the per-prompt parameters are for; None if there are none."""
        sizes = {x.shape[0] for x in self.form[1:] if isinstance(x, np.ndarray)}
        if len(sizes) > 1:
            raise ValueError(f"the value's parameters are for different numbers of prompts: {sorted(sizes)}")
        return sizes.pop() if sizes else None

    def _rates(self, pass_rates: npt.ArrayLike) -> Floats:
        """pass_rates as float64 [M]; ValueError if they are no rates, or not as many as the parameters."""
        p = np.asarray(pass_rates, dtype=np.float64)
        if p.ndim != 1:
            raise ValueError(f"pass_rates has shape {p.shape}, not [prompts]")
        if (i := first_invalid(p)) >= 0:
            raise ValueError(f"pass_rates[{i}] is {p[i]}, not in [0, 1]")
        if self.prompts is not None and self.prompts != len(p):
            raise ValueError(f"the value has parameters for {self.prompts} prompts, pass_rates {len(p)}")
        return p

    def log_gains(self, pass_rates: npt.ArrayLike, budgets: npt.ArrayLike) -> Floats:
        p = self._rates(pass_rates)
        return log_gains(p, self.form, _counts(budgets, len(p)))

    def log_gain_table(self, pass_rates: npt.ArrayLike, low: int, high: int) -> Floats:
        return log_gain_table(self._rates(pass_rates), self.form, low, high)

    def values(self, pass_rates: npt.ArrayLike, budgets: npt.ArrayLike) -> Floats:
        """V(B, p), [M]; 0 where the saturation is 0, whatever the preference."""
        p = self._rates(pass_rates)
        level = self.saturation.levels(p, _counts(budgets, len(p)).astype(np.float64))
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            root = np.exp(0.5 * self.preference.log_weights(p))  # twice: w may overflow where w s does not
            value = root * level * root * (1.0 if self.factors is None else self.factors)
            return np.where(level == 0.0, 0.0, value)

    def total(self, pass_rates: npt.ArrayLike, budgets: npt.ArrayLike) -> float:
        """Σ V(B, p)."""
        return math.fsum(self.values(pass_rates, budgets).tolist())

    def reweighted(self, factors: Floats) -> Value:
        return Value(self.preference, self.saturation, factors if self.factors is None else self.factors * factors)


def CapabilityValue(alpha: Parameter, beta: Parameter, tau: Parameter = 5.0) -> Value:
    """Beta density × exponential saturation: CoBA-RL's capability-oriented value (2602.03048 eq. 9).

    >>> CapabilityValue(7.26, 3.74).gains([0.25, 0.75], [2, 2]).round(5)
    array([0.00186, 0.08907])
    """
    return Value(BetaPreference(alpha, beta), Exponential(tau))


def KnapsackValue() -> Value:
    """p (1-p)² × the chance of a mixed group: Knapsack-RL's value (2509.25849).

    >>> KnapsackValue().gains([0.5], [2])
    array([0.03125])
    """
    return Value(PowerPreference(1.0, 2.0), MixedGroup())


class GainTable(AnyValue):
    """A plain table: gains[i, B] is what rollout number B+1 of prompt i is worth. [M, W], finite, not negative, not
    rising along a row; W is at least the `high` of the allocation. ValueError names the first cell that is wrong.

    >>> GainTable([[0.5, 0.25, 0.125]]).gains([0.5], [1])
    array([0.25])
    """

    concave_from = 0

    def __init__(self, gains: npt.ArrayLike) -> None:
        table = np.ascontiguousarray(gains, dtype=np.float64)
        if table.ndim != 2:
            raise ValueError(f"gains is a table [prompts, rollouts], not an array of shape {table.shape}")
        rising = np.zeros(table.shape, dtype=np.bool_)
        rising[:, 1:] = table[:, 1:] > table[:, :-1]
        for wrong, what in (
            (~(np.isfinite(table) & (table >= 0.0)), "not a finite gain of at least 0"),
            (rising, "more than the gain before it"),
        ):
            if np.any(wrong):
                i, b = (int(x[0]) for x in np.nonzero(wrong))
                raise ValueError(f"gains[{i}, {b}] is {table[i, b]}, {what}")
        self.table: Floats = table + 0.0  # -0 and 0 are one gain

    def log_gains(self, pass_rates: npt.ArrayLike, budgets: npt.ArrayLike) -> Floats:
        with np.errstate(divide="ignore"):
            return np.log(self.gains(pass_rates, budgets))

    def gains(self, pass_rates: npt.ArrayLike, budgets: npt.ArrayLike) -> Floats:
        b = _counts(budgets, len(self.table))
        if b.size and b.max() >= self.table.shape[1]:
            i = int(b.argmax())
            raise ValueError(f"budgets[{i}] is {b[i]}: the table ends at {self.table.shape[1]} rollouts")
        return self.table[np.arange(len(b)), b]

    def reweighted(self, factors: Floats) -> GainTable:
        return GainTable(self.table * factors[:, None])


class CustomValue(AnyValue):
    """A user's own `@numba.njit` gain, inlined into the Numba heap and threshold.

    gain(p, B) -> float >= 0: what rollout number B+1 is worth at pass rate p; it must not rise in B from `low` on (the
    solvers trust this). Needs Numba; solver="reference" and the NumPy backend tabulate it.

    >>> import numba
    >>> @numba.njit
    ... def gain(p, budget):
    ...     return p * (1.0 - p) ** budget
    >>> CustomValue(gain).gains([0.5], [1])
    array([0.25])
    """

    def __init__(self, gain: Callable[[float, int], float], low: int = 0) -> None:
        if not hasattr(gain, "py_func"):
            raise ValueError(f"gain is {gain!r}, not a function compiled by numba.njit")
        if low < 0:
            raise ValueError(f"low is {low}, not at least 0")
        self.gain = gain
        self.concave_from = low
        self.factors: Floats | None = None

    def log_gains(self, pass_rates: npt.ArrayLike, budgets: npt.ArrayLike) -> Floats:
        with np.errstate(divide="ignore"):
            return np.log(self.gains(pass_rates, budgets))

    def gains(self, pass_rates: npt.ArrayLike, budgets: npt.ArrayLike) -> Floats:
        p = np.asarray(pass_rates, dtype=np.float64)
        b = _counts(budgets, len(p))
        gains = np.array([self.gain(x, n) for x, n in zip(p.tolist(), b.tolist(), strict=True)], dtype=np.float64)
        return gains if self.factors is None else gains * self.factors

    def table(self, pass_rates: Floats, low: int, high: int) -> Floats:
        """Gains at budgets low .. high-1, [M, high-low]."""
        columns = [self.gains(pass_rates, np.full(len(pass_rates), b)) for b in range(low, high)]
        return np.stack(columns, axis=1) if columns else np.empty((len(pass_rates), 0))

    def reweighted(self, factors: Floats) -> CustomValue:
        other = CustomValue(self.gain, self.concave_from)
        other.factors = factors if self.factors is None else self.factors * factors
        return other
