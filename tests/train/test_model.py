"""The byte model: size, causality, rotary positions, grouped heads, initial weights."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ottava.train.config import ModelConfig
from ottava.train.model import ByteTransformer, loss, rotary_table, rotate

SMALL = ModelConfig(d_model=32, layers=2, heads=4, kv_heads=2, ffn=48)


def build(config: ModelConfig = SMALL, length: int = 24) -> ByteTransformer:
    torch.manual_seed(0)
    return ByteTransformer(config, length)


def test_default_size_is_about_a_million_parameters() -> None:
    """2 x 256 x 128 embeddings and head, 5 x (256 + 128) x 128 attention, 5 x 3 x 384 x 128 MLP, 11 gains of 128."""
    expected = 2 * 256 * 128 + 5 * ((256 + 128) * 128 + 3 * 384 * 128) + 11 * 128
    assert sum(p.numel() for p in ByteTransformer(ModelConfig(), 128).parameters()) == expected == 1_049_984


def test_state_dict_holds_parameters_only() -> None:
    model = build()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert model.lm_head.weight is not model.embedding.weight


def test_later_bytes_do_not_change_earlier_logits() -> None:
    model = build()
    ids = torch.randint(0, 256, (2, 24))
    changed = ids.clone()
    changed[:, 13] = (changed[:, 13] + 1) % 256
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.equal(before[:, :13], after[:, :13])
    assert not torch.equal(before[:, 13:], after[:, 13:])


def test_shorter_sequence_gives_the_prefix_of_the_logits() -> None:
    model = build()
    ids = torch.randint(0, 256, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, :9]), model(ids)[:, :9], rtol=0, atol=1e-5)  # ~100 roundings near 1


def test_rotation_keeps_lengths_and_sees_only_distances() -> None:
    cos, sin = rotary_table(50, 8, 10_000.0)
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = (rotate(v.expand(50, 1, 8), cos, sin)[:, 0] for v in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(50))
    assert torch.equal(turned_q[0], q)
    scores = turned_q @ turned_k.T
    torch.testing.assert_close(scores[3, 1], scores[40, 38], rtol=0, atol=1e-5)
    assert abs(scores[3, 1] - scores[3, 2]) > 1e-3


def test_rotation_turns_pair_i_by_the_angle_of_the_paper() -> None:
    """RoFormer eq. 15: at position 3, pair 1 of 4 (head_dim 8) turns by 3 * 10000 ** (-2 / 8) = 0.3."""
    cos, sin = rotary_table(4, 8, 10_000.0)
    x = torch.zeros(4, 1, 8)
    x[..., 1] = 1.0
    turned = rotate(x, cos, sin)[3, 0]
    assert turned[1] == pytest.approx(math.cos(0.3), abs=1e-6)
    assert turned[5] == pytest.approx(math.sin(0.3), abs=1e-6)


def test_attention_equals_the_formula_written_out() -> None:
    """softmax(q k.T / sqrt(E)) v with each key head shared by two query heads, by plain loops over heads."""
    attention = build().layers[0].attention
    assert isinstance(attention, nn.Module)
    x = torch.randn(2, 24, 32)
    cos, sin = rotary_table(24, 8, 10_000.0)
    qkv = F.linear(x, attention.qkv_proj.weight).unflatten(-1, (8, 8))
    mask = torch.full((24, 24), -math.inf).triu(1)
    heads = []
    for head in range(4):
        q = rotate(qkv[:, :, head : head + 1], cos, sin)[:, :, 0]
        k = rotate(qkv[:, :, 4 + head // 2 : 5 + head // 2], cos, sin)[:, :, 0]
        heads.append((q @ k.transpose(1, 2) / math.sqrt(8) + mask).softmax(-1) @ qkv[:, :, 6 + head // 2])
    expected = F.linear(torch.cat(heads, dim=-1), attention.o_proj.weight)
    torch.testing.assert_close(attention(x, cos, sin), expected, rtol=1e-4, atol=1e-6)


def test_untrained_model_guesses_nearly_evenly() -> None:
    """ln 256 = 5.545 nats for an even guess; logits of variance 1 (unit rows of the head, normed stream) cost 1/2."""
    model = build(ModelConfig(), 64)
    ids = torch.randint(0, 256, (4, 65))
    assert loss(model, ids[:, :-1], ids[:, 1:]).item() == pytest.approx(math.log(256) + 0.5, abs=0.1)


def test_matrices_start_at_one_over_root_width_and_those_that_write_to_the_stream_smaller() -> None:
    """1 / sqrt(128) = 0.088; over sqrt(2 * 5 layers): 0.028."""
    model = build(ModelConfig(), 8)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.0884 / math.sqrt(10) if writes else 0.0884
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("autocast", [False, True])
def test_every_parameter_learns(autocast: bool) -> None:
    model = build()
    ids = torch.randint(0, 256, (2, 25))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(model, ids[:, :-1], ids[:, 1:])
    value.backward()
    assert value.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
