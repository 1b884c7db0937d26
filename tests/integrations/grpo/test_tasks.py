"""Problems: right answers, stable ids, nothing held out is trained on, malformed files name their line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from coba_core.integrations.grpo import arithmetic
from coba_core.integrations.grpo.tasks import PromptStream, file_task, final_answer, make_task


def number(text: str) -> int:
    return int(text[::-1])


def test_arithmetic_is_right_and_graded():
    task = make_task("arithmetic", {"train": 120, "heldout": 60})
    assert (len(task.train), len(task.heldout)) == (120, 60)
    assert {p.kind for p in task.train} == set(arithmetic.KINDS)
    for problem in task.train + task.heldout:
        sign, level = problem.kind[0], int(problem.kind[1])
        a, b = problem.prompt.rstrip("=").split(sign)
        assert number(problem.answer) == (number(a) + number(b) if sign == "+" else number(a) - number(b))
        assert len(str(number(a))) == level
        assert (len(a), len(b), len(problem.answer)) == (6, 6, 7)
        assert task.score(problem, problem.answer) == 1.0
        assert task.score(problem, problem.answer[:-1] + "9") == 0.0


def test_held_out_is_a_property_of_the_problem():
    """Pools of any seed agree on what is held out, and so does the warm-up."""
    trained = {p.key for s in range(3) for p in make_task("arithmetic", {"train": 200, "seed": s}).train}
    held = {p.key for s in range(3) for p in make_task("arithmetic", {"heldout": 200, "seed": s}).heldout}
    assert not trained & held
    assert make_task("arithmetic", {"seed": 1}).train == make_task("arithmetic", {"seed": 1}).train
    a = np.arange(100_000)
    assert 0.19 < arithmetic.held_out(a, a // 3, a % 2 == 0).mean() < 0.21


@pytest.mark.parametrize("arguments", [{"mix": {"*1": 1}}, {"trian": 5}, {"train": 0}])
def test_wrong_arguments_of_a_task(arguments):
    with pytest.raises(ValueError, match=r"mix|task_args"):
        make_task("arithmetic", arguments)


def test_reasoning_gym_extracts_the_answer_first():
    pytest.importorskip("reasoning_gym")
    task = make_task("reasoning_gym", {"name": "chain_sum", "train": 20, "heldout": 10, "config": {"max_terms": 3}})
    assert (len(task.train), len(task.heldout)) == (20, 10)
    problem = task.train[0]
    assert task.score(problem, f"Some steps first.\nAnswer: {problem.answer}\n") == 1.0
    assert task.score(problem, f"<answer>{problem.answer}</answer> done") == 1.0
    assert task.score(problem, f"Answer: {problem.answer}1") == 0.0
    assert task.score(problem, "") == 0.0


def test_final_answer():
    assert final_answer("Answer: 3\nno, wait\nAnswer: 4") == "4"
    assert final_answer("so \\boxed{\\pi} it is") == "\\pi"
    assert final_answer("just\n12") == "12"


def write_jsonl(path, records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


def test_file_of_problems(tmp_path):
    pytest.importorskip("math_verify")
    records = [{"prompt": f"What is {i}/2?", "answer": f"\\frac{{{i}}}{{2}}"} for i in range(40)]
    records.append({"prompt": [{"role": "user", "content": "What is 1+1?"}], "answer": 2, "id": "chat"})
    path = write_jsonl(tmp_path / "p.jsonl", records)
    task = file_task(train=path, heldout_share=0.25)
    assert len(task.train) + len(task.heldout) == 41
    assert 3 <= len(task.heldout) <= 18
    problem = next(p for p in task.train + task.heldout if p.prompt == "What is 5/2?")
    assert task.score(problem, "It is $2.5$.") == 1.0
    assert task.score(problem, "It is $3$.") == 0.0
    assert "chat" in {p.key for p in task.train + task.heldout}
    exact = file_task(train=path, scorer="exact")
    assert exact.score(problem, " \\frac{5}{2}\n") == 1.0


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a?", "b?"], "gold": ["1", "2"]}), path)
    task = file_task(train=str(path), heldout_share=0, scorer="exact", prompt="question", answer="gold")
    assert [(p.prompt, p.answer) for p in task.train] == [("a?", "1"), ("b?", "2")]
    path.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"p\.parquet"):
        file_task(train=str(path))


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "x", "answer": ', '["prompt"]', '{"prompt": "x"}', '{"answer": "1"}',
        '{"prompt": "", "answer": "1"}', '{"prompt": "x", "answer": null}',
        '{"prompt": 3, "answer": "1"}', '{"prompt": ["hi"], "answer": "1"}',
        '{"prompt": "x", "answer": [1]}', '{"prompt": "first", "answer": "1"}', "\udcff",
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    good = json.dumps({"prompt": "first", "answer": "1"})
    path.write_bytes(f"{good}\n\n{line}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"p\.jsonl:3: "):
        file_task(train=str(path), scorer="exact")


def test_what_is_held_out_must_not_be_trained_on(tmp_path):
    train = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x?", "answer": "1", "id": 1}])
    held = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x?", "answer": "1", "id": 2}])
    with pytest.raises(ValueError, match="held-out problem 'x\\?' is also trained on"):
        file_task(train=train, heldout=held, scorer="exact")
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no problem"):
        file_task(train=train)


def test_prompts_are_revisited_in_passes():
    stream = PromptStream(10, seed=3)
    taken = [stream.take(7) for _ in range(10)]
    flat = [i for step in taken for i in step]
    for epoch in range(7):
        assert sorted(flat[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert flat[:10] != flat[10:20]
    again = PromptStream(10, seed=3)
    again.position = 21
    assert again.take(7) == taken[3]
