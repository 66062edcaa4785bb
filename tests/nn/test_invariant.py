"""Under `autocast(batch_invariant=True)` the bits of a row depend on no other row: neither batch, padding nor cuts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ottava
from ottava.kernels.native import build as native_build
from ottava.nn import KVCache, RotaryEmbedding, TransformerLayer
from ottava.nn.activations import ACTIVATIONS, ActivationFormula
from ottava.nn.attention import invariant_attention
from ottava.nn.layer import invariant_producer
from ottava.nn.norms import NormFormula

pytestmark = pytest.mark.skipif(
    native_build.load("gemm").library is None, reason="the one kernel that is batch invariant needs a compiler"
)
RECIPES = ("rowwise", "rowwise_with_gw_hp", "blockwise", "blockwise_fp32", "mxfp8", "mxfp8_floor", "bf16")
REFUSED = ("tensorwise", "tensorwise_e4m3", "delayed", "guarded", "nvfp4")


def invariant(recipe: Any = None) -> Any:
    return ottava.autocast(recipe, batch_invariant=True)


def forward_and_dx(model: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = model(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


def test_a_thousand_batchings_change_no_bit() -> None:
    """Random cuts of 96 rows into batches, with rows of padding behind: 1,000 batches, forward and dX, 7 recipes."""
    torch.manual_seed(0)
    batches = 0
    for recipe in RECIPES:
        model = nn.Sequential(
            ottava.nn.NormLinear(256, 256, norm="rmsnorm", recipe=recipe, dtype=torch.bfloat16),
            ottava.nn.ActivatedLinear(128, 256, activation="swiglu", recipe=recipe, dtype=torch.bfloat16),
        )
        x = torch.randn(96, 256).bfloat16() * torch.randn(96, 1).exp().bfloat16()
        dy = torch.randn(96, 256).bfloat16()
        with invariant():
            whole = forward_and_dx(model, x, dy)
            for _ in range(26):
                cuts = sorted({0, 96, *torch.randint(1, 96, (5,)).tolist()})
                for a, b in itertools.pairwise(cuts):
                    padding = int(torch.randint(0, 9, ()))
                    rows, d_rows = (F.pad(t[a:b], (0, 0, 0, padding), value=3.0) for t in (x, dy))
                    part = forward_and_dx(model, rows, d_rows)
                    assert all(torch.equal(p[: b - a], w[a:b]) for p, w in zip(part, whole, strict=True)), recipe
                    batches += 1
    assert batches >= 1_000


def test_recipes_whose_rows_share_something_are_refused() -> None:
    x = torch.randn(4, 64).bfloat16()
    for recipe in REFUSED:
        layer = ottava.nn.Linear(64, 64, recipe=recipe, dtype=torch.bfloat16)
        with invariant(), pytest.raises(ValueError, match=rf"recipe '{recipe}' cannot be batch invariant: .*share"):
            layer(x)
        with invariant("rowwise"):  # another recipe for this forward
            layer(x)
    with pytest.raises(ValueError, match="needs enabled=True"):
        ottava.autocast(batch_invariant=True, enabled=False)
    layer = ottava.nn.Linear(64, 64, recipe="bf16")
    with invariant(), pytest.raises(ValueError, match="takes bfloat16 on cpu"):
        layer(torch.randn(4, 64))


def test_the_receipt_says_so() -> None:
    layer = ottava.nn.Linear(64, 64, recipe="blockwise_fp32", dtype=torch.bfloat16)
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    layer(x).sum().backward()
    assert "batch_invariant" not in str(ottava.receipt(layer))
    with invariant():
        layer(x).sum().backward()
    kernels = {row.gemm: row.kernel for row in ottava.receipt(layer).rows}
    assert kernels["fprop"] == kernels["dgrad"] == "native_gemm batch_invariant"
    assert layer.last_call is not None
    assert layer.last_call.recipe.name == "blockwise_fp32/batch_invariant"
    emulated = ottava.nn.Linear(64, 64, recipe="rowwise", dtype=torch.bfloat16)
    with ottava.autocast(accumulator="hopper", batch_invariant=True):  # a profile sums each element alone
        whole = emulated(x)
        assert torch.equal(emulated(x[1:3]), whole[1:3])


def test_numbers_are_those_of_the_recipe() -> None:
    """Another order of sums at most: fp32 accumulation, then bf16."""
    for recipe in RECIPES[:-1]:
        layer = ottava.nn.Linear(256, 64, recipe=recipe, dtype=torch.bfloat16)
        x = torch.randn(32, 256).bfloat16()
        y = layer(x)
        with invariant():
            other = layer(x)
        assert (y.float() - other.float()).norm() / y.float().norm() < 2.0**-8


def test_activations_and_norms_of_a_row() -> None:
    """Every activation, forward and backward, at widths with and without ends inside a vector, in fp32 and bf16."""
    torch.manual_seed(1)
    for width in (96, 250, 512):
        for dtype in (torch.float32, torch.bfloat16):
            x, dy = torch.randn(40, width).to(dtype), torch.randn(40, width).to(dtype)
            weight = torch.randn(width).to(dtype)
            producers: list[tuple[Any, tuple[Tensor, ...]]] = [
                (invariant_producer(ActivationFormula(one)), ()) for one in ACTIVATIONS.values()
            ]
            producers += [(NormFormula("rmsnorm"), (weight,)), (NormFormula("layernorm"), (weight, weight))]
            for produce, parameters in producers:
                rows, kept = produce.forward(x, *parameters)
                dx = produce.backward(dy[:, : rows.shape[1]], kept)[0]
                for a, b in ((0, 1), (3, 20), (39, 40), (7, 8)):
                    part, kept = produce.forward(x[a:b], *parameters)
                    assert torch.equal(part, rows[a:b]), (produce, width, dtype)
                    back = produce.backward(dy[a:b, : rows.shape[1]], kept)[0]
                    assert torch.equal(back, dx[a:b]), (produce, width, dtype)
    assert invariant_producer(None) is None


def test_attention_agrees_with_torchs() -> None:
    """To the roundings of bf16: of probabilities, and of the result. Forward and backward."""
    torch.manual_seed(2)
    for heads, groups, queries, keys, dim in ((4, 2, 9, 9, 32), (2, 2, 1, 70, 64), (3, 1, 130, 130, 16)):
        q, k, v = (torch.randn(2, n, s, dim).bfloat16().requires_grad_() for n, s in
                   ((heads, queries), (groups, keys), (groups, keys)))  # fmt: skip
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        for mask in (seen, torch.zeros(queries, keys).masked_fill(~seen, -torch.inf), None):
            y = invariant_attention(q, k, v, mask, dim**-0.5)
            wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
            wanted = F.scaled_dot_product_attention(*wide, mask, scale=dim**-0.5, enable_gqa=True)
            dy = torch.randn(y.shape).bfloat16()
            assert (y.float() - wanted).norm() / wanted.norm() < 2 * 2.0**-8
            for got, exact in zip(torch.autograd.grad(y, (q, k, v), dy), torch.autograd.grad(wanted, wide, dy.float()), strict=True):  # fmt: skip  # noqa: E501
                assert (got.float() - exact).norm() / exact.norm() < 4 * 2.0**-8
    nothing = invariant_attention(q, k, v, torch.zeros(queries, keys, dtype=torch.bool), 1.0)
    assert not nothing.any()
    assert invariant_attention(q[:, :, :0], k, v, None, 1.0).shape == (2, 3, 0, 16)
    with pytest.raises(ValueError, match="takes bfloat16 on cpu"):
        invariant_attention(q.float(), k.float(), v.float(), None, 1.0)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_prefill_is_decoding_token_by_token(recipe: str) -> None:
    """A block of grouped queries with rotary positions: at once, in chunks, one by one, beside other sequences, and
    with padding. Without it the bits differ."""
    torch.manual_seed(3)
    layer = TransformerLayer(
        128, 256, 4, kv_heads=2, norm="rmsnorm", activation="swiglu", bias=False, recipe=recipe, dtype=torch.bfloat16
    ).eval()
    length = 70
    x = torch.randn(2, length, 128).bfloat16()

    def read(x: Tensor, chunks: list[int]) -> Tensor:
        cache = KVCache(1, x.shape[0], length, heads=2, head_dim=32, dtype=torch.bfloat16)
        made, at = [], 0
        for new in chunks:
            table = RotaryEmbedding(32)(cache.positions(new))
            made.append(layer(x[:, at : at + new], rotary=table, cache=cache.of(0)))
            cache.advance(new)
            at += new
        return torch.cat(made, 1)

    with torch.no_grad(), invariant():
        whole = layer(x, rotary=RotaryEmbedding(32)(torch.arange(length)))
        assert torch.equal(read(x, [length]), whole)
        assert torch.equal(read(x, [1] * length), whole)
        assert torch.equal(read(x, [33, 1, 2, 20, 14]), whole)
        assert torch.equal(read(x[1:], [40, *[1] * 30]), whole[1:])
        padded = F.pad(x[:1], (0, 0, 0, 30), value=1.0)
        behind = layer(padded, rotary=RotaryEmbedding(32)(torch.arange(100)))
        assert torch.equal(behind[:, :length], whole[:1])
    assert layer.attention.attention.last_backend == "batch_invariant"
    with torch.no_grad():
        assert not torch.equal(read(x, [1] * length), read(x, [length]))


def test_dx_of_a_block_depends_on_neither_batch_nor_padding() -> None:
    torch.manual_seed(4)
    layer = TransformerLayer(128, 128, 2, activation="gelu", recipe="blockwise_fp32", dtype=torch.bfloat16)
    x, dy = torch.randn(3, 20, 128).bfloat16(), torch.randn(3, 20, 128).bfloat16()
    with invariant():
        y, dx = forward_and_dx(layer, x, dy)
        one = forward_and_dx(layer, x[1:2], dy[1:2])
        padded = forward_and_dx(layer, F.pad(x[:2], (0, 0, 0, 12)), F.pad(dy[:2], (0, 0, 0, 12)))
    assert torch.equal(one[0], y[1:2])
    assert torch.equal(one[1], dx[1:2])
    assert torch.equal(padded[0][:, :20], y[:2])
    assert torch.equal(padded[1][:, :20], dx[:2])
    layer.attention.attention.dropout = 0.5
    with invariant(), pytest.raises(ValueError, match="knows no dropout"):
        layer(x)


def test_rows_that_are_recomputed() -> None:
    """`save="recompute"` makes them outside of the linear."""
    torch.manual_seed(5)
    mlp = ottava.nn.NormMLP(128, 96, activation="gelu", save="recompute", recipe="rowwise", dtype=torch.bfloat16)
    x = torch.randn(12, 128).bfloat16()
    with torch.no_grad(), invariant():
        y = mlp(x)
        assert torch.equal(mlp(x[4:9]), y[4:9])
        assert torch.equal(mlp(x[11:]), y[11:])
