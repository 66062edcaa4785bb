"""Transforms: what they make of a tensor, what both operands agree on, and layers that run behind them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import fp4_samples as fp4
import ottava
from ottava.numerics.tensor import QuantizationSpec
from ottava.numerics.transforms import TRANSFORMS, Hadamard, Hot, Mean, OneRank, Smooth, get_transform
from ottava.recipe import GEMMS, RECIPES, GemmRecipe, Recipe
from sweep import CELLS

TRANSFORMED = [recipe for recipe in RECIPES.values() if any(cell.transform for cell in CELLS[recipe.name])]


def test_a_rotation_keeps_products_and_is_that_of_its_definition() -> None:
    x, w = torch.randn(7, 70).bfloat16(), torch.randn(5, 70).bfloat16()
    for transform in (Hadamard(), Hadamard(32, 5), Hadamard(64, "fresh", rounded=False), Hadamard(2, 0)):
        mine = transform.prepare(x, None)
        theirs = transform.prepare(w, mine)
        assert mine is theirs  # both operands have the same signs
        a, b = transform.apply(x, mine).double(), transform.apply(w, theirs).double()
        assert a.shape == (7, -(-70 // transform.size) * transform.size)
        exact = x.double() @ w.double().t()
        off = (a @ b.t() - exact).norm() / exact.norm()
        assert off < (2.0**-7 if transform.rounded else 1e-6), transform
    first, second = (Hadamard(16, "fresh").prepare(x, None) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(Hadamard().apply(x, None).float(), torch.from_numpy(fp4.rotated(x.float().numpy())))
    x32 = torch.randn(3, 16)
    assert Hadamard().apply(x32, None).dtype == torch.float32
    assert torch.equal(Hadamard().apply(x32, None), torch.from_numpy(fp4.rotated(x32.numpy(), to_bf16=False)))
    assert Hadamard().apply(torch.empty(0, 5), None).shape == (0, 16)
    plain = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(4)] for i in range(4)]) / 2  # Sylvester's
    assert torch.equal(Hadamard(4, "none").apply(torch.eye(4), None), plain)


def test_means_and_factors() -> None:
    x = torch.randn(6, 10) + torch.linspace(-50, 50, 10)
    rows, columns = Mean(), Mean("columns")
    assert torch.equal(rows.prepare(x, None), x.double().mean(0, keepdim=True).float())
    for transform, matrix in ((rows, x), (columns, x.t()), (Hot(channels=3), x), (Hot("columns", 30), x.t())):
        aside = transform.prepare(matrix, None)
        left, right = transform.low_rank(aside, tuple(matrix.shape))
        torch.testing.assert_close(transform.apply(matrix, aside) + left @ right.t(), matrix, rtol=0, atol=2e-5)
    assert rows.prepare(torch.empty(0, 3), None).tolist() == [[0.0, 0.0, 0.0]]
    assert rows.prepare(torch.tensor([[torch.inf, 1.0], [1.0, 3.0]]), None).tolist() == [[0.0, 2.0]]
    ends = torch.tensor([[torch.inf, 1.0, -0.0, 3.0], [9.0, torch.nan, 2.0, 4.0]])  # such a channel stays
    kept = Hot(channels=3).apply(ends, Hot(channels=3).prepare(ends, None))
    assert torch.equal(kept.nan_to_num(nan=7, posinf=8), torch.tensor([[8.0, 1.0, 0.0, 0.0], [9.0, 7.0, 0.0, 0.0]]))
    w, smooth = torch.randn(4, 10), Smooth()
    mine = smooth.prepare(x, None)
    theirs = smooth.prepare(w, mine)
    assert set(torch.frexp(mine).mantissa.flatten().tolist()) == {0.5}  # powers of two
    assert torch.equal(smooth.apply(x, mine) * mine, x)
    assert torch.equal(
        (smooth.apply(x, mine).double() @ smooth.apply(w, theirs).double().t()), x.double() @ w.double().t()
    )
    assert Smooth(1.0).apply(x, Smooth(1.0).prepare(x, None)).abs().amax(0).log2().floor().tolist() == [0.0] * 10
    ends = torch.tensor([[0.0, torch.inf, 2.0**100, 2.0**-100, 8.0]])  # a column without an amax keeps its numbers
    assert Smooth(1.0).prepare(ends, None).tolist() == [[1.0, 1.0, 2.0**60, 2.0**-60, 8.0]]
    assert [t.centred for t in (Hadamard(), rows, columns, smooth)] == [False, False, True, False]


def expected_step(name: str, x: Tensor, w: Tensor, dy: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dx, dw) in fp64, of casts by the definitions, in the order in which a layer draws: x.T, w.T, dy, dy.T."""
    torch.manual_seed(seed)

    def draw() -> Tensor:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)

    def value(found: tuple[np.ndarray, np.ndarray], rows: int = 1, cols: int = 16) -> Tensor:
        codes, scale_inv = found
        wide = scale_inv.repeat(rows, 0).repeat(cols, 1)[: codes.shape[0], : codes.shape[1]]
        return torch.from_numpy(codes * wide).double()

    X, W, DY = (t.float().numpy() for t in (x, w, dy))
    if name == "ms_eden":
        x_row, w_row = value(fp4.four_over_six(X)), value(fp4.four_over_six(W))
        sides = {}
        signs_wgrad = draw()
        sides["x_col"] = value(fp4.ms_eden(fp4.rotated(X.T, 128, fp4.fresh_signs(signs_wgrad), False), draw()))
        signs_dgrad = draw()
        sides["w_col"] = value(fp4.ms_eden(fp4.rotated(W.T, 128, fp4.fresh_signs(signs_dgrad), False), draw()))
        dy_row = value(fp4.ms_eden(fp4.rotated(DY, 128, fp4.fresh_signs(signs_dgrad), False), draw()))
        dy_col = value(fp4.ms_eden(fp4.rotated(DY.T, 128, fp4.fresh_signs(signs_wgrad), False), draw()))
        return x_row @ w_row.t(), dy_row @ sides["w_col"].t(), dy_col @ sides["x_col"].t()
    if name == "averis":
        mean, d_mean = (m.astype(np.float64).mean(0, keepdims=True).astype(np.float32) for m in (X, DY))
        w_q = value(fp4.nvfp4(W, 16), 16)
        y = value(fp4.nvfp4(X - mean)) @ w_q.t() + torch.from_numpy(mean).double() @ w_q.t()
        x_col = value(fp4.nvfp4((X - mean).T))
        dx = value(fp4.nvfp4(DY - d_mean, 1, fp4.at_random(draw()))) @ w_q + torch.from_numpy(d_mean).double() @ w_q
        dw = value(fp4.nvfp4((DY - d_mean).T, 1, fp4.at_random(draw()))) @ x_col.t()
        return y, dx, dw + len(X) * torch.from_numpy(d_mean.T).double() @ torch.from_numpy(mean).double()
    chosen = fp4.four_over_six if name == "four_over_six" else fp4.nvfp4
    x_row, w_q = value(chosen(X)), value(chosen(W, 16), 16)
    x_col = value(chosen(fp4.rotated(X.T)))
    dy_row = value(fp4.nvfp4(DY, 1, fp4.at_random(draw())))
    dy_col = value(fp4.nvfp4(fp4.rotated(DY.T), 1, fp4.at_random(draw())))
    return x_row @ w_q.t(), dy_row @ w_q, dy_col @ x_col.t()


