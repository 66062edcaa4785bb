"""The models that are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ottava.bench import cpu
from ottava.bench.models import FFN, HEADS, KV_HEADS, TOKENS, WIDTH, SmolLM2, blocks


def test_smollm2_has_its_number_of_parameters() -> None:
    """The number of the model card, 134,515,008: the embedding is also the head."""
    with torch.device("meta"):
        model = SmolLM2()
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


def checkpoint(model: SmolLM2) -> dict[str, torch.Tensor]:
    """A model's weights under Hugging Face's names, with separate projections."""
    theirs: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
    }
    layers: list[Any] = list(model.layers)
    for i, layer in enumerate(layers):
        at = f"model.layers.{i}."
        q, k, v = layer.attention.qkv_proj.weight.split((576, 192, 192))
        gate, up = layer.mlp.gate_up_proj.weight.chunk(2)
        theirs |= {
            f"{at}self_attn.q_proj.weight": q,
            f"{at}self_attn.k_proj.weight": k,
            f"{at}self_attn.v_proj.weight": v,
            f"{at}self_attn.o_proj.weight": layer.attention.o_proj.weight,
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": layer.mlp.down_proj.weight,
            f"{at}input_layernorm.weight": layer.attention_norm.weight,
            f"{at}post_attention_layernorm.weight": layer.mlp_norm.weight,
        }
    return {name: tensor.detach().clone() for name, tensor in theirs.items()}


def test_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    """The same loss as the model it came from; another architecture and no file are refused."""
    torch.manual_seed(0)
    source, model = (SmolLM2(vocabulary=97, layers=2) for _ in range(2))
    ids = torch.randint(0, 97, (1, 16))
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors; needs the folder of SmolLM2-135M"):
        model.load(tmp_path)
    save_file(checkpoint(source), tmp_path / "model.safetensors")
    assert not torch.equal(model(ids), source(ids))
    model.load(tmp_path)
    assert torch.equal(model(ids), source(ids))
    with pytest.raises(ValueError, match="does not hold SmolLM2-135M"):
        SmolLM2(vocabulary=97, layers=3).load(tmp_path)


def test_a_block_keeps_what_the_table_says() -> None:
    """Bytes a token, added up by hand: inputs of two norms, q, k, v, the output of attention, codes, and `save`."""
    torch.manual_seed(0)
    (case,) = cpu.SUITES["memory"](cpu.Settings())
    kept = next(iter(case.figures.values()))
    share = case.figures["of plain torch with a fused norm"]
    qkv = 2 + 2 * 2 * KV_HEADS / HEADS
    rest = 2 * 128 * 4 / WIDTH + 4 * HEADS / WIDTH + 2 * 4 / WIDTH  # rotary table, attention's sums, rstd
    streams = 2 + qkv + 2 + 2  # x, qkv, attention's result, x behind it
    ffn = FFN / WIDTH
    expected = {
        "plain torch, fused norm": streams + 2 * 2 + 2 * 4 * ffn + rest,
        "tensorwise, save bf16": streams + 3 + (4 + 1) * ffn + rest,
        "tensorwise, save fp8": streams + 3 + (2 + 8 / 128 + 1) * ffn + rest,
        "tensorwise, save recompute": streams + 2 + ffn + rest - 4 / WIDTH,
    }
    for name, bytes_a_token in expected.items():
        assert abs(kept[name] - bytes_a_token) < 0.001, name
    assert share["tensorwise, save fp8"] <= 0.62
    assert share["tensorwise, save bf16"] <= 0.75
    assert share["tensorwise, save recompute"] <= 0.75


def test_all_blocks_compute_the_same() -> None:
    """With one set of weights, within what FP8 rounds: the table compares like with like."""
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    made = dict(blocks())
    plain, ours = made["plain torch, fused norm"], made["tensorwise, save bf16"]
    own = plain.state_dict()
    ours.load_state_dict(
        {"qkv.norm.weight": own["qkv.0.weight"], "qkv.weight": own["qkv.1.weight"], "out.weight": own["out.weight"]}
        | {"mlp.fc1.norm.weight": own["mlp.0.weight"], "mlp.fc2.weight": own["mlp.1.down_proj.weight"]}
        | {"mlp.fc1.weight": own["mlp.1.gate_up_proj.weight"]}
    )
    with torch.no_grad():
        y, exact = ours(x).double() - x.double(), plain(x).double() - x.double()
    assert float((y - exact).norm() / exact.norm()) < 0.1
