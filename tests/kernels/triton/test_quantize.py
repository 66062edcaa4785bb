"""Triton's casts against the reference, bit by bit: in the interpreter here, on a GPU with -m gpu.

The interpreter is slow: matrices are small, and ragged in every direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ottava
from layout_samples import tiles
from ottava.engine.quantizer import Quantizer
from ottava.kernels import reference
from ottava.kernels.triton import quantize as triton_quantize
from ottava.numerics.formats import BF16, E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Format
from ottava.numerics.rounding import decode
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, Granularity
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops import quantize as dispatch
from ottava.recipe import RECIPES, Recipe
from sweep import sweep
from triton_mode import DEVICE, ON_GPU, with_triton

pytestmark = with_triton()

DELAYED, GUARDED = (QuantizationSpec(E4M3, scaling=scaling, margin=1) for scaling in ("delayed", "guarded"))
Casts = tuple[reference.Cast | None, ...]


def refusal(spec: QuantizationSpec) -> str | None:
    """What a CUDA tensor would hear; a fake one, so that no GPU is needed, for which the only other refusal is that."""
    with FakeTensorMode():
        reason = triton_quantize.supports_quantize(torch.empty(64, 64, device="cuda"), spec)
    return None if str(reason).startswith("triton: takes plain tensors; got a FakeTensor") else reason


def same(got: reference.Cast | None, truth: reference.Cast, spec: QuantizationSpec) -> bool:
    """Codes, scales and amax; the sign and payload of a NaN code are not specified."""
    assert got is not None
    assert got.data.dtype == spec.format.storage_dtype
    assert got.data.is_contiguous()
    codes = [cast.data.cpu().contiguous().view(torch.uint8) for cast in (got, truth)]
    if spec.format in (E4M3, E5M2):
        codes = [torch.where(code.view(spec.format.storage_dtype).isnan(), 0x7F, code) for code in codes]
    floats = ((got.scale_inv, truth.scale_inv), (got.amax, truth.amax))
    return torch.equal(*codes) and all(torch.equal(bits_of(a.cpu()), bits_of(b)) for a, b in floats)


def bits_of(x: Tensor) -> Tensor:
    """As integers, NaN as one of them; the reference calls the amax of zeros -0 or 0."""
    assert x.dtype == torch.float32
    return torch.where(x.isnan(), -1, (x.contiguous() + 0.0).view(torch.int32))


def run(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None) -> reference.Cast:
    return triton_quantize.quantize(x.to(DEVICE), spec, None if scale is None else scale.to(DEVICE))


def agrees(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None) -> bool:
    return same(run(x, spec, scale), reference.quantize(x, spec, scale), spec)


def with_specials(x: Tensor) -> Tensor:
    """NaN, infinities, a zero row and a zero block in it."""
    x[3, 5], x[9, 100], x[20, 7], x[21] = float("nan"), float("inf"), -float("inf"), 0.0
    x[24:30, 32:64] = 0.0
    return x


# --- the bits --------------------------------------------------------------------------------------------------------


@sweep
def test_every_spec_gives_the_bits_of_the_reference(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """Codes, scales and amax of every registered spec: several tiles, ragged; and with non-finite numbers."""
    if (reason := refusal(spec)) is not None:
        assert spec.scale_format == "e4m3" or triton_quantize._mode(spec.granularity) is None, reason
        return
    assert agrees(tiles(130, 140, dtype), spec)
    assert agrees(with_specials(tiles(37, 131, dtype)), spec)


@sweep(granularity=[Granularity(None, None), PER_ROW, BLOCK_1X32, BLOCK_128X128])
def test_every_layout_gives_the_bits_of_the_reference(
    layout: Callable[[torch.dtype], Tensor], granularity: Granularity
) -> None:
    """One number, a row, a column, transposed, strided, expanded; the codes are contiguous all the same."""
    x = layout(torch.bfloat16)
    if x.numel():
        assert agrees(x, QuantizationSpec(E4M3, granularity))


@pytest.mark.parametrize("converts", [True, False], ids=["converts", "integers"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, E2M3, E3M2, E4M3FNUZ, E5M2FNUZ], ids=str)
def test_every_bf16_number_is_encoded_alike(fmt: Format, converts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 65,536, infinities and NaN too, at scale 1: by the device's conversion, and by integers as on sm_80."""
    monkeypatch.setattr(triton_quantize, "_converts", lambda device: converts)
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(256, 256)
    assert agrees(x, QuantizationSpec(fmt, scaling="delayed"), torch.ones(()))


