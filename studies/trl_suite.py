"""TRL's own GRPO tests with BudgetedGRPOTrainer in its place: ``python studies/trl_suite.py <TRL's sources>``.

Their files run as they are, from a copy. `trl.GRPOTrainer` is the class under test; the models that they name are made
here, of the same architectures with random weights, in a cache of the hub's layout that offline mode reads, and their
data sets are a few rows of the same columns. Training is on the CPU, without bfloat16 unless a test asks for it. The
stock class runs in the same way as the control, so that a test counts against ours only where the stock class passes.

Most of the tests have one prompt in a generation batch, which leaves an allocator no choice; ``--times 4`` accumulates
four times as many batches, and so gives it as many prompts. Needs
pytest, and parameterized for trees before 0.24; no network.

The last source release of TRL on PyPI that was found to have its tests is 0.23.1
(``pip download --no-deps --no-binary :all: trl==0.23.1``). What the helpers of an older tree import from TRL and is no
longer there is put in its place, as something not available.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

KIND = "TRL_SUITE_CLASS"
"""Environment variable that says which class the tests get: stock or budgeted."""

TIMES = "TRL_SUITE_TIMES"
"""Environment variable with what gradient_accumulation_steps are multiplied by."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = (
    "Beautiful is better than", "Explicit is", "Simple is better", "Complex", "Flat is better than", "Sparse is better",
    "Readability", "Special cases aren't special", "Although practicality beats", "Errors should never",
    "Unless explicitly", "In the face of ambiguity, refuse", "The train leaves at", "She wrote a letter to",
    "Stars are seen at", "Fish live in", "They walked along", "A good book", "The lamp stands on",
)  # fmt: skip
"""The first twelve as a test expects them (from the Zen of Python)."""

OLD_NAMES = {
    "trl": ("BaseBinaryJudge", "BasePairwiseJudge"),
    "trl.import_utils": (
        "is_diffusers_available", "is_joblib_available", "is_llm_blender_available", "is_mergekit_available",
        "is_vllm_available",
    ),
}  # fmt: skip
"""What testing_utils.py of 0.23 imports from TRL."""


