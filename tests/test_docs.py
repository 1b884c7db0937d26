"""The code blocks of README.md and docs/ that are no doctests: Python runs, commands parse, data loads."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import coba_core

ROOT = Path(__file__).parents[1]


class Block(NamedTuple):
    """A fenced block: where it stands, its language, its text."""

    where: str
    language: str
    text: str


def blocks() -> list[Block]:
    """All blocks but doctests, which `make doctest` runs, and fences that Sphinx reads."""
    found = []
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"^```([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if ">>>" not in match[2] and not match[1].startswith("{"):
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block(f"{path.relative_to(ROOT)}:{line}", match[1], match[2]))
    return found


BLOCKS = blocks()


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.where) for block in BLOCKS if block.language in languages]


def yours() -> dict[str, Any]:
    """What a block calls yours."""
    names = ["a", "b", "c", "d"]
    return {
        "coba_core": coba_core, "prompt_ids": names, "batches": [names, names], "total_budget": 40, "dataset": names,
        "generate_and_score": lambda ids, rows: (np.arange(len(rows)) % 3 == 0).astype(float),
        "train": lambda rows, advantages: None, "rows": np.repeat(np.arange(4), 8),
        "rewards": np.resize([1.0, 0.0], 32),
        "vocab_size": 1000, "mean_token_entropy": 2.0,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::coba_core.BudgetWarning")
@pytest.mark.parametrize("block", of("python"))
def test_python(block: Block) -> None:
    names = yours()
    if "trl" in block.text and "import" in block.text:
        compile(block.text, block.where, "exec")  # tests/integrations/trl runs it, against the real package
        return
    if "cuda" in block.text:
        torch = pytest.importorskip("torch")
        pytest.importorskip("triton")
        if not torch.cuda.is_available():
            compile(block.text, block.where, "exec")
            return
        names |= {"prompt_ids": torch.arange(4), "total": 32, "rewards": torch.rand(32, device="cuda")}
    exec(compile(block.text, block.where, "exec"), names)


def commands() -> list[Any]:
    """Every line of the blocks of commands, without its comment."""
    found = []
    for block in BLOCKS:
        if block.language in ("sh", ""):
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    found.append(pytest.param(words, id=f"{block.where} {' '.join(words)[:60]}"))
    return found


@pytest.mark.parametrize("words", commands())
def test_commands(words: list[str]) -> None:
    while "=" in words[0]:
        words = words[1:]  # a variable of the environment
    program, rest = words[0], words[1:]
    if program == "torchrun":
        at = rest.index("-m")
        assert rest[at + 1] == "coba_core.cli"
        program, rest = "coba-core", rest[at + 2 :]
    if program == "coba-core":
        pytest.importorskip("yaml")
        from coba_core.cli import _parser

        arguments = _parser().parse_args(rest)  # exits on what it does not know
        assert callable(arguments.run)
        for name in ("config", "study"):
            path = getattr(arguments, name, None)
            if path is not None and len(Path(path).parts) > 1:
                assert (ROOT / path).is_file()
    elif program == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert next(word for word in rest if "=" not in word) in targets
    elif program in ("python", "python3"):
        named = [word for word in rest if word.endswith(".py")]
        assert named or rest[0] in ("-c", "-m")
        assert all((ROOT / word.partition("::")[0]).is_file() for word in named)
    else:
        assert program in ("pip", "bash"), program


@pytest.mark.parametrize("block", of("json", "yaml"))
def test_data(block: Block) -> None:
    if block.language == "json":
        assert all(json.loads(line) for line in block.text.splitlines())
        return
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("torch")
    from coba_core.integrations.grpo.config import TrainConfig

    settings = yaml.safe_load(block.text)
    assert set(settings) <= set(TrainConfig.__dataclass_fields__)


def test_every_block_has_a_language_that_is_looked_at() -> None:
    unknown = [block.where for block in BLOCKS if block.language not in ("python", "sh", "", "json", "yaml", "text")]
    assert not unknown
    assert len(of("python")) >= 5 and len(commands()) >= 20