def test_layers_multiply_what_the_definitions_say() -> None:
    """Forward, dgrad and wgrad under `autocast`, to BF16's rounding; twice the same from one seed."""
    for name in ("nvfp4_rht", "four_over_six", "ms_eden", "averis"):
        for tokens, features, out in ((37, 48, 64), (128, 256, 144), (1, 16, 16)):
            layer = ottava.nn.Linear(features, out, bias=False, recipe="bf16", dtype=torch.bfloat16)
            x = (torch.randn(tokens, features) + 1).bfloat16().requires_grad_()
            dy = (torch.randn(tokens, out) - 0.5).bfloat16()
            steps = []
            for _ in range(2):
                layer.zero_grad()
                x.grad = None
                torch.manual_seed(11)
                with ottava.autocast(name):
                    y = layer(x)
                y.backward(dy)
                steps.append((y.detach(), x.grad, layer.weight.grad))
            assert all(torch.equal(one, other) for one, other in zip(*steps, strict=True))
            wanted = expected_step(name, x.detach(), layer.weight.detach(), dy, 11)
            for got, exact, what in zip(steps[0], wanted, ("y", "dx", "dw"), strict=True):
                off = (got.double() - exact).abs()
                bound = exact.abs() * 2.0**-8 + exact.norm() / exact.numel() ** 0.5 * 2.0**-18
                assert bool((off <= bound).all()), (name, what, tokens)
        text = str(ottava.receipt(layer))
        assert {"nvfp4_rht": "hadamard 16", "ms_eden": "hadamard 128, signs fresh", "averis": "mean columns"}.get(
            name, "four_over_six"
        ) in text


