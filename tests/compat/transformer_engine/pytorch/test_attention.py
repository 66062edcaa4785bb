"""TransformerEngine's attention against torch's: masks, layouts, rotary angles, and generation with its caches."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from ottava.compat.transformer_engine.pytorch.attention import MASKS, rotary_table
from ottava.nn.rope import rotate
from sweep import sweep

SEQUENCE, BATCH, HEADS, DIM = 6, 2, 4, 8


def formula(q: Tensor, k: Tensor, v: Tensor, left_out: Tensor | None, causal: str, sink: float | None) -> Tensor:
    """(S, B, H, D) in fp64; what TransformerEngine's unfused attention computes."""
    q, k, v = (t.double().permute(1, 2, 0, 3) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    queries, keys = scores.shape[-2:]
    if causal:
        first = keys - queries if causal == "bottom right" else 0
        later = torch.arange(keys)[None] > torch.arange(queries)[:, None] + first
        scores = scores.masked_fill(later, -torch.inf)
    if left_out is not None:
        scores = scores.masked_fill(left_out, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, torch.full_like(scores[..., :1], sink)), -1)
    p = scores.softmax(-1)[..., :keys]
    return (p @ v).permute(2, 0, 1, 3).flatten(-2)


def heads(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_every_mask_and_layout_is_the_formula() -> None:
    """Grouped queries, more keys than queries, padding by mask and by cu_seqlens; fp32 to 32 eps."""
    q, k, v = heads(4, BATCH, HEADS, DIM), heads(SEQUENCE, BATCH, 2, DIM), heads(SEQUENCE, BATCH, 2, DIM) * 2
    padded = torch.zeros(BATCH, 1, 1, SEQUENCE, dtype=torch.bool)
    padded[1, ..., 5:] = True
    lengths = {"cu_seqlens_q": torch.tensor([0, 4, 8]), "cu_seqlens_kv": torch.tensor([0, 6, 11])}
    for name, (_, counts) in MASKS.items():
        causal = "bottom right" if name.endswith("bottom_right") else "causal" if "causal" in name else ""
        if counts and causal == "bottom right":
            continue  # aligned to the end of the padding or of the real keys: TransformerEngine's backends differ
        for sink, kind in ((None, "vanilla"), (0.0, "off-by-one")):
            expected = formula(q, k, v, padded if counts else None, causal, sink)
            given: list[dict[str, Any]] = [{"attention_mask": padded}]
            given += [lengths] if counts and name != "arbitrary" else []
            for arguments in given:
                for layout in ("sbhd", "bshd"):
                    layer = te.DotProductAttention(
                        HEADS, DIM, num_gqa_groups=2, qkv_format=layout, attn_mask_type=name, softmax_type=kind
                    )
                    turned = [t if layout == "sbhd" else t.transpose(0, 1) for t in (q, k, v)]
                    y = layer(*turned, **arguments)
                    y = y if layout == "sbhd" else y.transpose(0, 1)
                    assert (y.double() - expected).abs().max() <= 32 * torch.finfo(torch.float32).eps, (name, layout)


def test_tensors_that_are_one_are_taken_apart() -> None:
    """q, k and v, or k and v, before or behind the heads, with their gradient; and each tensor is given once."""
    layer, q = te.DotProductAttention(HEADS, DIM, attn_mask_type="causal"), heads(SEQUENCE, BATCH, HEADS, DIM)
    for dim in (-3, -2):
        for name, apart in (("qkv_layer", (q, q + 1, q * 2)), ("kv_layer", (q + 1, q * 2))):
            packed = torch.stack(apart, dim).requires_grad_()
            own = (q,) * (name == "kv_layer")
            y = layer(*own, **{name: packed}, qkv_interleave_dim=dim)
            assert torch.equal(y, layer(*own, *apart)), (name, dim)
            y.sum().backward()
            assert packed.grad is not None
            assert packed.grad.abs().sum() > 0
    for wrong in ({}, {"qkv_layer": q}, {"kv_layer": q}, {"key_layer": q, "qkv_layer": q}):
        with pytest.raises(ValueError, match=r"DotProductAttention: got .*; needs"):
            layer(**wrong)
    with pytest.raises(ValueError, match="qkv_interleave_dim=-1; needs 2 there"):
        layer(q, kv_layer=torch.stack((q, q), -1), qkv_interleave_dim=-1)


def test_packed_sequences_and_biases() -> None:
    cut = torch.tensor([0, 3, 5])
    q = heads(5, HEADS, DIM)
    y = te.DotProductAttention(HEADS, DIM, qkv_format="thd", attn_mask_type="padding_causal")(
        q, q, q, cu_seqlens_q=cut, cu_seqlens_kv=cut, max_seqlen_q=3, max_seqlen_kv=3
    )
    for begin, end in ((0, 3), (3, 5)):
        own = q[begin:end, None]
        expected = formula(own, own, own, None, "causal", None)
        assert (y[begin:end] - expected[:, 0]).abs().max() <= 32 * torch.finfo(torch.float32).eps
    layer, x = te.DotProductAttention(HEADS, DIM, attn_mask_type="no_mask"), heads(SEQUENCE, BATCH, HEADS, DIM)
    bias = torch.full((1, HEADS, SEQUENCE, SEQUENCE), -torch.inf).triu(1)
    added = layer(x, x, x, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    assert torch.allclose(added.double(), formula(x, x, x, None, "causal", None), atol=1e-5)
    with pytest.raises(NotImplementedError, match="core_attention_bias_type='pre_scale_bias'"):
        layer(x, x, x, core_attention_bias_type="pre_scale_bias")
    packed = te.DotProductAttention(HEADS, DIM, qkv_format="thd")
    for kind, what in (("alibi", "ALiBi"), ("post_scale_bias", "a bias"), ("pre_scale_bias", "'pre_scale_bias'")):
        with pytest.raises(NotImplementedError, match=what):
            packed(q, q, q, cu_seqlens_q=cut, core_attention_bias_type=kind, core_attention_bias=bias)
    with pytest.raises(ValueError, match="did you mean 'padding_causal'"):
        te.DotProductAttention(HEADS, DIM, attn_mask_type="paddingcausal")


def test_alibi_is_the_papers_bias() -> None:
    """Slopes 2**-2, 2**-4, ... of 4 heads, and of 3 those of 2 and one of 4 between; or given, one for each sample."""
    q, k = heads(4, BATCH, HEADS, DIM), heads(SEQUENCE, BATCH, HEADS, DIM)
    given = torch.rand(BATCH, HEADS)
    for count, slopes, own in (
        (4, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], None),
        (3, [2.0**-4, 2.0**-8, 2.0**-2], None),
        (4, given, given),
    ):
        for mask, first in (("causal", 0), ("no_mask", 2), ("causal_bottom_right", 2)):
            layer = te.DotProductAttention(count, DIM, attn_mask_type=mask)
            bias = torch.zeros(BATCH, count, 4, SEQUENCE)
            for i in range(4):
                for j in range(SEQUENCE):
                    bias[:, :, i, j] = -torch.as_tensor(slopes) * abs(i + first - j)
            x = q[:, :, :count], k[:, :, :count], k[:, :, :count]
            expected = layer(*x, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
            assert torch.equal(layer(*x, core_attention_bias_type="alibi", alibi_slopes=own), expected)
            assert not torch.equal(layer(*x), expected)
    module, x = te.MultiheadAttention(32, HEADS, DIM, 0.0), heads(SEQUENCE, BATCH, 32)
    assert not torch.equal(module(x, core_attention_bias_type="alibi"), module(x))


def test_heads_are_normed_behind_the_rotation() -> None:
    """TransformerEngine's default; in fp64 by complex numbers, RMSNorm and the formula. Before it is something else."""
    torch.manual_seed(2)
    own: dict[str, Any] = {"qk_norm_type": "RMSNorm", "bias": False, "fuse_qkv_params": True}
    layer, first = (te.MultiheadAttention(32, HEADS, DIM, 0.0, qk_norm_before_rope=b, **own) for b in (False, True))
    l2 = te.MultiheadAttention(32, HEADS, DIM, 0.0, qk_norm_type="L2Normalization")
    assert isinstance(l2.q_norm, te.ops.L2Normalization)
    assert l2.q_norm is l2.k_norm  # it has no parameters
    with torch.no_grad():
        layer.q_norm.weight.copy_(torch.rand(DIM))
        layer.k_norm.weight.copy_(torch.rand(DIM))
    first.load_state_dict(layer.state_dict())
    x, angles = heads(SEQUENCE, BATCH, 32), te.RotaryPositionEmbedding(DIM)(SEQUENCE)
    q, k, v = (x @ layer.qkv.weight.t()).unflatten(-1, (3 * HEADS, DIM)).double().chunk(3, -2)
    q, k = turned(q, angles, False), turned(k, angles, False)
    q, k = (t * (t.square().mean(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    q, k = q * layer.q_norm.weight.double(), k * layer.k_norm.weight.double()
    expected = formula(q, k, v, None, "causal", None) @ layer.out.weight.double().t()
    got = layer(x, rotary_pos_emb=angles)
    assert (got - expected).abs().max() <= 64 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert not torch.allclose(first(x, rotary_pos_emb=angles), got, rtol=1e-3)


def test_fused_rows_are_interleaved_in_a_state_dict() -> None:
    """Of each group its queries, its key, its value; of cross attention its key, its value; there and back."""
    for groups in (1, 2, 4):
        layer, other = (
            te.MultiheadAttention(32, HEADS, DIM, 0.0, num_gqa_groups=groups, fuse_qkv_params=True) for _ in range(2)
        )
        state = layer.state_dict()
        rows = state["qkv.weight"].view(groups, HEADS // groups + 2, DIM, 32)
        q, k, v = layer.qkv.weight.split([HEADS * DIM, groups * DIM, groups * DIM])
        for got, own in ((rows[:, :-2], q), (rows[:, -2], k), (rows[:, -1], v)):
            assert torch.equal(got.reshape(-1, 32), own)
        other.load_state_dict(state)
        assert all(map(torch.equal, layer.parameters(), other.parameters()))
    layer = te.MultiheadAttention(
        32, HEADS, DIM, 0.0, attention_type="cross", attn_mask_type="no_mask", fuse_qkv_params=True
    )
    rows = layer.state_dict()["key_value.weight"].view(HEADS, 2, DIM, 32)
    k, v = layer.kv.weight.chunk(2)
    assert torch.equal(rows[:, 0].reshape(-1, 32), k)
    assert torch.equal(rows[:, 1].reshape(-1, 32), v)


def test_parameters_have_their_names_and_pieces() -> None:
    """q, k and v apart or in one piece; views, so that weights can be written in place; a state dict goes both ways."""
    for changes in (
        {},
        {"num_gqa_groups": 2, "input_layernorm": True, "normalization": "RMSNorm", "bias": False},
        {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
        {"attention_type": "cross", "input_layernorm": True, "attn_mask_type": "no_mask"},
        {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True, "softmax_type": "learnable"},
    ):
        torch.manual_seed(1)
        layer, other = (te.MultiheadAttention(32, HEADS, DIM, 0.0, **changes) for _ in range(2))
        state = layer.state_dict()
        assert other.load_state_dict(state) == ([], [])
        x = heads(SEQUENCE, BATCH, 32)
        more = {"encoder_output": heads(3, BATCH, 32)} if "attention_type" in changes else {}
        for recipe in (Float8CurrentScaling(), DelayedScaling()):
            with te.autocast(recipe=recipe):
                assert torch.equal(layer(x, **more), other(x, **more))
        for tensor in state.values():
            tensor.fill_(0.25)
        assert all(parameter.eq(0.25).all() for parameter in layer.parameters())
    fused = te.MultiheadAttention(32, HEADS, DIM, fuse_qkv_params=True, qkv_weight_interleaved=False).state_dict()
    assert fused["qkv.weight"].shape == (3 * HEADS * DIM, 32)
    names = set(te.MultiheadAttention(32, HEADS, DIM, num_gqa_groups=2, input_layernorm=True, bias=False).state_dict())
    wanted = {f"layernorm_qkv.{name}_weight" for name in ("query", "key", "value", "layer_norm")}
    wanted |= {"layernorm_qkv.layer_norm_bias", "layernorm_qkv._extra_state", "proj.weight", "proj._extra_state"}
    assert names == wanted


def test_orders_that_ottava_does_not_have_are_refused() -> None:
    for changes, words in (
        ({"return_layernorm_output": True}, "return_layernorm_output=True is not in ottava"),
        ({"tp_size": 2}, "2 ranks with set_parallel_mode=False are not in ottava"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            te.MultiheadAttention(32, HEADS, **changes)
    layer, x = te.MultiheadAttention(32, HEADS, attention_dropout=0.0), heads(SEQUENCE, BATCH, 32)
    with pytest.raises(NotImplementedError, match="attn_mask_type='no_mask' of this call needs 'no_mask'"):
        layer(x, attn_mask_type="no_mask")
    assert torch.equal(layer(x, attn_mask_type="padding_causal"), layer(x))


HEADS_INFERENCE, GROUPS, DIM_INFERENCE, HIDDEN = 4, 2, 8, 32
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
    sizes: dict[str, Any] = {"num_heads_kv": GROUPS, "head_dim_k": DIM_INFERENCE, "dtype": torch.float64, **changes}
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
    layers = [te.TransformerLayer(HIDDEN, 48, HEADS_INFERENCE, layer_number=i + 1, **settings) for i in range(2)]
    model = nn.ModuleList(layers).eval()
    angles = te.RotaryPositionEmbedding(DIM_INFERENCE, interleaved=norm == "RMSNorm")(LENGTH)

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
    paged = params(is_paged=True, page_size=5, total_num_pages=9)
    in_pages = generate(run, paged, layout)
    assert all(torch.equal(torch.cat(in_pages[name]), torch.cat(rows)) for name, rows in found.items())
    used = [page for table in paged.caches[1].tables for page in table]
    assert sorted(used + paged.caches[1].free) == list(range(9))
    assert len(used) == sum(-(-length // 5) for length in paged.sequences.values())
    few = params(is_paged=True, page_size=5, total_num_pages=2)
    with pytest.raises(ValueError, match="Give a larger total_num_pages, or drop finished sequences"):
        generate(run, few, layout)


@sweep(layout=["sbhd", "bshd"], kind=["multihead", "core"])
def test_attention_alone_reads_token_by_token(layout: str, kind: str) -> None:
    """MultiheadAttention, and DotProductAttention, which is given queries, keys and values."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_gqa_groups": GROUPS, "attention_dropout": 0.0, "qkv_format": layout}
    if kind == "multihead":
        layer = te.MultiheadAttention(HIDDEN, HEADS_INFERENCE, layer_number=7, params_dtype=torch.float64, **sizes)
    else:
        layer = te.DotProductAttention(HEADS_INFERENCE, DIM_INFERENCE, layer_number=7, **sizes)

    def run(x: Tensor, past: te.InferenceParams | None) -> Tensor:
        if kind == "multihead":
            return layer(x, attn_mask_type="padding_causal", inference_params=past)
        heads = x.unflatten(-1, (HEADS_INFERENCE, DIM_INFERENCE))
        k, v = heads[..., :GROUPS, :], heads[..., GROUPS:, :] + 1
        return layer(heads, k, v, attn_mask_type="padding_causal", inference_params=past)

    axis = 0 if layout == "bshd" else 1
    same(generate(run, params(), layout), lambda x: run(x.unsqueeze(axis), None).squeeze(axis))


def test_packed_sequences_read_token_by_token() -> None:
    """DotProductAttention with "thd": new tokens one sequence behind the other, with pages and without."""
    layer = te.DotProductAttention(
        HEADS_INFERENCE, DIM_INFERENCE, num_gqa_groups=GROUPS, layer_number=7, qkv_format="thd"
    )

    def run(x: Tensor, past: te.InferenceParams | None) -> Tensor:
        heads = x.unflatten(-1, (HEADS_INFERENCE, DIM_INFERENCE))
        qkv = heads, heads[..., :GROUPS, :], heads[..., GROUPS:, :] + 1
        if past is None:
            ends = torch.tensor([0, len(x)])
            return layer(*qkv, attn_mask_type="padding_causal", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        counts = past.new_tokens
        packed = [torch.cat([t[row, :new] for row, new in enumerate(counts)]) for t in qkv]
        y = layer(*packed, attn_mask_type="padding_causal", inference_params=past)
        padded = y.new_zeros(len(counts), max(counts), y.shape[-1])
        for row, part in enumerate(y.split(counts)):
            padded[row, : len(part)] = part
        return padded

    plain = generate(run, params(), "bshd")
    same(plain, lambda x: run(x, None))
    paged = generate(run, params(is_paged=True, page_size=2, total_num_pages=18), "bshd")
    assert all(torch.equal(torch.cat(paged[name]), torch.cat(rows)) for name, rows in plain.items())
    past = params()
    past.pre_step({"a": 2})
    q = torch.ones(3, HEADS_INFERENCE, DIM_INFERENCE, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"got 3 packed rows; pre_step got \[2\], 2 in all"):
        layer(q, q[:, :GROUPS], q[:, :GROUPS], inference_params=past)


def test_what_does_not_work_is_refused_by_name() -> None:
    layer = te.TransformerLayer(HIDDEN, 48, HEADS_INFERENCE, layer_number=1, attn_input_format="bshd").eval()
    past, x = params(num_heads_kv=HEADS_INFERENCE, dtype=torch.float32), torch.ones(2, 3, HIDDEN)
    with pytest.raises(ValueError, match="got 2 sequences of 3 new tokens; pre_step got 0, of"):
        layer(x, inference_params=past)
    past.pre_step({"a": 3, "b": 2})
    with pytest.raises(ValueError, match=r"got 2 sequences of 4 new tokens; pre_step got 2, of \[3, 2\]"):
        layer(torch.ones(2, 4, HIDDEN), inference_params=past)
    for wrong in ({"self_attn_mask_type": "padding"}, {"attention_mask": torch.zeros(2, 1, 1, 3, dtype=torch.bool)}):
        with pytest.raises(NotImplementedError, match=r"attention to a cache is causal"):
            layer(x, inference_params=past, **wrong)
    for step, reason in (({}, "got {}; needs 1 to 3"), ({"a": 0}, "1 or more new tokens"), ({"a": 10}, "length is 12")):
        with pytest.raises(ValueError, match=reason):
            past.pre_step(step)
    assert past.sequences == {"a": 3, "b": 2}  # a refused step changes nothing
    assert past.get_seqlens_pre_step().tolist() == [0, 0]
    other = te.TransformerLayer(HIDDEN, 48, HEADS_INFERENCE, attn_input_format="bshd")
    thd = te.MultiheadAttention(HIDDEN, HEADS_INFERENCE, qkv_format="thd", layer_number=1)
    short = te.RotaryPositionEmbedding(DIM_INFERENCE)(2)
    for error, words, call in (
        (ValueError, "this step needs 3", lambda: layer(x, inference_params=past, rotary_pos_emb=short)),
        (ValueError, "inference_params need a layer_number", lambda: other(x, inference_params=past)),
        (NotImplementedError, "inference_params with 'thd' are not", lambda: thd(x[0], inference_params=past)),
        (TypeError, "inference_params is a dict; needs an InferenceParams", lambda: layer(x, inference_params={})),
        (NotImplementedError, "sequence_len_offset is a name of Transf", lambda: past.sequence_len_offset),
        (ValueError, "needs num_heads_kv, head_dim_k and dtype", lambda: te.InferenceParams(1, 1)),
        (NotImplementedError, "custom_cache_manager is not in", lambda: params(custom_cache_manager=object())),
        (ValueError, "page_size=4 and total_num_pages=None", lambda: params(is_paged=True, page_size=4)),
    ):
        with pytest.raises(error, match=words):
            call()


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Pairs as complex numbers, (S, B, H, D)."""
    half = angles.shape[-1] // 2
    radians = (angles[..., ::2] if interleaved else angles[..., :half]).double()
    pairs = x.double().unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    real, imaginary = a * radians.cos() - b * radians.sin(), a * radians.sin() + b * radians.cos()
    return torch.stack((real, imaginary), -1 if interleaved else -2).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_turn_heads_as_complex_numbers(interleaved: bool) -> None:
    """In every layout, and squeezed for long contexts."""
    angles = te.RotaryPositionEmbedding(DIM, interleaved=interleaved)(SEQUENCE)
    assert angles.shape == (SEQUENCE, 1, 1, DIM)
    x = torch.randn(SEQUENCE, BATCH, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    expected, longer = turned(x, angles, interleaved), te.RotaryPositionEmbedding(DIM, interleaved=interleaved)(9)
    for layout, forth, back in (("sbhd", x, lambda y: y), ("bshd", x.transpose(0, 1), lambda y: y.transpose(0, 1))):
        table = rotary_table(longer, interleaved, layout, forth)
        assert table is not None
        assert (back(rotate(forth, table)).double() - expected).abs().max() <= 1e-5
    table = rotary_table(longer, interleaved, "thd", x[:, 0], torch.tensor([0, 4, SEQUENCE]))
    assert table is not None
    packed = torch.cat((turned(x[:4, :1], angles[:4], interleaved), turned(x[4:, :1], angles[:2], interleaved)))
    assert (rotate(x[:, 0], table).double() - packed[:, 0]).abs().max() <= 1e-5
    with pytest.raises(ValueError, match="got angles of 2 positions; needs 6"):
        rotary_table(angles[:2], interleaved, "sbhd", x)
    plain = te.RotaryPositionEmbedding(DIM, interleaved=interleaved)
    squeezed = te.RotaryPositionEmbedding(DIM, 1.0, 4, 64, interleaved=interleaved)
    assert torch.allclose(squeezed(64), plain(64) / 4)
    assert torch.allclose(squeezed(512), plain(512) / 8)
    assert torch.allclose(plain(3, offset=2), plain(5)[2:])
    assert te.RotaryPositionEmbedding(DIM, 0.5)(2).shape[-1] == DIM // 2
    with pytest.raises(NotImplementedError, match="different angles for queries and keys"):
        rotary_table((angles, angles), interleaved, "sbhd", x)


def by_hand(q: Tensor, k: Tensor, v: Tensor, change: Any) -> tuple[Tensor, Tensor]:
    """(result (S, B, H * D), scores (B, H, S, S)) of "sbhd" tensors in plain FP32; -inf of `change` hides a key."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = change((q @ k.mT) * q.shape[3] ** -0.5)
    return (scores.softmax(-1).nan_to_num() @ v).permute(2, 0, 1, 3).flatten(2), scores


def test_the_largest_score_of_each_head() -> None:
    """Beside all scores; Megatron's QK-Clip reads it."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, 3, heads, 8, generator=rng) for heads in (4, 2, 2))
    bias = torch.randn(1, 4, 6, 6, generator=rng) * 4
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    layer = te.DotProductAttention(4, 8, 2, return_max_logit=True)
    for call, change in (
        ({}, lambda s: s.masked_fill(later, -torch.inf)),
        ({"attn_mask_type": "no_mask"}, lambda s: s),
        (
            {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias},
            lambda s: (s + bias).masked_fill(later, -torch.inf),
        ),
    ):
        y, largest = layer(q, k, v, **call)
        wanted, scores = by_hand(q, k, v, change)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(largest, scores.amax((0, 2, 3)), rtol=1e-5, atol=1e-5)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    packed = te.DotProductAttention(4, 8, 2, qkv_format="thd", attn_mask_type="padding", return_max_logit=True)
    largest = packed(q[:, 0], k[:, 0], v[:, 0], cu_seqlens_q=ends, cu_seqlens_kv=ends)[1]
    each = [by_hand(*(t[a:b, :1] for t in (q, k, v)), lambda s: s)[1].amax((0, 2, 3)) for a, b in ((0, 2), (2, 6))]
    torch.testing.assert_close(largest, torch.stack(each).amax(0), rtol=1e-5, atol=1e-5)
    wide = packed(*(t[:, 0].bfloat16() for t in (q, k, v)), cu_seqlens_q=ends, cu_seqlens_kv=ends)[1]
    assert wide.dtype == torch.bfloat16


def test_padding_between_packed_sequences() -> None:
    """The bits of the same sequences without it; zeros and no gradients where padding lies."""
    rng = torch.Generator().manual_seed(0)
    lengths, room = [3, 1, 4], [5, 2, 4]
    real = torch.cat([torch.arange(sum(room[:i]), sum(room[:i]) + n) for i, n in enumerate(lengths)])
    ends, starts = (torch.tensor([0, *numbers]).cumsum(0).int() for numbers in (lengths, room))
    qkv = [torch.randn(sum(room), heads, 8, generator=rng).requires_grad_() for heads in (4, 2, 2)]
    layer = te.DotProductAttention(4, 8, 2, qkv_format="thd", attn_mask_type="padding_causal")
    call = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    y = layer(*qkv, **call, cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts, pad_between_seqs=True)
    tight = [t.detach()[real].requires_grad_() for t in qkv]
    wanted = layer(*tight, **call)
    assert torch.equal(y[real], wanted)
    assert int((y == 0).all(1).sum()) == sum(room) - sum(lengths)
    dy = torch.randn(y.shape, generator=rng)
    grads = torch.autograd.grad(y, qkv, dy), torch.autograd.grad(wanted, tight, dy[real])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one[real], other)
        assert not one[[3, 4, 6]].any()
    assert torch.equal(layer(*tight, **call, cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends), wanted)


def test_scores_through_a_function_of_the_caller() -> None:
    """A learned bias of relative positions and a soft cap, beside plain formulas, with their gradients."""
    rng = torch.Generator().manual_seed(0)
    qkv = [torch.randn(5, 2, heads, 8, generator=rng).requires_grad_() for heads in (4, 2, 2)]
    slopes = torch.randn(4, generator=rng).requires_grad_()
    gap = torch.arange(5)[:, None] - torch.arange(5)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 2 * torch.tanh(score / 2) + slopes[h] * (i - j)

    for kind, hidden in (("causal", gap < 0), ("no_mask", gap > 99)):
        layer = te.DotProductAttention(4, 8, 2, attn_mask_type=kind)
        y = layer(*qkv, score_mod=score_mod)
        wanted, _ = by_hand(
            *qkv,
            lambda s, hidden=hidden: (2 * torch.tanh(s / 2) + slopes[:, None, None] * gap).masked_fill(
                hidden, -torch.inf
            ),
        )
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
        dy = torch.randn(y.shape, generator=rng)
        for one, other in zip(
            torch.autograd.grad(y, (*qkv, slopes), dy), torch.autograd.grad(wanted, (*qkv, slopes), dy), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="a score_mod of 3 arguments builds a graph of cuDNN"):
        layer(*qkv, score_mod=lambda graph, score, tensors: score)
    with pytest.raises(ValueError, match="score_mod knows no dropout"):
        te.DotProductAttention(4, 8, 2, attention_dropout=0.5)(*qkv, score_mod=score_mod)
    with pytest.raises(ValueError, match="score_mod needs whole sequences"):
        te.DotProductAttention(4, 8, 2, qkv_format="thd")(*(t[:, 0] for t in qkv), score_mod=score_mod)
