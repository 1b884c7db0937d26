"""From failure rates to (α, β)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coba_core import CapabilitySchedule, FixedSchedule, LinearSchedule
from coba_core.schedules import Schedule, transformed_failure_rate

FRACTIONS = st.floats(0.0, 1.0)


def schedules() -> list[Schedule]:
    return [CapabilitySchedule(window=3), FixedSchedule(10.5, 1.5), LinearSchedule(steps=5)]


# ---- capability ----------------------------------------------------------------------------------------------------


def test_vectors(vectors: Callable[[str], list[dict[str, Any]]]) -> None:
    cases = vectors("capability_schedules")
    assert cases
    for case in cases:
        settings = {key: value for key, value in case.items() if key not in ("failure_rates", "expected")}
        schedule = CapabilitySchedule(**settings)
        assert schedule.alpha_beta() is None
        assert schedule.mean_failure_rate() is None
        for rate, expected in zip(case["failure_rates"], case["expected"], strict=True):
            schedule.update(rate)
            assert schedule.mean_failure_rate() == pytest.approx(expected["mean_failure_rate"], rel=1e-14, abs=1e-15)
            transformed = transformed_failure_rate(schedule.mean_failure_rate(), schedule.gamma)
            assert transformed == pytest.approx(expected["transformed"], rel=1e-13)
            assert schedule.alpha_beta() == pytest.approx((expected["alpha"], expected["beta"]), rel=1e-13)


def test_transformed_failure_rate() -> None:
    assert transformed_failure_rate(0.5) == 0.5
    assert transformed_failure_rate(0.51) == 0.51
    assert transformed_failure_rate(0.4) == pytest.approx(1.0 / (1.0 + math.e), rel=1e-15)
    assert transformed_failure_rate(0.0, 4.0) == pytest.approx(1.0 / (1.0 + math.exp(2.0)), rel=1e-15)
    assert transformed_failure_rate(0.0, 1e6) == 0.0  # e^500000 is no float
    assert transformed_failure_rate(0.0, 1500.0) == pytest.approx(math.exp(-750.0))


def test_defaults_are_the_papers() -> None:
    schedule = CapabilitySchedule()
    assert (schedule.kappa, schedule.lam, schedule.gamma, schedule.window) == (11.0, 8.0, 10.0, 10)
    assert (schedule.alpha_min, schedule.alpha_max) == (1.5, 9.5)
    assert schedule.at(0.5) == (5.5, 5.5)
    assert schedule.at(1.0) == (9.5, 1.5)
    assert schedule.at(0.0) == pytest.approx((1.5 + 8.0 / (1.0 + math.exp(5.0)), 9.5 - 8.0 / (1.0 + math.exp(5.0))))


def test_range_of_the_released_code() -> None:
    schedule = CapabilitySchedule(lam=9.0)
    assert (schedule.alpha_min, schedule.alpha_max) == (1.0, 10.0)
    assert schedule.at(1.0) == (10.0, 1.0)
    assert schedule.at(0.5) == (5.5, 5.5)


def test_bounds_given_are_held() -> None:
    schedule = CapabilitySchedule(alpha_min=2.0, alpha_max=6.0)
    assert schedule.at(1.0) == (6.0, 5.0)
    assert schedule.at(0.25)[0] == pytest.approx(2.0 + 8.0 / (1.0 + math.exp(2.5)))
    assert CapabilitySchedule(alpha_min=2.0).alpha_max == 9.0
    assert CapabilitySchedule(alpha_max=7.0).at(1.0) == (7.0, 4.0)


@given(FRACTIONS, st.floats(1.0, 50.0), st.floats(0.0, 1.0))
def test_explore_first_changes_places(rate: float, kappa: float, share: float) -> None:
    lam = share * kappa * 0.99
    forward = CapabilitySchedule(kappa, lam)
    backward = CapabilitySchedule(kappa, lam, direction="explore_first")
    forward.update(rate)
    backward.update(rate)
    assert forward.alpha_beta() == tuple(reversed(backward.alpha_beta()))
    alpha, beta = forward.alpha_beta()
    assert alpha + beta == pytest.approx(kappa)
    assert min(alpha, beta) > 0.0
    assert forward.alpha_min <= alpha <= forward.alpha_max


@given(st.lists(FRACTIONS, min_size=2, max_size=2, unique=True).map(sorted))
def test_more_failure_never_lowers_alpha(rates: list[float]) -> None:
    schedule = CapabilitySchedule()
    assert schedule.at(rates[0])[0] <= schedule.at(rates[1])[0]


def test_window_of_the_last_steps() -> None:
    schedule = CapabilitySchedule(window=3)
    for rate in (1.0, 0.2, 0.4, 0.6):
        schedule.update(rate)
    assert schedule.mean_failure_rate() == pytest.approx(0.4, rel=1e-15)
    assert schedule.failure_rates == [0.2, 0.4, 0.6]
    schedule.update(np.float32(0.5))
    assert schedule.failure_rates == [0.4, 0.6, 0.5]


# ---- the others ----------------------------------------------------------------------------------------------------


def test_fixed_stays() -> None:
    schedule = FixedSchedule(1.5, 10.5)
    for rate in (0.0, 1.0):
        schedule.update(rate)
        assert schedule.alpha_beta() == (1.5, 10.5)


def test_linear_steps_from_ten_to_one() -> None:
    schedule = LinearSchedule(steps=9)
    for step in range(12):
        alpha = max(10.0 - step, 1.0)
        assert schedule.alpha_beta() == pytest.approx((alpha, 11.0 - alpha))
        schedule.update(0.3)
    upward = LinearSchedule(steps=2, start=1.0, end=6.0, kappa=7.0)
    upward.update(0.0)
    assert upward.alpha_beta() == (3.5, 3.5)


# ---- state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(3))
@given(rates=st.lists(FRACTIONS, max_size=12), later=FRACTIONS)
def test_state_round_trip(place: int, rates: list[float], later: float) -> None:
    schedule, again = schedules()[place], schedules()[place]
    for rate in rates:
        schedule.update(rate)
    again.update(0.125)  # what is there before does not matter
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    for _ in range(2):
        assert again.alpha_beta() == schedule.alpha_beta()
        assert again.state_dict() == schedule.state_dict()
        schedule.update(later)
        again.update(later)


def test_a_shorter_window_keeps_the_latest() -> None:
    long, short = CapabilitySchedule(window=5), CapabilitySchedule(window=2)
    for rate in (0.1, 0.2, 0.3, 0.4):
        long.update(rate)
    short.load_state_dict(long.state_dict())
    assert short.failure_rates == [0.3, 0.4]


@pytest.mark.parametrize(
    "place, changes, message",
    [
        (0, {"kind": "LinearSchedule"}, "its kind is 'LinearSchedule'"),
        (1, {"kind": "CapabilitySchedule"}, "its kind is 'CapabilitySchedule'"),
        (0, {"version": 2}, "version 2 is newer than 1"),
        (2, {"version": 99}, "version 99 is newer than 1"),
        (0, {"version": 0}, "its version is 0"),
        (0, {"version": "1"}, "its version is '1'"),
        (1, {"extra": 0}, r"unknown keys \['extra'\]"),
        (0, {"failure_rates": None}, "failure_rates is None, not a list"),
        (0, {"failure_rates": [0.5, 1.5]}, r"failure_rates\[1\] is 1.5, not a number of at most 1"),
        (0, {"failure_rates": [float("nan")]}, r"failure_rates\[0\] is nan"),
        (0, {"failure_rates": ["x"]}, r"failure_rates\[0\] is 'x', not a number"),
        (2, {"step": -1}, "step is -1, not at least 0"),
        (2, {"step": 1.5}, "step is 1.5, not an integer"),
    ],
)
def test_states_refused(place: int, changes: dict[str, Any], message: str) -> None:
    schedule = schedules()[place]
    schedule.update(0.75)
    before = schedule.state_dict()
    with pytest.raises(ValueError, match=message):
        schedule.load_state_dict({**before, **changes})
    assert schedule.state_dict() == before
    for key in before:
        cut = {k: v for k, v in before.items() if k != key}
        with pytest.raises(ValueError, match=r"^state of "):
            schedule.load_state_dict(cut)
        assert schedule.state_dict() == before


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), float("inf"), "x", None])
def test_failure_rates_refused(rate: Any) -> None:
    for schedule in schedules():
        before = schedule.state_dict()
        with pytest.raises(ValueError, match=f"^failure_rate is {rate!r}"):
            schedule.update(rate)
        assert schedule.state_dict() == before


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: CapabilitySchedule(kappa=0), r"^kappa is 0.0, not a number above 0"),
        (lambda: CapabilitySchedule(lam=-1), r"^lam is -1.0, not a number of at least 0"),
        (lambda: CapabilitySchedule(lam=11), r"^alpha_min is 0.0 and alpha_max is 11.0"),
        (lambda: CapabilitySchedule(alpha_min=-0.5), r"^alpha_min is -0.5 and alpha_max is 11.5"),
        (lambda: CapabilitySchedule(alpha_min=-0.5, alpha_max=5), r"^alpha_min is -0.5 and alpha_max is 5.0"),
        (lambda: CapabilitySchedule(gamma=float("nan")), r"^gamma is nan, not a finite number"),
        (lambda: CapabilitySchedule(gamma=-1), r"^gamma is -1.0, not a number of at least 0"),
        (lambda: CapabilitySchedule(window=0), r"^window is 0, not at least 1"),
        (lambda: CapabilitySchedule(window=2.5), r"^window is 2.5, not an integer"),  # type: ignore[arg-type]
        (lambda: CapabilitySchedule(alpha_min=7, alpha_max=6), r"^alpha_min is 7.0 and alpha_max is 6.0"),
        (lambda: CapabilitySchedule(alpha_max=11), r"^alpha_min is 1.5 and alpha_max is 11.0"),
        (lambda: CapabilitySchedule(direction="sideways"), r"^direction is 'sideways'"),  # type: ignore[arg-type]
        (lambda: FixedSchedule(0, 1), r"^alpha is 0.0, not a number above 0"),
        (lambda: FixedSchedule(1, float("inf")), r"^beta is inf, not a finite number"),
        (lambda: LinearSchedule(steps=0), r"^steps is 0, not at least 1"),
        (lambda: LinearSchedule(steps=3, start=0), r"^start is 0.0, not a number above 0"),
        (lambda: LinearSchedule(steps=3, start=11), r"^start is 11.0, not a number below 11"),
        (lambda: LinearSchedule(steps=3, end=0), r"^end is 0.0, not a number above 0"),
    ],
)
def test_parameters_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