def test_a_large_mean_costs_averis_nothing() -> None:
    x, dy = (torch.randn(64, 64) + 30).bfloat16(), (torch.randn(64, 32) + 8).bfloat16()
    w = torch.randn(32, 64).bfloat16()
    off = {}
    for name in ("nvfp4", "averis"):
        layer = ottava.nn.Linear(64, 32, bias=False, recipe=name, dtype=torch.bfloat16)
        layer.weight.data.copy_(w)
        layer(x).backward(dy)
        exact = dy.double().t() @ x.double()
        off[name] = float((layer.weight.grad.double() - exact).norm() / exact.norm())
    assert off["averis"] < off["nvfp4"] / 10, off


def test_hot_channels_meet_the_cast_weight_in_high_precision() -> None:
    """Forward and wgrad by the definition: the casts of the rest, and the channels as they are."""
    base, at = RECIPES["nvfp4"], [5, 42, 79, 116]
    lhs, (dy_t, x_t) = base.fprop.lhs, (base.wgrad.lhs, base.wgrad.rhs)
    fprop = replace(base.fprop, lhs=replace(lhs, transform=Hot(channels=4)))
    dy_t, hot_t = replace(dy_t, rounding="nearest_even"), replace(x_t, transform=Hot("columns", 4))
    wgrad = replace(base.wgrad, lhs=dy_t, rhs=hot_t)
    recipe = replace(base, name="hot", fprop=fprop, wgrad=wgrad)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    x, dy = torch.randn(48, 128), torch.randn(48, 32)
    x[:, at] *= 60
    x, dy = x.bfloat16(), dy.bfloat16()
    layer = ottava.nn.Linear(128, 32, bias=False, recipe=recipe, dtype=torch.bfloat16)
    y = layer(x)
    y.backward(dy)
    assert layer.weight.grad is not None
    rest = x.clone()
    rest[:, at] = 0

    def cast(matrix: Tensor, spec: QuantizationSpec | None) -> Tensor:
        assert spec is not None
        return ottava.quantize(matrix, replace(spec, transform=None)).dequantize(torch.float64)

    w = cast(layer.weight.detach(), base.fprop.rhs)
    exact = cast(rest, lhs) @ w.t() + x[:, at].double() @ w[:, at].t()
    dw = cast(dy.t(), dy_t) @ cast(rest.t(), x_t).t()
    dw[:, at] += cast(dy.t(), dy_t) @ x[:, at].double()
    for got, wanted in ((y.detach(), exact), (layer.weight.grad, dw)):
        assert bool(((got.double() - wanted).abs() <= wanted.abs() * 2.0**-8 + 1e-5 * wanted.abs().max()).all())
    plain = ottava.nn.Linear(128, 32, bias=False, recipe="nvfp4", dtype=torch.bfloat16)
    plain.weight.data.copy_(layer.weight)
    true = x.double() @ w.t()
    assert (y.double() - true).norm() < 0.7 * (plain(x).double() - true).norm()


