"""Policies out of packages: a small Llama model written as GGUF the way llama.cpp's converter does."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from coba_core.integrations.grpo import packaged
from coba_core.integrations.grpo.config import TrainConfig
from coba_core.integrations.grpo.model import load_policy
from coba_core.integrations.grpo.rollouts import generate

gguf = pytest.importorskip("gguf")

TOKENS = ["<|endoftext|>", "<|end|>", *"0123456789", "+", "=", "Ċ", "12", "34"]
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def small_llama() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
        pad_token_id=1, rms_norm_eps=1e-5,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a query or key projection in GGUF's order for rotary positions."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: transformers.LlamaForCausalLM) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["1 2", "3 4"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(1)
    for name, values in model.state_dict().items():
        weight = values.numpy()
        if name.startswith("model.layers."):
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            part = rest.removesuffix(".weight")
            if part == "self_attn.q_proj":
                weight = interleaved(weight, config.num_attention_heads)
            if part == "self_attn.k_proj":
                weight = interleaved(weight, config.num_key_value_heads)
            writer.add_tensor(f"blk.{layer}.{NAMES[part]}.weight", weight)
        elif name != "lm_head.weight":  # the embedding's
            writer.add_tensor({"model.embed_tokens.weight": "token_embd.weight",
                               "model.norm.weight": "output_norm.weight"}[name], weight)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package; importing it fails, as nothing may."""
    folder = tmp_path / "some_model"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return folder


def test_the_policy_computes_as_the_packaged_model_and_is_kept(package):
    model = small_llama()
    write_gguf(package / "model.gguf", model)
    config = TrainConfig(policy="package:some_model", stop="\n", threads=1)
    policy = load_policy(config, progress=False)
    ids = policy.encode(["12+3=", "4+5="], chat=False)
    assert ids == [[TOKENS.index(t) for t in tokens] for tokens in (["12", "+", "3", "="], ["4", "+", "5", "="])]
    assert policy.eos_ids.tolist() == [1, TOKENS.index("Ċ")]
    assert policy.tokenizer.eos_token == "<|end|>"
    tokens = torch.tensor(ids)
    with torch.no_grad():
        expected = model(tokens).logits
        found = policy.forward(tokens, torch.ones_like(tokens), keep=4)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    sampled = generate(
        policy, ids, torch.tensor([3, 2]), max_new_tokens=4, temperature=1.0, generator=torch.Generator().manual_seed(0)
    )
    assert sampled.rows.tolist() == [0, 0, 0, 1, 1] and sampled.lengths.min() >= 1
    folder = packaged.packaged_policy("some_model")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    load_policy(config, progress=False)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert not list(folder.parent.glob(".some_model-*"))


@pytest.mark.parametrize("files", [[], ["a.gguf", "b.gguf"]])
def test_a_package_without_one_file_is_refused(package, files):
    for name in files:
        (package / name).write_bytes(b"")
    with pytest.raises(ValueError, match=f"'some_model' holds {len(files)} GGUF files, not one"):
        packaged.packaged_policy("some_model")


@pytest.mark.parametrize("name", ["no_such_package_here", "../etc", ""])
def test_a_package_that_is_not_there_is_refused(name):
    with pytest.raises(ValueError, match=r"no package .* is installed"):
        load_policy(TrainConfig(policy=f"package:{name}"), progress=False)


def test_a_damaged_file_leaves_nothing_in_the_cache(package, cache_folder):
    (package / "model.gguf").write_bytes(b"GGUF" + bytes(8))
    with pytest.raises((ValueError, OSError, IndexError)):
        packaged.packaged_policy("some_model")
    assert not list((Path(cache_folder) / "coba_core").glob(".some_model-*"))
