"""The entropy-holding temperature: vectors, bounds, what it refuses, its state, and a closed loop on real logits."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coba_core.temperature import EntropyTemperature

VECTORS = json.loads((Path(__file__).parent / "vectors" / "temperature_schedules.json").read_text())


@pytest.mark.parametrize("case", VECTORS, ids=[case["name"] for case in VECTORS])
def test_vectors(case: dict) -> None:
    settings = {key: case[key] for key in ("eta", "total_steps", "anneal_start") if key in case}
    given_target = EntropyTemperature(case["vocab_size"], target_entropy=case["initial_entropy"], **settings)
    found = [given_target.update(h) for h in case["entropies"]]
    assert np.allclose(found, case["temperatures"], rtol=1e-12, atol=0)


def test_measuring_the_target_in_the_first_step_gives_the_annealed_vector() -> None:
    case = next(case for case in VECTORS if "total_steps" in case)
    control = EntropyTemperature(
        case["vocab_size"], total_steps=case["total_steps"], anneal_start=case["anneal_start"], eta=case["eta"]
    )
    found = [control.update(h) for h in case["entropies"]]
    assert control.target_entropy == case["initial_entropy"]
    assert np.allclose(found, case["temperatures"], rtol=1e-12, atol=0)


def test_target_is_the_mean_of_the_first_steps() -> None:
    control = EntropyTemperature(100, measure_steps=3, initial=1.2)
    assert [control.update(h) for h in (0.2, 0.5, 0.8)] == [1.2, 1.2, 1.2]
    assert control.target_entropy == pytest.approx(0.5, rel=1e-15)
    assert control.update(0.5) == pytest.approx(1.2, rel=1e-15)


def test_anneal_start_defaults_to_six_tenths_and_the_target_stays_low_after_the_end() -> None:
    control = EntropyTemperature(100, total_steps=480)
    assert control.anneal_start == 288
    assert control.annealing(288) == 1.0
    assert 0.9 < control.annealing(400) < 1.0
    assert [control.annealing(t) for t in (480, 481, 600, 10_000)] == [0.9] * 4


def test_stuck_entropy_stays_within_bounds_and_comes_back_at_once() -> None:
    control = EntropyTemperature(151_936, target_entropy=0.5)
    stuck = [control.update(1e-9) for _ in range(200)]
    assert max(stuck) == 2.0
    assert control.update(0.6) < 2.0
    assert min(control.update(11.0) for _ in range(200)) == 0.5


@given(st.integers(0, 2**32 - 1), st.integers(3, 200_000), st.floats(0.05, 1.0), st.floats(1.0, 5.0))
def test_random_entropies_never_leave_the_bounds(seed: int, vocab_size: int, low: float, high: float) -> None:
    control = EntropyTemperature(vocab_size, low=low, high=high, total_steps=50)
    for entropy in np.exp(np.random.default_rng(seed).uniform(-30, 4, 200)):
        assert low <= control.update(entropy) <= high


def test_ten_thousand_random_entropies_never_leave_the_bounds() -> None:
    control = EntropyTemperature(151_936, total_steps=5_000)
    entropies = np.exp(np.random.default_rng(0).uniform(-40, 4, 10_000))
    temperatures = np.array([control.update(h) for h in entropies])
    assert np.isfinite(temperatures).all()
    assert temperatures.min() >= 0.5 and temperatures.max() <= 2.0


@pytest.mark.parametrize("entropy", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, None, "x", [1.0]])
def test_refuses_an_entropy_that_is_no_positive_number(entropy: object) -> None:
    control = EntropyTemperature(100, target_entropy=0.5)
    control.update(0.4)
    before = control.state_dict()
    with pytest.raises(ValueError, match="entropy"):
        control.update(entropy)
    assert control.state_dict() == before


def test_accepts_python_and_numpy_numbers_and_tensors() -> None:
    torch = pytest.importorskip("torch")
    kinds = [0.25, np.float32(0.25), np.float64(0.25), np.array(0.25), torch.tensor(0.25), torch.tensor(0.25).double()]
    found = {EntropyTemperature(100, target_entropy=0.5).update(h) for h in kinds}
    assert len(found) == 1
    assert EntropyTemperature(100, target_entropy=1).update(torch.tensor(1)) == 1.0
    for wrong in (np.array([0.25, 0.5]), torch.tensor([0.25, 0.5])):
        with pytest.raises(ValueError, match="entropy has 1 dimensions"):
            EntropyTemperature(100, target_entropy=0.5).update(wrong)


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, coba_core.temperature; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 2}, "vocab_size is 2"),
        ({"vocab_size": 3.5}, "vocab_size is 3.5, not an integer"),
        ({"total_steps": 1.5}, "total_steps is 1.5, not an integer"),
        ({"total_steps": 9, "anneal_start": "2"}, "anneal_start is '2', not an integer"),
        ({"low": 0.0}, "low is 0"),
        ({"low": 2.0, "high": 1.0}, "high is 1"),
        ({"initial": 3.0}, "initial is 3"),
        ({"measure_steps": 0}, "measure_steps is 0"),
        ({"eta": 0.0}, "eta is 0"),
        ({"eta": 1.5}, "eta is 1.5"),
        ({"target_entropy": 0.0}, "target_entropy is 0"),
        ({"anneal_start": 3}, "needs total_steps"),
        ({"anneal_start": 10, "total_steps": 10}, "anneal_start is 10"),
        ({"total_steps": 0}, "total_steps is 0"),
    ],
)
def test_refuses_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EntropyTemperature(**{"vocab_size": 100, **settings})


@given(st.integers(0, 8), st.integers(1, 4), st.lists(st.floats(1e-3, 3.0), min_size=8, max_size=8))
def test_resume_continues_as_if_never_stopped(stop: int, measure_steps: int, entropies: list[float]) -> None:
    settings = {"vocab_size": 50, "measure_steps": measure_steps, "total_steps": 6}
    whole, first, second = (EntropyTemperature(**settings) for _ in range(3))
    expected = [whole.update(h) for h in entropies]
    found = [first.update(h) for h in entropies[:stop]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.target_entropy == first.target_entropy
    assert second.metrics == first.metrics
    found += [second.update(h) for h in entropies[stop:]]
    assert found == expected


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"kind": "RankAllocator"},
        {"vocab_size": 99},
        {"temperature": 2.5},
        {"temperature": math.nan},
        {"target_entropy": -1.0},
        {"target_entropy": None},
        {"measured": [0.5]},
        {"measured": "x"},
        {"steps": -1},
        {"steps": 0},
        {"steps": True},
        {"entropy": 0.0},
        {"entropy": None},
        {"extra": 1},
    ],
)
def test_a_wrong_state_changes_nothing(change: dict) -> None:
    source, control = EntropyTemperature(100), EntropyTemperature(100)
    for h in (0.5, 0.4):
        source.update(h)
    control.update(0.7)
    before = control.state_dict()
    with pytest.raises(ValueError, match="state of EntropyTemperature"):
        control.load_state_dict({**source.state_dict(), **change})
    assert control.state_dict() == before


def test_metrics_are_flat_floats() -> None:
    control = EntropyTemperature(100, total_steps=2)
    assert control.metrics == {"temperature": 1.0}
    control.update(0.5)
    assert control.metrics == {"temperature": 1.0, "target_entropy": pytest.approx(0.45), "entropy": 0.5}


@pytest.fixture(scope="module")
def logits():
    """Next-digit logits [1792, 17] of a Qwen2-architecture model that has begun to learn arithmetic."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from coba_core.integrations.grpo import arithmetic, embedded

    model = embedded.warm_up(embedded.Warmup(steps=150, hidden=32, batch=64), progress=False)
    rng = np.random.default_rng(0)
    problems = arithmetic.draw(rng, rng.integers(0, len(arithmetic.KINDS), 256))
    prompts, answers = arithmetic.encode(*problems)
    tokens = torch.from_numpy(np.concatenate([prompts, arithmetic.DIGIT_0 + answers[:, :-1]], axis=1))
    with torch.no_grad():
        return model(tokens).logits[:, arithmetic.PROMPT_LENGTH - 1 :].flatten(0, 1)


@pytest.mark.parametrize("shock", [1.9, 1.4, 0.6])
@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_closed_loop_on_a_models_logits(logits, sharpness: float, shock: float) -> None:
    """After the logits are scaled by `shock`, the entropy is back within 5 % in at most 30 steps, and stays there."""

    def entropy(scale: float):
        log_p = (logits * scale).log_softmax(dim=-1)
        return -(log_p.exp() * log_p).sum(dim=-1).mean()

    control = EntropyTemperature(logits.shape[-1])
    for _ in range(3):
        control.update(entropy(sharpness / control.temperature))
    target = control.target_entropy
    assert target is not None
    ratios = []
    for _ in range(60):
        observed = entropy(shock * sharpness / control.temperature)
        ratios.append(float(observed) / target)
        control.update(observed)
        assert 0.5 <= control.temperature <= 2.0
    assert abs(ratios[0] - 1.0) > 0.05, "the shock is one"
    assert np.abs(np.array(ratios[30:]) - 1.0).max() < 0.05
