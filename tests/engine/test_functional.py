"""`functional.linear` against an independent transcription: codes by hand, float64 matmul, one rounding.

Two kinds of data. On-grid data (small integers, the top of the format in every block) is quantized without loss by
every recipe and its sums are exact in fp32, so y, dx, dw and db must equal float64 bit for bit. Random data checks that
each cell of the recipe's table reaches the operand it is meant for, within the bound of one fp32 accumulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.engine import functional
from ottava.engine.functional import Call, linear
from ottava.engine.quantizer import LinearQuantizers
from ottava.kernels.native import build as native_build
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import GEMMS, GemmRecipe, Recipe
from sweep import CELLS, sweep

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64,), (1, 64), (48, 64), (2, 3, 64), (0, 64), (2, 0, 64), (7, 33), (5, 1), (17, 130))
RECIPES = tuple(ottava.RECIPES.values())
UNCHANGED = tuple(recipe for recipe in RECIPES if not any(cell.transform for cell in CELLS[recipe.name]))
"""Recipes that multiply what their doors get; tests/numerics/test_transforms.py multiplies what the others make of
it."""
DIAGNOSTIC = tuple(recipe.fp8_inputs_bf16_gemm() for recipe in UNCHANGED if recipe.quantized)


def noisy(*shape: int, seed: int) -> Tensor:
    """Normal numbers in tiles of very different magnitude: a scale taken from the wrong block would show."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x * torch.tensor([1.0, 2.0**-6, 2.0**4, 2.0**-2]).repeat_interleave(16).repeat(4)[: shape[-1]]


def on_grid(rows: int, cols: int, fmt: ottava.numerics.formats.Format, seed: int) -> Tensor:
    """{0, +-1, +-2, +-top} / 4, the top in every 16 elements of every row and column: all scales are powers of two."""
    x = torch.randint(-2, 3, (rows, cols), generator=torch.Generator().manual_seed(seed)).float()
    places = (torch.arange(rows)[:, None] + torch.arange(cols)) % 16 == 0
    top = fmt.max / 2.0**fmt.emax * 4  # 7 for E4M3 and E5M2, 6 for E2M1
    return torch.where(places, top * (1 - 2 * torch.randint(0, 2, (rows, cols)).float()), x) / 4


@dataclass
class Result:
    """What one forward and backward gave."""

    y: Tensor
    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None


def run(
    x: Tensor, w: Tensor, bias: Tensor | None, dy: Tensor, recipe: Recipe, doors: LinearQuantizers | None = None
) -> Result:
    leaves = [t.detach().clone().requires_grad_() if t is not None else None for t in (x, w, bias)]
    y = linear(leaves[0], leaves[1], leaves[2], Call(doors or LinearQuantizers(), recipe))
    torch.manual_seed(7)
    y.backward(dy)
    return Result(y.detach(), *(leaf.grad if leaf is not None else None for leaf in leaves))


