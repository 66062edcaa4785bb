"""Generation with InferenceParams: each sequence has what it has when its whole text is read at once."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava.compat.transformer_engine.pytorch as te
from sweep import sweep

HEADS, GROUPS, DIM, HIDDEN = 4, 2, 8, 32
STEPS: list[dict[str, int]] = [
    {"a": 5, "b": 2, "c": 3},  # prompts of their own lengths
    {"a": 1, "b": 1, "c": 1},
    {"c": 1, "a": 1, "b": 1},  # in another order
    {"d": 4, "c": 1, "a": 2},  # b is finished, d begins, a reads two
    {"c": 1, "d": 1, "a": 1},
    {"b": 3},  # a new text under an old name, alone
    {"b": 1},
]
LENGTH = 12


def texts() -> dict[str, Tensor]:
    """(tokens, HIDDEN) of each sequence, fp64."""
    rng = torch.Generator().manual_seed(0)
    return {name: torch.randn(LENGTH, HIDDEN, generator=rng, dtype=torch.float64) for name in "abcd"}


def params(**changes: Any) -> te.InferenceParams:
    sizes: dict[str, Any] = {"num_heads_kv": GROUPS, "head_dim_k": DIM, "dtype": torch.float64, **changes}
    return te.InferenceParams(3, LENGTH, **sizes)


def generate(run: Any, past: te.InferenceParams, layout: str) -> dict[str, list[Tensor]]:
    """Runs STEPS; the rows of each sequence. Padding is large, so that whoever reads it is found out."""
    found: dict[str, list[Tensor]] = {}
    read = texts()
    for step in STEPS:
        past.pre_step(OrderedDict(step))
        x = torch.full((len(step), max(step.values()), HIDDEN), 1e6, dtype=torch.float64)
        for row, (name, new) in enumerate(step.items()):
            start = past.sequences_pre_step[name]
            if start == 0:
                found[name + "'" if name in found else name] = []
            x[row, :new] = read[name][start : start + new]
        with torch.no_grad():
            y = run(x if layout == "bshd" else x.transpose(0, 1), past)
        y = y if layout == "bshd" else y.transpose(0, 1)
        for row, (name, new) in enumerate(step.items()):
            found[name + "'" if name + "'" in found else name].append(y[row, :new])
    return found


def same(found: dict[str, list[Tensor]], whole: Any) -> None:
    """Within 256 roundings of fp64 of the whole text, read at once."""
    for name, parts in found.items():
        rows = torch.cat(parts)
        with torch.no_grad():
            expected = whole(texts()[name[0]][: len(rows)])
        assert (rows - expected).abs().max() <= 2**-52 * 256 * expected.abs().max(), name


@sweep(layout=["sbhd", "bshd"], norm=["RMSNorm", "LayerNorm"])
def test_a_model_that_reads_token_by_token_gives_what_it_gives_at_once(layout: str, norm: str) -> None:
    """Two layers with rotation and grouped queries; prompts of several lengths, sequences that come and go."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"normalization": norm, "attn_input_format": layout, "num_gqa_groups": GROUPS}
    settings |= {"params_dtype": torch.float64, "activation": "swiglu", "rotary_pos_interleaved": norm == "RMSNorm"}
    layers = [te.TransformerLayer(HIDDEN, 48, HEADS, layer_number=i + 1, **settings) for i in range(2)]
    model = nn.ModuleList(layers).eval()
    angles = te.RotaryPositionEmbedding(DIM, interleaved=norm == "RMSNorm")(LENGTH)

    def run(x: Tensor, past: te.InferenceParams | None) -> Tensor:
        kind = "padding_causal" if past is None or max(past.new_tokens) > 1 else "padding"
        for layer in model:
            x = layer(x, self_attn_mask_type=kind, rotary_pos_emb=angles, inference_params=past)
        return x

    past = params()
    found = generate(run, past, layout)
    axis = 0 if layout == "bshd" else 1
    same(found, lambda x: run(x.unsqueeze(axis), None).squeeze(axis))
    past.reset()
    again = generate(run, past, layout)
    assert all(torch.equal(torch.cat(again[name]), torch.cat(rows)) for name, rows in found.items())
    assert sorted(past.caches) == [1, 2]


