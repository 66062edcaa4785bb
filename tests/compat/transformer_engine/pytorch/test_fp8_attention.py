"""FP8 attention as TransformerEngine's users ask for it: fp8_dpa and fp8_mha under three recipes, forward and backward,
beside plain formulas on casts of torch's own float8 types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    Recipe,
)

HEADS, GROUPS, DIM, TOKENS, BATCH = 4, 2, 32, 64, 2
Cast = Callable[[str, Tensor, int], Tensor]
"""(tensor, its numbers, the dimension that a GEMM sums) -> the numbers behind a cast."""


def inputs(step: int = 0, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    rng = torch.Generator().manual_seed(step)
    shapes = (TOKENS, BATCH, HEADS, DIM), (TOKENS, BATCH, GROUPS, DIM), (TOKENS, BATCH, GROUPS, DIM)
    qkv = [torch.randn(shape, generator=rng).mul(1.0 + step).to(dtype) for shape in shapes]
    return qkv, torch.randn(TOKENS, BATCH, HEADS * DIM, generator=rng).mul(1e-2).to(dtype)


def run(layer: te.DotProductAttention, recipe: Recipe, qkv: list[Tensor], dy: Tensor) -> list[Tensor]:
    qkv = [t.clone().requires_grad_() for t in qkv]
    with te.autocast(recipe=recipe):
        y = layer(*qkv)
    return [y.detach(), *torch.autograd.grad(y, qkv, dy)]


def by_hand(qkv: list[Tensor], dy: Tensor, cast: Cast) -> list[Tensor]:
    """The formulas, in "sbhd" and back; GEMMs in FP32, casts where `cast` puts them."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in qkv)
    do = dy.view(TOKENS, BATCH, HEADS, DIM).permute(1, 2, 0, 3)

    def wide(t: Tensor) -> Tensor:
        return t.repeat_interleave(HEADS // GROUPS, 1)

    def narrow(t: Tensor) -> Tensor:
        return t.view(BATCH, GROUPS, HEADS // GROUPS, TOKENS, DIM).sum(2)

    scale = DIM**-0.5
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    s = (cast("q", q, -1) @ wide(cast("k", k, -1)).mT * scale).masked_fill(later, -torch.inf).softmax(-1)
    o = cast("o", cast("s", s, -1) @ wide(cast("v", v, -2)), -1)
    along = (cast("do", do, -1) * o).sum(-1, keepdim=True)
    ds = s * (cast("do", do, -1) @ wide(cast("v", v, -1)).mT - along)
    dq = cast("dp", ds, -1) @ wide(cast("k", k, -2)) * scale
    dk = narrow(cast("dp", ds, -2).mT @ cast("q", q, -2)) * scale
    dv = narrow(cast("s", s, -2).mT @ cast("do", do, -2))
    return [o.permute(2, 0, 1, 3).flatten(2), *(t.permute(2, 0, 1, 3) for t in (dq, dk, dv))]


def to_fp8(x: Tensor, amax: Tensor, backward: bool) -> Tensor:
    """Per tensor, by torch's cast."""
    kind, most = (torch.float8_e5m2, 57344.0) if backward else (torch.float8_e4m3fn, 448.0)
    factor = most / amax
    return (x * factor).clamp(-most, most).to(kind).float() / factor


def current(qkv: list[Tensor]) -> Cast:
    """One scale for q, k and v, of their own amax; o stays."""
    largest = torch.stack([t.abs().max() for t in qkv]).max()

    def cast(name: str, x: Tensor, dim: int) -> Tensor:
        if name == "o":
            return x
        return to_fp8(x, largest if name in "qkv" else x.abs().max(), name in ("do", "dp"))

    return cast


def in_blocks(name: str, x: Tensor, dim: int) -> Tensor:
    """MXFP8 (OCP MX 1.0): blocks of 32 along dim; the scale is the power of two that fits the amax into 448."""
    if name in ("s", "dp", "o"):
        return x
    turned = x.transpose(-1, dim) if dim != -1 else x
    blocks = turned.reshape(*turned.shape[:-1], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True)
    factor = torch.exp2(torch.ceil(torch.log2(amax / 448.0)))
    cast = ((blocks / factor).to(torch.float8_e4m3fn).float() * factor).view(turned.shape)
    return cast.transpose(-1, dim) if dim != -1 else cast


def far(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def test_current_scaling_and_blocks_are_formulas_on_torchs_casts() -> None:
    qkv, dy = inputs()
    layer = te.DotProductAttention(HEADS, DIM, GROUPS)
    for recipe, cast in (
        (Float8CurrentScaling(fp8_dpa=True), current(qkv)),
        (MXFP8BlockScaling(fp8_dpa=True), in_blocks),
    ):
        wanted = by_hand(qkv, dy, cast)
        exact = run(layer, MXFP8BlockScaling(), qkv, dy)
        got = run(layer, recipe, qkv, dy)
        for one, other, plain in zip(got, wanted, exact, strict=True):
            # a sum's last bits may turn a cast of S or dP by one step, 2**-3 of single numbers
            assert far(one, other) < 2e-3, type(recipe).__name__
            assert 0.005 < far(one, plain) < 0.15  # FP8's own error: casts of 2**-4 and, backward, 2**-3
        assert layer.core.last_backend == "FP8 emulation"


def test_delayed_scaling_has_transformer_engines_histories() -> None:
    """Each cast takes the largest amax of the window of steps before it, as worked out by hand."""
    length, layer = 2, te.DotProductAttention(HEADS, DIM, GROUPS)
    recipe = DelayedScaling(amax_history_len=length, fp8_dpa=True)
    history: dict[str, list[Tensor]] = {}
    for step in (0, 3, 1, 2, 0):
        qkv, dy = inputs(step)
        seen: dict[str, Tensor] = {}

        largest = torch.stack([t.abs().max() for t in qkv]).max()

        def cast(name: str, x: Tensor, dim: int, seen: dict[str, Tensor] = seen, largest: Tensor = largest) -> Tensor:
            key = "qkv" if name in "qkv" else name
            seen[key] = largest if key == "qkv" else x.abs().max()
            # ottava starts with the tensor's own amax
            amax = torch.stack(history[key][-length:]).max() if key in history else seen[key]
            return to_fp8(x, amax, name in ("do", "dp", "dqkv"))

        y, *grads = by_hand(qkv, dy, cast)
        flat = cast("dqkv", torch.cat([t.flatten() for t in grads]), -1).split([t.numel() for t in grads])
        wanted = [y, *(part.view(t.shape) for part, t in zip(flat, grads, strict=True))]
        got = run(layer, recipe, qkv, dy)
        for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
            # a sum's last bits may turn a cast of a result by one step
            assert far(one, other) < (5e-3 if number == 0 else 2e-2), (step, number)
        for key, amax in seen.items():
            history.setdefault(key, []).append(amax)
    door = layer.core.quantizers.qkv
    torch.testing.assert_close(door.amax_history[0], history["qkv"][-2], rtol=0, atol=0)
    before = {name: t.clone() for name, t in layer.core.quantizers.named_buffers()}
    with torch.no_grad():
        layer.eval()
        run_eval = inputs(9)[0]
        with te.autocast(recipe=recipe):
            layer(*run_eval)
    assert all(torch.equal(t, before[name]) for name, t in layer.core.quantizers.named_buffers())


def test_what_leaves_attention_is_cast_under_fp8_mha() -> None:
    """O and dQKV hold numbers of a cast; a linear behind casts them again, which changes no code."""
    qkv, dy = inputs(dtype=torch.bfloat16)
    layer = te.DotProductAttention(HEADS, DIM, GROUPS)
    inside = run(layer, Float8CurrentScaling(fp8_dpa=True), qkv, dy)
    across = run(layer, Float8CurrentScaling(fp8_mha=True), qkv, dy)
    for number, (one, other) in enumerate(zip(across, inside, strict=True)):
        backward = number > 0
        amax = torch.stack([t.abs().max() for t in (across[1:] if backward else across[:1])]).max().float()
        again = to_fp8(one.float(), amax, backward)
        assert torch.equal(again.bfloat16(), one), number
        assert not torch.equal(one, other)
        assert far(one, other) < (2**-3 if backward else 2**-4)


def test_recomputation_repeats_the_scales_of_its_forward() -> None:
    recipe = DelayedScaling(amax_history_len=4, fp8_dpa=True)
    for reentrant in (True, False):
        results: list[list[Tensor]] = []
        for recomputed in (False, True):
            layer = te.DotProductAttention(HEADS, DIM, GROUPS)
            found = []
            for step in range(3):
                qkv, dy = inputs(step)
                qkv = [t.requires_grad_() for t in qkv]
                with te.autocast(recipe=recipe):
                    y = te.checkpoint(layer, *qkv, use_reentrant=reentrant) if recomputed else layer(*qkv)
                y.backward(dy)
                found += [y.detach(), *(t.grad for t in qkv)]
            results.append(found)  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), reentrant


def test_formats_and_what_is_refused() -> None:
    attention: Any = DelayedScaling(fp8_format=Format.E4M3, fp8_dpa=True, margin=1, amax_history_len=7).ottava.attention
    assert {str(getattr(attention, name).format) for name in ("qkv", "do", "dp", "dqkv")} == {"E4M3"}
    assert (attention.s.margin, attention.s.amax_history_len, attention.predicted) == (1, 7, True)
    hybrid: Any = MXFP8BlockScaling(fp8_format=Format.HYBRID, fp8_dpa=True).ottava.attention
    assert (str(hybrid.qkv.format), str(hybrid.do.format), hybrid.s) == ("E4M3", "E5M2", None)
    assert DelayedScaling().ottava.attention is None
    for fp8_format, gradients in ((Format.HYBRID, "E5M2"), (Format.E4M3, "E4M3")):
        own = "qkv E4M3[tensor], s E4M3[tensor], o high precision, do {0}[tensor], dp {0}[tensor], dqkv high precision"
        recipe = Float8CurrentScaling(fp8_dpa=True, fp8_format=fp8_format).ottava
        assert str(recipe.attention) == own.format(gradients)
    for recipe, words in (
        (Float8BlockScaling(fp8_dpa=True), "attention casts per tensor or in blocks of 32"),
        (MXFP8BlockScaling(fp8_mha=True), "results of attention stay in high precision there"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            recipe.ottava  # noqa: B018
    qkv, _ = inputs()
    with (
        pytest.raises(ValueError, match="FP8 attention knows no dropout"),
        te.autocast(recipe=DelayedScaling(fp8_dpa=True)),
    ):
        te.DotProductAttention(HEADS, DIM, GROUPS, attention_dropout=0.5)(*qkv)
