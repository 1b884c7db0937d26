"""The example of docs/trl.md, run for one step on the small policy."""

from __future__ import annotations

import re
from pathlib import Path

from small_trl import data, share_of_odd

import coba_core

DOCS = Path(__file__).parents[3] / "docs" / "trl.md"


def test_the_example(policy_folder: Path, tmp_path: Path) -> None:
    first, allocator = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    small = "max_steps=1, max_completion_length=4, use_cpu=True, bf16=False, report_to='none', save_strategy='no'"
    for old, new in (
        ('"Qwen/Qwen2.5-0.5B-Instruct"', repr(str(policy_folder))),
        ('output_dir="out"', f"output_dir={str(tmp_path)!r}, {small}"),
    ):
        assert old in first
        first = first.replace(old, new)
    names = {"my_reward": share_of_odd, "my_dataset": data(), "coba_core": coba_core}
    exec(compile(first, str(DOCS), "exec"), names)
    assert names["trainer"].state.global_step == 1  # type: ignore[attr-defined]
    exec(compile(allocator, str(DOCS), "exec"), names)
    assert isinstance(names["allocator"], coba_core.CapabilityAllocator)