@sweep(layout=["sbhd", "bshd"], kind=["multihead", "core"])
def test_attention_alone_reads_token_by_token(layout: str, kind: str) -> None:
    """MultiheadAttention, and DotProductAttention, which is given queries, keys and values."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_gqa_groups": GROUPS, "attention_dropout": 0.0, "qkv_format": layout}
    if kind == "multihead":
        layer = te.MultiheadAttention(HIDDEN, HEADS, layer_number=7, params_dtype=torch.float64, **sizes)
    else:
        layer = te.DotProductAttention(HEADS, DIM, layer_number=7, **sizes)

    def run(x: Tensor, past: te.InferenceParams | None) -> Tensor:
        if kind == "multihead":
            return layer(x, attn_mask_type="padding_causal", inference_params=past)
        heads = x.unflatten(-1, (HEADS, DIM))
        k, v = heads[..., :GROUPS, :], heads[..., GROUPS:, :] + 1
        return layer(heads, k, v, attn_mask_type="padding_causal", inference_params=past)

    axis = 0 if layout == "bshd" else 1
    same(generate(run, params(), layout), lambda x: run(x.unsqueeze(axis), None).squeeze(axis))


def test_what_does_not_work_is_refused_by_name() -> None:
    layer = te.TransformerLayer(HIDDEN, 48, HEADS, layer_number=1, attn_input_format="bshd").eval()
    past, x = params(num_heads_kv=HEADS, dtype=torch.float32), torch.ones(2, 3, HIDDEN)
    with pytest.raises(ValueError, match="got 2 sequences of 3 new tokens; pre_step got 0, of"):
        layer(x, inference_params=past)
    past.pre_step({"a": 3, "b": 2})
    with pytest.raises(ValueError, match=r"got 2 sequences of 4 new tokens; pre_step got 2, of \[3, 2\]"):
        layer(torch.ones(2, 4, HIDDEN), inference_params=past)
    with pytest.raises(ValueError, match="this step needs 3"):
        layer(x, inference_params=past, rotary_pos_emb=te.RotaryPositionEmbedding(DIM)(2))
    for wrong in ({"self_attn_mask_type": "padding"}, {"attention_mask": torch.zeros(2, 1, 1, 3, dtype=torch.bool)}):
        with pytest.raises(NotImplementedError, match=r"attention to a cache is causal"):
            layer(x, inference_params=past, **wrong)
    with pytest.raises(ValueError, match="inference_params need a layer_number"):
        te.TransformerLayer(HIDDEN, 48, HEADS, attn_input_format="bshd")(x, inference_params=past)
    with pytest.raises(NotImplementedError, match="inference_params with 'thd' are not in ottava"):
        te.MultiheadAttention(HIDDEN, HEADS, qkv_format="thd", layer_number=1)(x[0], inference_params=past)
    for step, reason in (({}, "got {}; needs 1 to 3 sequences"), ({"a": 0}, "1 or more new tokens each")):
        with pytest.raises(ValueError, match=reason):
            past.pre_step(step)
    with pytest.raises(ValueError, match="max_sequence_length is 12"):
        past.pre_step({"a": 10})
    assert past.sequences == {"a": 3, "b": 2}  # a refused step changes nothing
    assert past.get_seqlens_pre_step().tolist() == [0, 0]
    with pytest.raises(TypeError, match="inference_params is a dict; needs an InferenceParams"):
        layer(x, inference_params={})
    with pytest.raises(NotImplementedError, match="sequence_len_offset is a name of TransformerEngine"):
        past.sequence_len_offset += 1
    with pytest.raises(ValueError, match="needs num_heads_kv, head_dim_k and dtype"):
        te.InferenceParams(1, 1)
    with pytest.raises(NotImplementedError, match="is_paged=True and custom_cache_manager are not in ottava"):
        params(is_paged=True, page_size=4, total_num_pages=9)