def bound(a: Tensor, b: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """K + 2 roundings of fp32 relative to sum |a||b|, then half an ulp of the output (or half its smallest number)."""
    info = torch.finfo(dtype)
    sums = (a.shape[1] + 2) * 2.0**-24 * (a.abs() @ b.abs().t())
    return sums + info.eps / 2 * (exact.abs() + sums) + info.smallest_normal * info.eps / 2


def values(x: Tensor, spec: QuantizationSpec | None, compute: str) -> Tensor:
    """float64 (R, C): what the GEMM is given."""
    if spec is None:
        return x.double()
    return (
        ottava.quantize(x, replace(spec, scaling="current"))
        .dequantize(torch.bfloat16 if compute == "bf16" else torch.float32)
        .double()
    )


def check_gemm(got: Tensor, a: Tensor, b: Tensor, cells: GemmRecipe, bias: Tensor | None = None) -> None:
    a64, b64 = values(a, cells.lhs, cells.compute), values(b, cells.rhs, cells.compute)
    exact = a64 @ b64.t() + (0 if bias is None else bias.to(a.dtype).double())
    magnitude = 0 if bias is None else 2.0**-24 * bias.abs().double()
    dtype = torch.bfloat16 if cells.quantized and cells.compute == "bf16" else a.dtype  # rounded there first
    limit = bound(a64, b64, exact, dtype) + magnitude
    if dtype != got.dtype:
        limit = limit + torch.finfo(got.dtype).eps * exact.abs()
    assert got.shape == exact.shape
    assert torch.all((got.double() - exact).abs() <= limit)


@sweep(recipe=UNCHANGED + DIAGNOSTIC, dtype=DTYPES, bias=[True, False])
def test_values_on_the_grid_pass_every_recipe_exactly(recipe: Recipe, dtype: torch.dtype, bias: bool) -> None:
    """Entries {0, +-1, +-2, +-7} / 4: every scale is a power of two, every sum an integer / 16 below 2**24."""
    formats = [getattr(recipe.fprop.lhs, "format", ottava.E4M3), getattr(recipe.dgrad.lhs, "format", ottava.E4M3)]
    x, w = on_grid(48, 64, formats[0], 1).to(dtype), on_grid(32, 64, formats[0], 2).to(dtype)
    dy = on_grid(48, 32, formats[1], 3).to(dtype)
    b = torch.arange(32).to(dtype) / 4 if bias else None
    got = run(x, w, b, dy, recipe)
    x64, w64, dy64 = x.double(), w.double(), dy.double()
    # compute="bf16" rounds to BF16 before the output's dtype
    first = torch.bfloat16 if recipe.fprop.compute == "bf16" and recipe.fprop.quantized else dtype
    assert torch.equal(got.y, (x64 @ w64.t() + (b.double() if b is not None else 0)).to(first).to(dtype))
    assert got.dx is not None
    assert torch.equal(got.dx, (dy64 @ w64).to(first).to(dtype))
    assert got.dw is not None
    last = first if recipe.wgrad.quantized else dtype
    assert torch.equal(got.dw, (dy64.t() @ x64).to(last).to(dtype))
    assert (got.db is None) == (b is None)
    assert got.db is None or torch.equal(got.db, dy64.sum(0).to(dtype))


@sweep(recipe=UNCHANGED, dtype=DTYPES, shape=SHAPES)
def test_each_cell_of_the_table_reaches_its_operand(recipe: Recipe, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """y, dx, dw and db of random data against float64 on the dequantized operands, for any shape."""
    n, k = 40 if shape[-1] > 1 else 3, shape[-1]
    x, w, b = noisy(*shape, seed=1).to(dtype), noisy(n, k, seed=2).to(dtype), noisy(n, seed=3).to(dtype)
    dy = noisy(*shape[:-1], n, seed=4).to(dtype)
    got = run(x, w, b, dy, recipe)
    rows, grads = x.reshape(-1, k), dy.reshape(-1, n)
    assert (got.y.shape, got.y.dtype) == (dy.shape, dtype)
    check_gemm(got.y.reshape(-1, n), rows, w, recipe.fprop, b)
    torch.manual_seed(7)  # dy is cast before dy.T, each once: nvfp4 draws its random numbers in this order
    assert got.dx is not None
    check_gemm(got.dx.reshape(-1, k), grads, w.t(), recipe.dgrad)
    assert got.dw is not None
    check_gemm(got.dw, grads.t(), rows.t(), recipe.wgrad)
    assert got.db is not None
    assert torch.allclose(got.db.double(), grads.double().sum(0), rtol=torch.finfo(dtype).eps, atol=1e-5)


@sweep(recipe=DIAGNOSTIC)
def test_bf16_gemm_form_multiplies_the_same_operands(recipe: Recipe) -> None:
    """ "NAME/fp8_inputs_bf16_gemm": the codes of NAME, decoded to BF16, and a BF16 GEMM."""
    x, w = (noisy(48, 64, seed=seed).bfloat16() for seed in (1, 2))
    got = run(x, w, None, noisy(48, 48, seed=4).bfloat16(), recipe)
    check_gemm(got.y, x, w, recipe.fprop)


@sweep(view=[lambda x: x.t(), lambda x: x[::2, 1::3], lambda x: x[:1].expand(6, -1)])
def test_strides_change_nothing(recipe: Recipe, view: Callable[[Tensor], Tensor]) -> None:
    """Transposed, strided and broadcast (stride 0) inputs and gradients give the bits of contiguous ones, stochastic
    rounding included: its random numbers belong to places, not to the order of memory."""
    x, w, dy = view(noisy(36, 42, seed=1).bfloat16()), noisy(20, 200, seed=2).bfloat16(), noisy(20, 42, seed=3)
    w = w[:, : x.shape[1]]
    dy = dy.bfloat16().t()[: x.shape[0]]
    results = []
    for operands in ((x, w, dy), (x.contiguous(), w.contiguous(), dy.contiguous())):
        torch.manual_seed(0)
        results.append(run(operands[0], operands[1], None, operands[2], recipe))
    strided, plain = results
    for name in ("y", "dx", "dw"):
        assert torch.equal(getattr(strided, name), getattr(plain, name)), name


@sweep(dtype=DTYPES)
def test_operands_are_never_written_to(recipe: Recipe, dtype: torch.dtype) -> None:
    """Neither forward nor backward touches x, w, b or dy, also where fp32 leaves no cast in between."""
    tensors = [noisy(48, 64, seed=1), noisy(40, 64, seed=2), noisy(40, seed=3), noisy(48, 40, seed=4)]
    x, w, b, dy = (t.to(dtype).requires_grad_() for t in tensors)
    linear(x, w, b, Call(LinearQuantizers(), recipe)).backward(dy)
    for now, before in zip((x, w, b, dy), tensors, strict=True):
        assert torch.equal(now, before.to(dtype))


class Casts:
    """Counts what goes through the doors: {(tensor, direction)}."""

    def __init__(self, doors: LinearQuantizers) -> None:
        self.made: set[tuple[str, str]] = set()
        for name, door in doors.named_children():
            door.register_forward_hook(self.hook(name))

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], tuple[object, object]], None]:
        def note(door: nn.Module, args: tuple[Tensor, ...], operands: tuple[object, object]) -> None:
            self.made |= {(name, way) for way, o in zip(("row", "col"), operands, strict=True) if o is not None}

        return note


