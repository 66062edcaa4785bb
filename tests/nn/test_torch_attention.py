"""torch's attention under a recipe: its bits in high precision, its projections in FP8, its parameters untouched."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.nn.torch_attention import MultiheadAttention, attention_parts

E, HEADS, L, S, B = 64, 4, 6, 9, 2
HOW = (
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"kdim": 48, "vdim": 40},
    {"kdim": 48, "vdim": 40, "bias": False, "add_bias_kv": True, "add_zero_attn": True},
)


def converted(module: nn.Module, recipe: str) -> Any:
    twin = copy.deepcopy(module)
    ottava.convert(twin, recipe, filter=lambda name, layer: True)
    return twin


def masks(own: int, other: int, batch: int) -> list[dict[str, Any]]:
    causal = torch.ones(own, other, dtype=torch.bool).triu(1)
    padding = torch.zeros(batch, other, dtype=torch.bool)
    padding[0, -2:] = True
    return [
        {},
        {"attn_mask": causal, "is_causal": True},
        {"key_padding_mask": padding},
        {"attn_mask": causal, "key_padding_mask": padding},
        {"attn_mask": torch.randn(batch * HEADS, own, other)},
        {"attn_mask": torch.randn(own, other), "key_padding_mask": torch.randn(batch, other)},
    ]


def test_in_high_precision_it_is_torchs_to_the_bit() -> None:
    """Every constructor argument, self and cross attention, masks, weights or none, batch first or not; gradients."""
    for how, batch_first, alike in product(HOW, (False, True), (True, False)):
        if alike and "kdim" in how:
            continue
        torch.manual_seed(0)
        theirs = nn.MultiheadAttention(E, HEADS, batch_first=batch_first, **how)
        ours = converted(theirs, "bf16")
        assert type(ours) is MultiheadAttention
        assert isinstance(ours, nn.MultiheadAttention)
        size = S if not alike else L
        query = torch.randn(B, L, E)
        memory = query if alike else torch.randn(B, S, how.get("kdim", E))
        value = query if alike else memory if "vdim" not in how else torch.randn(B, S, how["vdim"])
        given = [x if batch_first else x.transpose(0, 1) for x in (query, memory, value)]
        given = [given[0]] * 3 if alike else [given[0], given[1], given[1] if value is memory else given[2]]
        for mask, need in product(masks(L, size, B), ({"need_weights": False}, {}, {"average_attn_weights": False})):
            if mask.get("is_causal") and "add_bias_kv" in how:
                continue  # torch's hint and its longer keys do not go together
            y, weights = theirs(*given, **mask, **need)
            own, own_weights = ours(*given, **mask, **need)
            assert torch.equal(y, own)
            assert (weights is None) == (own_weights is None)
            assert weights is None or torch.equal(weights, own_weights)
        y.square().sum().backward()
        own.square().sum().backward()
        for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            assert a.grad is not None
            # of cross attention torch multiplies the same matrices; sums of gradients may be in another order
            assert float((a.grad - b.grad).abs().max()) <= 64 * 2.0**-24 * float(a.grad.abs().max()), name


def test_one_sequence_without_a_batch_and_three_inputs() -> None:
    theirs = nn.MultiheadAttention(E, HEADS)
    ours = converted(theirs, "bf16")
    q, k, v = torch.randn(L, E), torch.randn(S, E), torch.randn(S, E)
    mask = torch.zeros(S, dtype=torch.bool)
    mask[0] = True
    for one in (theirs(q, q, q)[0] - ours(q, q, q)[0], theirs(q, k, v)[0] - ours(q, k, v)[0]):
        assert not one.any()
    for a, b in zip(theirs(q, k, k, key_padding_mask=mask), ours(q, k, k, key_padding_mask=mask), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "delayed"])
def test_an_encoder_and_a_decoder_run_wholly_in_fp8(name: str) -> None:
    """Training and evaluation: torch's fused operators, which go past every layer, stay off; keys stay."""
    options: dict[str, Any] = {"batch_first": True, "dropout": 0.0}
    model = nn.Transformer(E, HEADS, 2, 1, 128, **options).bfloat16()
    keys = list(model.state_dict())
    report = ottava.convert(model, name)
    assert not report.skipped
    assert not report.outside
    assert [key for key in model.state_dict() if ".quantizers." not in key] == keys
    source, target = (torch.randn(B, n, E, dtype=torch.bfloat16) for n in (S, L))
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, -3:] = True
    y = model(source, target, src_key_padding_mask=padding)
    y.float().sum().backward()
    ottava.assert_fp8(model, 1.0)
    model.eval()
    with torch.no_grad():
        again = model(source, target, src_key_padding_mask=padding)
    seen = [row for row in ottava.receipt(model, training=False).rows if row.gemm == "fprop" and row.fp8]
    assert (
        len(seen) == 2 * 4 + 7
    )  # two linears, in_proj and out_proj; a decoder layer has q and kv of the memory besides
    if name != "delayed":  # dropout is off, and scales are those of the tensors
        assert torch.equal(again, y)


def test_what_cannot_be_taken_is_named() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, *args: Tensor) -> Any:  # type: ignore[override]
            return super().forward(*args)

    model = nn.ModuleDict({"own": Own(E, HEADS), "part": nn.MultiheadAttention(E, HEADS)})
    report = ottava.convert(model, "tensorwise", filter=lambda name, layer: "in_proj" in name or "no")
    assert report.skipped["own.out_proj"] == "read by an attention whose class has a forward of its own"
    assert report.skipped["part.out_proj"] == "no"
    assert dict(report.outside) == {
        "own.in_proj_weight": "multiplied by Own itself, a class that convert does not know"
    }
    assert type(model["part"].out_proj) is not ottava.nn.Linear
    x = torch.randn(L, B, E)
    with pytest.raises(RuntimeError, match="is_causal is a hint"):
        model["part"](x, x, x, is_causal=True)
    nested = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(2, E)])
    with pytest.raises(TypeError, match="got a nested tensor"):
        model["part"](nested, nested, nested)
    assert list(attention_parts(nn.MultiheadAttention(E, HEADS, kdim=8, bias=False))) == ["q_proj", "k_proj", "v_proj"]