@pytest.mark.parametrize("capability, converts", [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_the_devices_conversion_is_used_where_every_triton_rounds_once(
    capability: tuple[int, int], converts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.6 converts on sm_89 through truncated FP16."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert triton_quantize._converts(torch.device("cuda", 0)) is (converts and torch.version.hip is None)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, E4M3FNUZ], ids=str)
def test_ties_and_their_neighbours_go_the_same_way(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 numbers half way between two codes, and an ulp to either side, by integers."""
    monkeypatch.setattr(triton_quantize, "_converts", lambda device: False)
    quanta = torch.exp2(torch.arange(fmt.emin - fmt.mantissa_bits, fmt.emax - fmt.mantissa_bits + 1))
    ties = (torch.arange(1, 2 ** (fmt.mantissa_bits + 2), 2) / 2 * quanta[:, None]).reshape(-1)
    near = torch.cat([torch.nextafter(ties, torch.tensor(end)) for end in (0.0, torch.inf)])
    x = torch.cat([ties, -ties, near, -near])[None, :]
    assert agrees(x, QuantizationSpec(fmt, scaling="delayed"), torch.ones(()))


@pytest.mark.parametrize(
    "fmt, margin",
    [(E4M3, 20), (E3M2, -3), (E4M3, 0), (E4M3, 6), (E4M3, 8), (E5M2, 1)],
    ids=str,
)
@sweep(scale_format=["fp32", "pow2", "e8m0", "e8m0_floor"], fmt=None)
def test_scales_of_every_magnitude(fmt: Format, margin: int, scale_format: Any) -> None:
    """Random bit patterns, subnormals, numbers just beside a power of two, the largest one; a row each."""
    powers = torch.exp2(torch.arange(-149, 128).double()).float()
    beside = [torch.nextafter(powers, torch.tensor(end)) for end in (0.0, torch.inf)]
    top = fmt.max * torch.exp2(torch.arange(-20, 20))
    random = torch.randint(0, 2**31 - 1, (100,), dtype=torch.int32).view(torch.float32)
    x = torch.cat([powers, *beside, top, torch.nextafter(top, torch.tensor(torch.inf)), random])
    assert agrees(x[:, None], QuantizationSpec(fmt, PER_ROW, scale_format, margin=margin))


# --- numbers that are not finite, and finite ones that leave fp32 -----------------------------------------------------

PLACES = {(0, 3): "nan", (2, 9): "inf", (4, 1): "-inf"}
"""(row, column) -> what stands there; columns are in three blocks of 4."""


@sweep(case=[*((f, c) for f in (E4M3, E5M2) for c in (True, False)), *((f, False) for f in (E2M1, E3M2, E4M3FNUZ))])
def test_nothing_that_is_not_finite_ends_as_a_number(case: tuple[Format, bool]) -> None:
    """As NaN codes, or as a NaN scale of the block where no code is NaN; finite numbers keep theirs, also in products
    beyond fp32."""
    (fmt, converts), shape = case, (6, 12)
    for cols, scale_format, scale in ((4, "fp32", None), (4, "e8m0", None), (None, "pow2", None), (None, "fp32", 1e30)):
        rows = 1 if scale is None else None
        spec = QuantizationSpec(fmt, Granularity(rows, cols), scale_format, scaling="current" if rows else "delayed")
        given = None if scale is None else torch.tensor(scale)
        x, lost = torch.full(shape, 3.0), torch.zeros(shape, dtype=torch.bool)
        x[1], x[5] = -1e20, 1e20
        for (r, c), value in PLACES.items():
            x[r, c] = float(value)
            block = slice(c // 4 * 4, c // 4 * 4 + 4) if cols else slice(None)
            lost[(r, c) if fmt.has_nan else (r if rows else slice(None), block)] = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_quantize, "_converts", lambda device: converts)
            cast = run(x, spec, given)
        assert same(cast, reference.quantize(x, spec, given), spec)
        numbers = decode(cast.data.cpu(), fmt)
        y = numbers * spec.granularity.expand(cast.scale_inv.cpu(), shape)
        assert torch.equal(y.isfinite(), ~lost), (cols, scale_format, scale)
        assert torch.equal(y.isnan(), lost)
        assert scale is None or numbers[[1, 5], 0].tolist() == [-fmt.max, fmt.max]


@pytest.mark.parametrize("converts", [True, False], ids=["converts", "integers"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, E5M2FNUZ], ids=str)
def test_every_exponent_of_fp32_under_every_exponent_of_a_scale(
    fmt: Format, converts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both signs, mantissas at both ends and at random: zeros, subnormals, NaN, products that underflow or overflow."""
    monkeypatch.setattr(triton_quantize, "_converts", lambda device: converts)
    exponents = torch.arange(256, dtype=torch.int32) << 23
    mantissas = torch.cat([torch.tensor([0, 1, 0x7FFFFF]), torch.randint(2**23, (29,))]).int()
    x = (exponents[:, None] | mantissas).view(torch.float32)
    spec = QuantizationSpec(fmt, scaling="delayed")
    for scale in (2.0**-126, 3e-30, 1.0, 3e30, 2.0**127)[:: 1 if converts else 2]:
        assert agrees(torch.cat([x, -x]), spec, torch.tensor(scale)), scale


# --- x and x.T from one reading --------------------------------------------------------------------------------------

TRITON_RECIPES = [
    recipe.name
    for recipe in RECIPES.values()
    if recipe.quantized
    and all(
        refusal(spec) is None
        for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad)
        for spec in (gemm.lhs, gemm.rhs)
        if spec is not None
    )
]
BOTH = {
    f"{recipe.name} {tensor}": cells
    for recipe in RECIPES.values()
    for tensor, cells in {
        "input": (recipe.fprop.lhs, recipe.wgrad.rhs),
        "weight": (recipe.fprop.rhs, recipe.dgrad.rhs),
        "grad_output": (recipe.dgrad.lhs, recipe.wgrad.lhs),
    }.items()
    if all(spec is not None and refusal(spec) is None for spec in cells)
}
BOTH = {name: cells for cells, name in {cells: name for name, cells in BOTH.items()}.items()}  # each pair once


@pytest.mark.parametrize("transposed", [False, True], ids=["x", "x.T"])
@pytest.mark.parametrize("cells", BOTH.values(), ids=BOTH)
def test_both_results_are_those_of_two_casts(cells: Any, transposed: bool) -> None:
    """Of every pair of casts of every recipe, where x lies row by row and where it lies column by column."""
    x = with_specials(tiles(70, 150, torch.bfloat16))
    x = x.t() if transposed else x
    scale = torch.tensor(3.0) if cells[0].predicted else None
    both = triton_quantize.quantize_both(x.to(DEVICE), *cells, None if scale is None else scale.to(DEVICE))
    assert same(both[0], reference.quantize(x, cells[0], scale), cells[0])
    assert same(both[1], reference.quantize(x.t(), cells[1], scale), cells[1])


@pytest.mark.parametrize("recipe", [r for r in RECIPES.values() if r.name in TRITON_RECIPES], ids=lambda r: r.name)
def test_a_linear_on_triton_has_the_bits_of_one_on_the_reference(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward and a second step: y, dx, dw, db with every cast by Triton; each door reads its tensor once."""
    results, casts = [], []
    for on_triton in (False, True):
        torch.manual_seed(0)
        layer = ottava.nn.Linear(40, 24, recipe=recipe, dtype=torch.bfloat16, device=DEVICE)
        answer = None if on_triton else "not wanted in this pass"
        monkeypatch.setattr(triton_quantize, "supports_quantize", lambda *_, answer=answer: answer)
        if on_triton:
            monkeypatch.setattr(dispatch, "_CPU_CASTS", (triton_quantize,))
        original = triton_quantize.plan_both

        def plan_both(*lies: Any, plan: Any = original) -> Any:
            run = plan(*lies)
            return lambda *given: casts.append(lies) or run(*given)

        monkeypatch.setattr(triton_quantize, "plan_both", plan_both)
        for _ in range(2):
            x = torch.randn(50, 40, dtype=torch.bfloat16).to(DEVICE).requires_grad_()
            y = layer(x)
            y.backward(torch.randn(50, 24, dtype=torch.bfloat16).to(DEVICE))
            results.append([y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
        monkeypatch.undo()
    for reference_run, triton_run in zip(results[:2], results[2:], strict=True):
        assert all(map(torch.equal, reference_run, triton_run))
    assert casts
    if not any(spec.predicted for gemm in (recipe.fprop, recipe.dgrad) for spec in (gemm.lhs, gemm.rhs) if spec):
        outer = [call for call in casts if call[1] is not None and call[2] is not None]
        assert len(outer) >= (5 if recipe.wgrad.quantized else 1)  # two steps; on a CPU the weight's cast is cached


# --- predicted scales ------------------------------------------------------------------------------------------------


@sweep(
    spec=[DELAYED, GUARDED, replace(GUARDED, scale_format="pow2")],
    scale=[0.0, 448 / 8, 448 / 8 * 1.0000002, 448 / 64, 448 / 64 * 0.999999, 1e-30, 1e30],
)
def test_a_given_scale_is_taken_or_not_as_in_the_reference(spec: QuantizationSpec, scale: float) -> None:
    """amax 8: 0 is no history; 56 reaches the top exactly, 7 lies three octaves lower; an ulp beyond either fires."""
    x = torch.randn(70, 150).clamp(-7, 7)
    x[69, 149] = -8.0
    assert agrees(x, spec, torch.tensor(scale))
    fired = scale == 0 or (spec.scaling == "guarded" and not 7 <= scale <= 56)
    taken = run(x, spec, torch.tensor(scale)).scale_inv.item() == torch.tensor(scale).reciprocal().item()
    assert taken is not fired


@sweep(spec=[DELAYED, GUARDED], value=[0.0, float("nan"), float("inf"), 1e-45])
def test_guard_of_strange_tensors(spec: QuantizationSpec, value: float) -> None:
    """All zeros keep the prediction; NaN and infinity take scale 1."""
    assert agrees(torch.full((3, 5), value), spec, torch.tensor(2.0))


STRANGE = (0.0, float("nan"), float("inf"), 1e-45, 3.0)


@sweep(spec=[DELAYED, GUARDED], scale=[0.0, 1.0, 448 / 8, 1e-30, 1e30, float("inf")])
def test_a_cast_notes_what_a_door_would_note(spec: QuantizationSpec, scale: float) -> None:
    """Finite amax, whether one was not finite, whether the guard fired: as the door says in torch; only upwards."""
    for value in STRANGE:
        for before in ([0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [5.0, 0.0, 1.0]):
            x = torch.full((3, 5), value)
            witness, staged = Quantizer(), torch.tensor(before, device=DEVICE)
            witness.prepare(spec)
            witness.scale.fill_(scale)
            witness.staged.copy_(torch.tensor(before))
            witness(x, spec, spec)  # on a CPU: in torch
            given = torch.tensor(scale, device=DEVICE)
            triton_quantize.quantize_both(x.to(DEVICE), spec, spec, given, staged)
            assert torch.equal(staged.cpu(), witness.staged), (value, before)


def test_a_cast_of_several_tiles_notes_once() -> None:
    """The amax of all of them, from the launch that comes after all have been read; also of x.T alone."""
    x = tiles(130, 300, torch.bfloat16)
    for cells in ((DELAYED, DELAYED), (DELAYED, None), (None, DELAYED)):
        staged = torch.zeros(3, device=DEVICE)
        triton_quantize.quantize_both(x.to(DEVICE), *cells, torch.ones((), device=DEVICE), staged)
        assert staged.tolist() == [x.abs().max().item(), 0, 0]


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[QuantizationSpec, str]] = {
    "16 bits": (QuantizationSpec(BF16), "triton: casts to E4M3, E5M2, E2M1, E2M3, E3M2, E4M3FNUZ, E5M2FNUZ; got BF16"),
    "stochastic": (QuantizationSpec(E4M3, rounding="stochastic"), "triton: rounds to nearest even; got stochastic"),
    "two levels": (QuantizationSpec(E2M1, BLOCK_1X16, "e4m3"), "triton: has no two-level scales (e4m3)"),
    "odd blocks": (QuantizationSpec(E4M3, Granularity(3, 5)), "blocks of powers of two up to 128; got 3x5"),
    "long blocks": (QuantizationSpec(E4M3, Granularity(1, 256)), "blocks of powers of two up to 128; got 1x256"),
    "half extent": (QuantizationSpec(E4M3, Granularity(None, 4)), "blocks of powers of two up to 128; got *x4"),
}


@pytest.mark.parametrize("spec, message", REFUSED.values(), ids=REFUSED)
def test_refusals_say_why(spec: QuantizationSpec, message: str) -> None:
    assert message in (refusal(spec) or "")


def test_refusals_of_tensors_say_why() -> None:
    """Device, size, the place of the scale, and what a scale is for."""
    spec, ask = QuantizationSpec(E4M3), triton_quantize.supports_quantize
    assert ask(torch.ones(2, 2), spec) == "triton: runs on cuda; got cpu"
    with FakeTensorMode():
        x = torch.empty(64, 64, device="cuda")
        assert ask(torch.empty(0, 64, device="cuda"), spec) == "triton: an empty tensor"
        assert ask(x, spec, torch.ones(())) == f"triton: the scale is on cpu and x on {x.device}"
        rows = QuantizationSpec(E4M3, BLOCK_1X128)
        assert (
            ask(x, rows, torch.empty((), device="cuda"))
            == "triton: takes a given scale for a whole tensor; got one for 1x128"
        )


def test_wrong_arguments_are_the_references() -> None:
    with pytest.raises(TypeError, match=r"quantize: got torch\.float64; needs float32, bfloat16 or float16"):
        triton_quantize.quantize(torch.ones(2, 2, dtype=torch.float64), DELAYED)
    with pytest.raises(ValueError, match=r"quantize: got shape \(2,\); needs a matrix"):
        triton_quantize.quantize(torch.ones(2), DELAYED)


# --- what only a device shows ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@sweep(spec=[QuantizationSpec(E4M3), GUARDED, QuantizationSpec(E4M3, BLOCK_1X128)])
def test_casts_can_be_captured_in_a_graph(spec: QuantizationSpec) -> None:
    """Replayed on other numbers it gives their codes: no decision was frozen in, the guard's neither."""
    x = torch.randn(300, 400, device="cuda")
    scale = torch.tensor(448 / 8.0, device="cuda") if spec.predicted else None
    triton_quantize.quantize(x, spec, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton_quantize.quantize(x, spec, scale)
    for factor in (1.0, 1e3, 1e-3):
        x.copy_(torch.randn(300, 400, device="cuda") * factor)
        graph.replay()
        truth = reference.quantize(x.cpu(), spec, None if scale is None else scale.cpu())
        assert same(captured, truth, spec)