FORWARD = {("input", "row"), ("weight", "row")}
FOR_DX = {("weight", "col"), ("grad_output", "row")}
FOR_DW = {("input", "col"), ("grad_output", "col")}


@sweep(
    recipe=[r for r in RECIPES if r.quantized], needs_dx=[True, False], needs_dw=[True, False], needs_db=[True, False]
)
def test_nothing_is_cast_that_no_gradient_needs(recipe: Recipe, needs_dx: bool, needs_dw: bool, needs_db: bool) -> None:
    """A frozen weight (LoRA) needs no x.T and dy.T, a frozen input (first layer) no w.T, a bias alone no cast of dy."""
    doors = LinearQuantizers()
    casts = Casts(doors)
    x, w, b = (t.bfloat16() for t in (noisy(48, 64, seed=1), noisy(40, 64, seed=2), noisy(40, seed=3)))
    for tensor, needed in ((x, needs_dx), (w, needs_dw), (b, needs_db)):
        tensor.requires_grad_(needed)
    y = linear(x, w, b, Call(doors, recipe))
    assert y.requires_grad == (needs_dx or needs_dw or needs_db)
    if y.requires_grad:
        y.sum().backward()
    assert [t.grad is not None for t in (x, w, b)] == [needs_dx, needs_dw, needs_db]
    assert casts.made == FORWARD | (FOR_DX if needs_dx else set()) | (FOR_DW if needs_dw else set())


@sweep(recipe=[r for r in RECIPES if r.quantized], mode=[torch.no_grad, torch.inference_mode])
def test_inference_casts_forward_operands_only(recipe: Recipe, mode: Callable[[], torch.no_grad]) -> None:
    """Parameters require gradients in evaluation too; without grad mode x.T and w.T are for nobody."""
    doors = LinearQuantizers()
    casts = Casts(doors)
    w = noisy(40, 64, seed=2).bfloat16().requires_grad_()
    with mode():
        linear(noisy(48, 64, seed=1).bfloat16(), w, None, Call(doors, recipe))
    assert casts.made == FORWARD


@sweep(recipe=[r for r in RECIPES if r.name != "ms_eden"])  # whose backward draws even where it rounds to nearest
def test_frozen_neighbours_change_no_gradient(recipe: Recipe) -> None:
    """dx with a frozen weight, and dw with a frozen input, are the bits of the full backward."""
    recipe = nearest(recipe)
    x, w, dy = (noisy(*s, seed=i).bfloat16() for i, s in enumerate(((48, 64), (40, 64), (48, 40))))
    full = run(x, w, None, dy, recipe)
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    linear(a, w, None, Call(LinearQuantizers(), recipe)).backward(dy)
    linear(x, b, None, Call(LinearQuantizers(), recipe)).backward(dy)
    assert full.dx is not None
    assert full.dw is not None
    assert torch.equal(a.grad, full.dx)  # type: ignore[arg-type]
    assert torch.equal(b.grad, full.dw)  # type: ignore[arg-type]


def nearest(recipe: Recipe) -> Recipe:
    """The recipe without its random numbers."""
    gemms = {}
    for gemm in GEMMS:
        cells: GemmRecipe = getattr(recipe, gemm)
        lhs = cells.lhs and replace(cells.lhs, rounding="nearest_even")
        gemms[gemm] = replace(cells, lhs=lhs)
    return replace(recipe, **gemms)