def test_smoothing_takes_outlier_channels_out_of_a_layer() -> None:
    spec = replace(RECIPES["tensorwise_e4m3"].fprop.lhs, transform="smooth")
    recipe = Recipe("smooth", GemmRecipe(spec, spec), GemmRecipe(spec, spec), GemmRecipe(spec, spec))
    x = torch.randn(64, 128) * torch.where(torch.arange(128) == 5, 1e7, 1.0)
    x, off = x.bfloat16(), {}
    for name, chosen in (("plain", RECIPES["tensorwise_e4m3"]), ("smooth", recipe)):
        layer = ottava.nn.Linear(128, 64, bias=False, recipe=chosen, dtype=torch.bfloat16)
        layer.weight.data[:, 5] = 0
        y = layer(x)
        y.sum().backward()
        y, exact = y.detach(), x.double() @ layer.weight.detach().double().t()
        off[name] = float((y.double() - exact).norm() / exact.norm())
    assert off["smooth"] < off["plain"] / 3, off
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_slips_are_refused() -> None:
    assert set(TRANSFORMS) == {"hadamard", "mean", "smooth", "hot"}
    for make, error, message in (
        (lambda: get_transform("hadamrd"), ValueError, "did you mean 'hadamard'"),
        (lambda: get_transform(3), TypeError, "needs a Transform, its kind"),
        (lambda: get_transform({"kind": "hadamard", "sizes": 8}), TypeError, "did you mean 'size'"),
        (lambda: get_transform({"size": 16}), ValueError, "transform"),
        (lambda: Hadamard(24), ValueError, "needs a power of two"),
        (lambda: Hadamard(32), ValueError, "give a seed or 'fresh' for 32"),
        (lambda: Hadamard(signs="new"), ValueError, "signs"),
        (lambda: Hadamard(signs=True), ValueError, "signs"),
        (lambda: Hadamard(1, 0), ValueError, "from 2 to 1024"),
        (lambda: Hadamard(2048, 0), ValueError, "from 2 to 1024"),
        (lambda: Smooth(1.5), ValueError, "at most 1"),
        (lambda: Smooth(True), TypeError, "needs a number"),
        (lambda: Mean("row"), ValueError, "did you mean 'rows'"),
        (lambda: Smooth(0), ValueError, "above 0"),
        (lambda: Hot(channels=0), ValueError, "1 or more"),
        (lambda: Hot().prepare(torch.ones(2, 2), None, OneRank()), ValueError, "split over ranks"),
        (lambda: Smooth("half"), TypeError, "needs a number"),
        (lambda: QuantizationSpec(ottava.E4M3, scaling="delayed", transform="mean"), ValueError, "scaling='current'"),
    ):
        with pytest.raises(error, match=message):
            make()
    one = QuantizationSpec(ottava.E4M3, transform="hadamard")
    with pytest.raises(ValueError, match="only if both sides have the same one"):
        GemmRecipe(one, QuantizationSpec(ottava.E4M3))
    with pytest.raises(ValueError, match="linear layers"):
        ottava.recipe.AttentionRecipe(qkv=one)
    with pytest.raises(ValueError, match=r"quantize x\.T itself"):
        ottava.quantize(torch.ones(2, 16), one).t()
    for recipe in TRANSFORMED:
        assert Recipe.from_dict(recipe.to_dict()) == recipe
        assert all(getattr(recipe, gemm).quantized for gemm in GEMMS)
