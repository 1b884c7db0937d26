"""QLoRA: adapters on weights in 4 bits, where bitsandbytes runs; a clear refusal where it does not."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from coba_core.integrations.grpo.config import TrainConfig
from coba_core.integrations.grpo.loop import Trainer
from coba_core.integrations.grpo.model import load_policy

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def quantized(small):
    return small.replace(quantize="4bit", lora=LORA, kl_coef=0.01, entropy_coef=0.1, steps=2)


def test_adapters_are_trained_on_four_bits(quantized, tmp_path):
    """Weights of linear layers in 4 bits, the gradient that of the dequantised layers, resumed as it would go on."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="pip install 'coba-core[qlora]'")
    pytest.importorskip("accelerate")
    trainer = Trainer(quantized, progress=False)
    model = trainer.policy.model
    layers = {name: m for name, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    assert layers and all(m.weight.dtype == torch.uint8 and m.weight.quant_state.nested for m in layers.values())
    assert all("lora" in name for name, p in model.named_parameters() if p.requires_grad)
    before = [p.detach().clone() for p in trainer.parameters]
    trainer.step()
    saved = trainer.save(tmp_path / "checkpoints")
    assert any(not torch.equal(p, old) for p, old in zip(trainer.parameters, before, strict=True))
    again = Trainer(quantized, progress=False, weights=saved / "model")
    again.restore(saved)
    assert trainer.step()[1]["grad_norm"] == again.step()[1]["grad_norm"] > 0
    for one, two in zip(trainer.parameters, again.parameters, strict=True):
        assert torch.equal(one, two)

    plain = load_policy(quantized.replace(quantize="none"), progress=False).model
    state = plain.state_dict()
    for name, layer in layers.items():
        state[f"{name}.weight"] = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    plain.load_state_dict(state | {k: v for k, v in model.state_dict().items() if "lora" in k})
    tokens = torch.arange(12).view(2, 6) % trainer.policy.vocab_size
    for found in (model, plain):
        found.eval()
        with torch.no_grad():
            found(tokens)  # as in sampling, which comes before every update
        found.train()
        found.zero_grad()
        found(tokens).logits.square().mean().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert wanted
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_without_bitsandbytes(quantized):
    with pytest.raises(ValueError, match=r"quantize: '4bit' needs bitsandbytes .*coba-core\[qlora\]"):
        load_policy(quantized, progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "adapters only; set lora"),
        ({"lora": LORA, "parallel": "fsdp2"}, "does not go with parallel: fsdp2"),
        ({"lora": LORA, "rollout_engine": "vllm"}, "does not go with rollout_engine: vllm"),
    ],
)
def test_what_it_does_not_go_with(changes, message):
    with pytest.raises(ValueError, match=f"quantize: '4bit' .*{message}"):
        TrainConfig(quantize="4bit", **changes)