@sweep
def test_weight_gradient_has_the_weights_dtype(recipe: Recipe) -> None:
    """BF16 activations on FP32 master weights: y and dx are BF16, dw and db FP32 with more bits than BF16 has."""
    x = noisy(48, 64, seed=1).bfloat16().requires_grad_()
    w, b = noisy(40, 64, seed=2).requires_grad_(), noisy(40, seed=3).requires_grad_()
    y = linear(x, w, b, Call(LinearQuantizers(), recipe))
    y.backward(noisy(48, 40, seed=4).bfloat16())
    assert y.dtype == torch.bfloat16
    assert [t.grad.dtype for t in (x, w, b)] == [torch.bfloat16, torch.float32, torch.float32]  # type: ignore[union-attr]
    assert w.grad is not None
    rounded_to_bf16 = torch.equal(w.grad, w.grad.bfloat16().float())
    assert rounded_to_bf16 == (not recipe.wgrad.quantized)  # a high-precision GEMM is torch's BF16 one, as in autocast


def test_bias_gradient_sums_the_unquantized_gradient_in_fp32() -> None:
    """1 + 2047 / 2048: BF16 partial sums would stay at 1; E5M2 codes of dy would give another sum."""
    dy = torch.full((2048, 32), 2.0**-11).bfloat16()
    dy[0] = 1
    got = run(torch.ones(2048, 32).bfloat16(), torch.ones(32, 32).bfloat16(), torch.zeros(32), dy, RECIPES[1])
    assert got.db is not None
    assert torch.equal(got.db, torch.full((32,), 1 + 2047 / 2048))


def test_bias_is_rounded_to_the_outputs_dtype_first() -> None:
    """FP8 hardware adds a BF16 bias to a BF16 y, so every device does.

    2**-8 + (1 + 2**-9) would round up to 1 + 2**-7; the bias is 1 in BF16, and 1 + 2**-8 ties to 1.
    """
    x, w = torch.full((1, 32), 2.0**-8).bfloat16(), torch.zeros(32, 32).bfloat16()
    w[:, 0] = 1
    y = linear(x, w, torch.full((32,), 1 + 2.0**-9), Call(LinearQuantizers(), ottava.get_recipe("rowwise")))
    assert torch.equal(y, torch.ones(1, 32).bfloat16())


@sweep(needs_dx=[True, False], needs_dw=[True, False])
def test_logged_bytes_are_the_bytes_kept(recipe: Recipe, needs_dx: bool, needs_dw: bool) -> None:
    """What saved_tensors_hooks counts, less the high-precision weight, which lives anyway."""
    x, w = noisy(48, 64, seed=1).bfloat16(), noisy(40, 64, seed=2).bfloat16()
    x.requires_grad_(needs_dx), w.requires_grad_(needs_dw)
    kept: list[Tensor] = []
    call = Call(LinearQuantizers(), recipe)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, w, None, call)
    own = sum(t.nbytes for t in kept if t.data_ptr() != w.data_ptr())
    assert (call.saved_bytes, call.high_precision_bytes) == (own, x.nbytes if needs_dw else 0)