def save_models(cache: Path) -> None:
    """Models with random weights and byte tokenizers under the names that the tests use, in the hub's cache layout."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|finetune_right_pad_id|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {x: i for i, x in enumerate(specials + alphabet)}
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.add_special_tokens(specials)
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None,
    }  # fmt: skip
    made = {
        "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": ("Qwen2", "ForCausalLM"),
        "trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2", "ForSequenceClassification"),
        "trl-internal-testing/tiny-Qwen3ForSequenceClassification": ("Qwen3", "ForSequenceClassification"),
        "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": ("Llama", "ForSequenceClassification"),
    }
    for name, (family, head) in made.items():
        torch.manual_seed(0)
        options = sizes | ({"num_labels": 1} if head == "ForSequenceClassification" else {})
        model = getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**options))
        folder = cache / f"models--{name.replace('/', '--')}"
        commit = "0" * 40
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        model.save_pretrained(folder / "snapshots" / commit)
        tokenizer.save_pretrained(folder / "snapshots" / commit)


def load_dataset(name: str, config: str | None = None, split: str | None = None, **_: Any) -> Any:
    """In place of datasets.load_dataset: 17 rows to train on and 2 to test, prompts only."""
    from datasets import Dataset, DatasetDict

    if name != "trl-internal-testing/zen" or config not in ("standard_prompt_only", "conversational_prompt_only"):
        raise FileNotFoundError(f"data set {name}, {config} is on the hub only")
    prompts: list[Any] = list(SENTENCES)
    if config == "conversational_prompt_only":
        prompts = [[{"role": "user", "content": x}] for x in prompts]
    both = DatasetDict(
        train=Dataset.from_dict({"prompt": prompts[:17]}), test=Dataset.from_dict({"prompt": prompts[17:]})
    )
    return both if split is None else both[split]


def pytest_configure(config: Any) -> None:
    """As a plugin of pytest: puts everything in its place before their file is imported."""
    import importlib

    import datasets
    import torch
    import trl

    torch.set_num_threads(1)
    for module, names in OLD_NAMES.items():
        found = importlib.import_module(module)
        for name in names:
            if not hasattr(found, name):
                setattr(found, name, (lambda: False) if name.startswith("is_") else object)
    datasets.load_dataset = load_dataset
    prepare = trl.GRPOConfig.__post_init__

    def on_cpu(arguments: Any) -> None:
        arguments.use_cpu = True
        arguments.bf16 = bool(arguments.bf16)  # TRL's own default asks for a GPU
        arguments.gradient_accumulation_steps *= int(os.environ[TIMES])
        prepare(arguments)

    trl.GRPOConfig.__post_init__ = on_cpu
    if os.environ[KIND] == "budgeted":
        from coba_core.integrations.trl import BudgetedGRPOTrainer

        trl.GRPOTrainer = BudgetedGRPOTrainer


def run(
    tests: Path, work: Path, kind: str, limit: float, chosen: str, times: int
) -> tuple[dict[str, tuple[str, str]], str]:
    """Outcome and reason of each test with one class, and pytest's last line."""
    report = work / f"{kind}.xml"
    environment = os.environ | {
        KIND: kind, TIMES: str(times), "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "home"),
        "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(work),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-p", "trl_suite", "-p", "no:cacheprovider", "-c", os.devnull, "-q",
        "--tb=line", f"--rootdir={work}", f"--junitxml={report}", f"--basetemp={work / ('base-' + kind)}", "-k", chosen,
        str(tests / "test_grpo_trainer.py"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=limit)
    if not report.exists():
        raise RuntimeError(f"pytest wrote no report with the {kind} class:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        result, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                result = "skipped" if child.tag == "skipped" else "failed"
                reason = (child.get("message") or "").strip().replace(str(work), "…")
        outcomes[f"{str(case.get('classname')).rsplit('.', 1)[-1]}::{case.get('name')}"] = (result, reason)
    return outcomes, done.stdout.strip().splitlines()[-1]


def shown(reason: str) -> str:
    """A reason on one line of a table."""
    text = re.sub(r"\s+", " ", re.sub(r"0x[0-9a-f]+", "0x…", reason)).replace("|", "\\|")
    return text if len(text) <= 220 else text[:219] + "…"


def verdict(stock: tuple[str, str], ours: tuple[str, str]) -> str:
    """What a test says of our class, given what it says of the stock class."""
    if ours[0] == stock[0] == "failed":
        return "the stock class fails too" + ("" if shown(ours[1]) == shown(stock[1]) else ", for another reason")
    if ours[0] == stock[0]:
        return "as the stock class"
    return f"DIFFERS: the stock class {stock[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tree", type=Path, help="folder of TRL's sources, with tests/test_grpo_trainer.py")
    parser.add_argument("--output", type=Path, help="default: studies/results/trl/<installed TRL>.md")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for each class")
    parser.add_argument("-k", dest="chosen", default="", help="only tests of these names, as pytest's -k")
    parser.add_argument("--times", type=int, default=1, help="multiplies gradient_accumulation_steps")
    options = parser.parse_args()
    if options.times < 1:
        parser.error(f"--times is {options.times}, not 1 or more")
    if not (options.tree / "tests" / "test_grpo_trainer.py").exists():
        parser.error(f"{options.tree} has no tests/test_grpo_trainer.py; releases since 0.24 leave it out: take 0.23.1")
    import torch
    import transformers
    import trl

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copytree(options.tree / "tests", work / "tests")
        (work / "tests" / "__init__.py").touch()
        save_models(work / "home" / "hub")
        stock, stock_line = run(work / "tests", work, "stock", options.limit, options.chosen, options.times)
        ours, our_line = run(work / "tests", work, "budgeted", options.limit, options.chosen, options.times)
    chosen = (f" --times {options.times}" if options.times > 1 else "") + (
        f" -k {options.chosen!r}" if options.chosen else ""
    )
    version = options.tree / "VERSION"
    source = version.read_text().strip() if version.exists() else options.tree.name
    lines = [
        f"# TRL's GRPO tests with BudgetedGRPOTrainer, trl {trl.__version__}", "",
        f"{datetime.date.today()}, Python {sys.version.split()[0]}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, CPU. The tests are test_grpo_trainer.py of TRL {source}, unchanged; models and "
        "data are local stand-ins of the same architectures and columns.", "",
        f"Command: `python studies/trl_suite.py trl-{source}{chosen}`", "",
        f"- stock GRPOTrainer: {stock_line}", f"- BudgetedGRPOTrainer: {our_line}",
        f"- outcomes that differ: {sum(stock.get(x, ('missing', ''))[0] != y[0] for x, y in ours.items())}", "",
    ]  # fmt: skip
    for result in ("failed", "passed", "skipped"):
        lines += [f"## {result.capitalize()}", "", "| test | against the stock class | reason |", "|---|---|---|"]
        for name, outcome in ours.items():
            if outcome[0] == result:
                lines.append(f"| {name} | {verdict(stock.get(name, ('missing', '')), outcome)} | {shown(outcome[1])} |")
        lines.append("")
    output = (
        options.output
        or Path(__file__).parent
        / "results"
        / "trl"
        / f"{trl.__version__}{f'-times-{options.times}' if options.times > 1 else ''}.md"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".part")
    partial.write_text("\n".join(lines))
    partial.replace(output)
    print("\n".join(lines[:10]))


if __name__ == "__main__":
    main()