def test_second_derivative_is_refused() -> None:
    """The derivative of a cast is 0 almost everywhere: a gradient penalty would be dropped without a word."""
    x = noisy(4, 64, seed=1).bfloat16().requires_grad_()
    w = noisy(32, 64, seed=2).bfloat16().requires_grad_()
    y = linear(x, w, None, Call(LinearQuantizers(), ottava.get_recipe("tensorwise")))
    with pytest.raises(NotImplementedError, match=r"second derivative.*autocast\(enabled=False\)"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_saved_fp8_weight_survives_an_update_of_the_weight() -> None:
    """w.T is saved as codes, which a step of the optimizer does not reach; torch refuses a changed BF16 w.T."""
    x, w = noisy(48, 64, seed=1).bfloat16().requires_grad_(), noisy(40, 64, seed=2).bfloat16().requires_grad_()
    y = linear(x, w, None, Call(LinearQuantizers(), ottava.get_recipe("tensorwise")))
    (before,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    high = linear(x, w, None, Call(LinearQuantizers(), ottava.get_recipe("bf16")))
    with torch.no_grad():
        w.mul_(2)
    (after,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(before, after)
    with pytest.raises(RuntimeError, match="inplace"):
        high.sum().backward()


@sweep(shape=[(), (3, 63), (65,), (3, 1)])
def test_wrong_width_is_refused_before_anything_is_cast(recipe: Recipe, shape: tuple[int, ...]) -> None:
    """The message has both shapes, and delayed scaling has not seen the tensor."""
    doors = LinearQuantizers()
    casts = Casts(doors)
    with pytest.raises(ValueError, match=r"linear: got input .*needs \(\.\.\., 64\)"):
        linear(torch.ones(shape).bfloat16(), torch.ones(32, 64).bfloat16(), None, Call(doors, recipe))
    assert casts.made == set()


@sweep(dtype=[torch.int64, torch.float64])
def test_unfit_dtype_is_refused(dtype: torch.dtype) -> None:
    """float64 would lose digits unseen, integers have no scale."""
    with pytest.raises(TypeError, match=r"needs float32, bfloat16 or float16"):
        linear(torch.ones(3, 64, dtype=dtype), torch.ones(32, 64), None, Call(LinearQuantizers(), RECIPES[1]))


@pytest.mark.parametrize(
    "dtype, casts",
    [
        (torch.bfloat16, [torch.bfloat16]),
        (torch.float16, [torch.float16]),
        (torch.float32, [torch.bfloat16, torch.float32]),  # torch.autocast gives BF16 inputs
        (torch.float64, []),
    ],
)
def test_what_a_step_needs_is_built_ahead(
    dtype: torch.dtype, casts: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Casts from what will come, in the order of need, GEMMs and sums; once; nothing beside an accelerator."""
    begun: list[tuple[str, torch.dtype | None]] = []
    monkeypatch.setattr(native_build, "begin", lambda name, dtype=None: begun.append((name, dtype)))
    for there in (True, False):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda there=there: there)
        functional.build_ahead.cache_clear()
        assert begun == []
        for _ in range(2):
            functional.build_ahead(dtype)
    assert begun == [*(("quantize", v) for v in casts), ("gemm", None), ("sums", None), ("pointwise", None)]


def test_amds_formats_run_all_three_gemms() -> None:
    """FNUZ formats in every cell, as on an MI300: codes by ml_dtypes, products in float64, one fp32 accumulation."""
    cells = {"E4M3FNUZ": (ml_dtypes.float8_e4m3fnuz, 240.0), "E5M2FNUZ": (ml_dtypes.float8_e5m2fnuz, 57344.0)}

    def decoded(x: Tensor, name: str) -> Tensor:
        kind, most = cells[name]
        scale = most / float(x.abs().amax())
        return torch.from_numpy((x.numpy() * np.float32(scale)).astype(kind).astype(np.float64)) / scale

    e4, e5 = ({"format": name} for name in cells)
    gemms = {"fprop": {"lhs": e4, "rhs": e4}, "dgrad": {"lhs": e5, "rhs": e4}, "wgrad": {"lhs": e5, "rhs": e4}}
    torch.manual_seed(0)
    layer = nn.Linear(130, 48, bias=False)
    ottava.convert(net := nn.Sequential(layer), Recipe.from_dict({"name": "amd", **gemms}))
    x, dy = torch.randn(40, 130, requires_grad=True), torch.randn(40, 48)
    y = net(x)
    y.backward(dy)
    x_q, w_q, dy_q = (
        decoded(t.detach(), name) for t, name in ((x, "E4M3FNUZ"), (layer.weight, "E4M3FNUZ"), (dy, "E5M2FNUZ"))
    )
    assert {row.operands for row in ottava.receipt(net).rows[1:]} == {"E5M2FNUZ[tensor] x E4M3FNUZ[tensor]"}
    for got, a, b in ((y, x_q, w_q), (x.grad, dy_q, w_q.t()), (layer.weight.grad, dy_q.t(), x_q.t())):
        assert got is not None
        bound = (a.shape[1] + 8) * 2.0**-24 * (a.abs() @ b.abs().t())
        assert ((got.detach().double() - a @ b.t()).abs() <= bound).all()


@sweep(sizes=[(7, 97, 65), (5, 33, 13), (65, 257, 5)])
def test_the_number_of_threads_changes_only_what_torch_sums(recipe: ottava.Recipe, sizes: tuple[int, int, int]) -> None:
    """Odd and small FP32 matrices, of which torch's own GEMM adds in another order; the receipt tells where it ran."""
    (m, k, n), outs = sizes, []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        layer = ottava.nn.Linear(k, n, recipe=recipe)
        x = torch.randn(m, k, requires_grad=True)
        y = layer(x)
        y.backward(torch.randn(m, n))
        outs.append((layer, y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    call = outs[0][0].last_call
    records = call.records if call is not None else {}
    for gemm, one, other in zip(("fprop", "dgrad", "wgrad"), outs[0][1:4], outs[1][1:4], strict=True):
        if gemm in records and records[gemm].kernel == "native_gemm":
            assert torch.equal(one, other), gemm
    if records:
        assert torch.equal(outs[0][4], outs[1][4])  # the bias
