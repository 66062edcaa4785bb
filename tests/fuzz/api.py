"""Calls of the public API at random: shapes, strides, dtypes, recipes, threads, kinds of tensors, torch's transforms.

A call is right against the reference in `numerics`, or ottava refuses it with a sentence. `draw` makes a call from a
`random.Random`, so Hypothesis shrinks it in the tests, and `./x fuzz --only call` plays 10,000 under limits.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava.kernels import reference
from ottava.kernels.gate import is_plain
from ottava.numerics.formats import FORMATS
from ottava.numerics.scaling import BLOCK_1X32
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import RECIPES
from sweep import GRANULARITIES

SIZES = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 127, 128, 130)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8)
SPECIAL = (0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, 6e-8, 448.0, 464.0, 57344.0, 65504.0, 3e38, -3e38)


class Sub(Tensor):
    """A user's subclass without behaviour of its own."""


def numbers(chance: Random, shape: tuple[int, ...], dtype: torch.dtype, wild: bool) -> Tensor:
    """Normal numbers whose rows differ in size; with `wild` some that formats find hard."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(chance.getrandbits(40)))
    if made.numel():
        made *= 2.0 ** chance.randint(-12, 10)
        for _ in range(chance.randint(1, 4) if wild else 0):
            made.view(-1)[chance.randrange(made.numel())] = chance.choice(SPECIAL)
    return made.to(dtype)


def laid(chance: Random, x: Tensor) -> Tensor:
    """The same numbers in other memory, or as another kind of tensor."""
    match chance.randrange(9):
        case 0 if x.dim() > 1:
            return x.transpose(-1, -2).contiguous().transpose(-1, -2)
        case 1 if x.dim():
            return torch.stack((x, x), -1)[..., 0]
        case 2:
            return torch.cat((x.new_zeros(3), x.reshape(-1)))[3:].view(x.shape)
        case 3:
            return torch._neg_view(-x) if x.is_floating_point() and x.dtype in FLOATS else x
        case 4:
            return x.as_subclass(Sub)
        case 5 if x.dim() > 1 and x.shape[0]:
            return x[:1].expand(x.shape)  # other numbers: every row is the first
        case 6 if x.is_floating_point():
            return nn.Parameter(x)
    return x


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same(got: Tensor, expected: Tensor, what: str, torchs: bool = False) -> None:
    """Every bit, NaN alike; `torchs`: sums of torch, in an order that depends on strides and threads."""
    got, expected = (t.detach().as_subclass(Tensor).resolve_neg().contiguous() for t in (got, expected))
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), f"{what}: {got.shape} {got.dtype}"
    if got.is_meta:
        return
    alike = got.reshape(-1).view(torch.uint8) == expected.reshape(-1).view(torch.uint8) if got.numel() else None
    equal = alike is None or bool(alike.all())
    if torchs and not equal:
        far = (got.float() - expected.float()).abs() > 16 * torch.finfo(got.dtype).eps * expected.float().abs().max()
        equal = not bool(far.any())
    assert equal or torch.equal(got.float().nan_to_num(7e5), expected.float().nan_to_num(7e5)), f"{what} differs"


def near(got: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, what: str, rounded: torch.dtype | None = None) -> None:
    """y = a b.T + bias to one sum of K products in FP32 and a rounding to y's dtype, if asked to `rounded` before."""
    assert got.shape == (a.shape[0], b.shape[0]), f"{what}: {tuple(got.shape)}"
    infos = [torch.finfo(kind) for kind in {rounded or got.dtype, got.dtype}]
    got, a, b = (t.detach().as_subclass(Tensor).double() for t in (got, a, b))
    exact = a @ b.t() + (0 if bias is None else bias.double())
    sums = (a.shape[1] + 3) * 2.0**-24 * (a.abs() @ b.abs().t() + (0 if bias is None else bias.abs().double()))
    limit = sums + sum(info.eps * (exact.abs() + sums) + info.smallest_normal * info.eps for info in infos)
    fits = exact.abs() + limit < min(info.max for info in infos)  # beyond, an infinity is right, and so is the top
    error = (got - exact).abs()
    assert bool((error <= limit)[fits].all()), f"{what}: off by {error[fits].max():.3g}"


def spec_of(chance: Random) -> QuantizationSpec:
    """A cell of a recipe, or any combination that has a meaning."""
    cells = [c for r in RECIPES.values() for g in (r.fprop, r.dgrad, r.wgrad) for c in (g.lhs, g.rhs) if c is not None]
    if chance.random() < 0.5:
        return replace(chance.choice(cells), scaling="current")
    try:
        return QuantizationSpec(
            chance.choice(list(FORMATS.values())),
            chance.choice(GRANULARITIES),
            chance.choice(("fp32", "pow2", "e8m0", "e4m3")),
            margin=chance.choice((0, 0, 1, -2)),
            rounding=chance.choice(("nearest_even", "nearest_even", "stochastic")),
        )
    except (ValueError, TypeError):
        return QuantizationSpec(FORMATS["E4M3"], BLOCK_1X32)


def inside(chance: Random, call: Callable[[], Any]) -> Any:
    """A call in one of the modes of autograd; torch.autocast changes no cast that is asked for."""
    with (
        threads(chance.choice((1, 1, 2))),
        chance.choice((contextlib.nullcontext, contextlib.nullcontext, torch.no_grad, torch.inference_mode))(),
    ):
        return call()


def call_cast(chance: Random) -> None:
    """`ottava.quantize`: codes and scales are the reference's."""
    shape = tuple(chance.choice(SIZES) for _ in range(chance.choice((2, 2, 2, 2, 2, 2, 1, 3, 0))))
    dtype = chance.choice((*FLOATS * 5, *OTHERS))
    x, spec = laid(chance, numbers(chance, shape, dtype, wild=True)), spec_of(chance)
    scale = torch.full((chance.choice((1, 1, 1, 2)),), 2.0 ** chance.randint(-4, 8)) if chance.random() < 0.2 else None
    match chance.randrange(12):
        case 0:
            x = x.to("meta")
        case 1 if x.dim() == 3 and is_plain(x):
            x = torch.func.vmap(lambda one: ottava.quantize(one, spec).dequantize(), randomness="different")(x)
    torch.manual_seed(5)
    got = inside(chance, lambda: ottava.quantize(x, spec, scale=scale))
    if x.is_meta or spec.transform is not None:
        assert got.data.shape == x.shape or spec.transform is not None
        return
    torch.manual_seed(5)
    plain = x.detach().as_subclass(Tensor).resolve_neg().clone(memory_format=torch.preserve_format)
    expected = reference.quantize(plain, spec, scale)
    same(got.data, expected.data, f"codes of {spec}")
    same(got.scale_inv, expected.scale_inv, f"scales of {spec}")


def call_gemm(chance: Random) -> None:
    """`ottava.gemm` on operands of a recipe or on dense ones: the products in FP64, within the bound."""
    m, n, k = (chance.choice(SIZES) for _ in range(3))
    recipe = RECIPES[chance.choice(list(RECIPES))]
    cells = chance.choice((recipe.fprop, recipe.dgrad, recipe.wgrad))
    dtype, out = chance.choice(FLOATS), chance.choice((*FLOATS * 4, torch.float64, torch.int8))
    wrong = chance.random() < 0.1
    a, b = (laid(chance, numbers(chance, s, dtype, wild=False)) for s in ((m, k), (n, k + wrong)))
    bias = (
        numbers(chance, (n,), chance.choice((out, out, torch.float32)), wild=False) if chance.random() < 0.4 else None
    )
    if cells.quantized and cells.lhs is not None and cells.rhs is not None and not cells.lhs.transform:
        a, b = (ottava.quantize(x, replace(c, scaling="current")) for x, c in ((a, cells.lhs), (b, cells.rhs)))
    elif chance.random() < 0.2:
        b = ottava.quantize(b, QuantizationSpec(FORMATS["E4M3"]))  # one quantized and one not
    y = inside(chance, lambda: ottava.gemm(a, b, out_dtype=out, bias=bias, compute=cells.compute))
    dense = [x.detach().as_subclass(Tensor) if isinstance(x, Tensor) else x.dequantize(torch.float32) for x in (a, b)]
    if cells.compute == "native":
        near(y, *dense, bias, f"gemm {cells}, {out}", None if isinstance(a, ottava.QuantizedTensor) else dtype)


def step(layer: nn.Module, x: Tensor, how: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """y, and gradients where they are wanted."""
    leaf = x.detach().requires_grad_(x.is_floating_point())
    layer.zero_grad()
    torch.manual_seed(4)
    y = how(layer, leaf)
    if not y.requires_grad:
        return [y]
    torch.manual_seed(5)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    return [y.detach(), *(t.grad for t in (leaf, *layer.parameters()) if t.grad is not None)]


class Refused(Exception):
    """What ottava says it has no rule for."""


@contextlib.contextmanager
def ruled() -> Iterator[None]:
    """A NotImplementedError is a refusal if ottava says so itself."""
    try:
        yield
    except NotImplementedError as error:
        if str(error).startswith("ottava: "):
            raise Refused from error
        raise


def _functional(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(layer, dict(layer.named_parameters()), (x,))  # type: ignore[no-any-return]


def _gradient(layer: nn.Module, x: Tensor) -> Tensor:
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).sum())(parameters)
    return layer(x)  # type: ignore[no-any-return]


def _without(mode: Callable[[], Any]) -> Callable[[nn.Module, Tensor], Tensor]:
    def run(layer: nn.Module, x: Tensor) -> Tensor:
        with mode():
            layer(x)
        torch.manual_seed(4)
        return layer(x)  # type: ignore[no-any-return]

    return run


HOW: tuple[Callable[[nn.Module, Tensor], Tensor], ...] = (
    lambda layer, x: layer(x),
    _functional,
    _without(torch.no_grad),
    _without(torch.inference_mode),
    lambda layer, x: torch.func.vmap(layer, randomness="different")(x),
    _gradient,
    lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False),
    lambda layer, x: copy.deepcopy(layer)(x).detach(),
)
"""Ways to call a layer. Those that ottava cannot follow it refuses; the others give the bits of the first."""


def made(chance: Random, kind: str, width: int, dtype: torch.dtype, recipe: str) -> nn.Module:
    """A module of this width."""
    torch.manual_seed(chance.getrandbits(30))
    other = chance.choice([size for size in SIZES if size])
    if kind == "Linear":
        return ottava.nn.Linear(width, other, bias=chance.random() < 0.5, dtype=dtype, recipe=recipe)
    if kind == "NormLinear":
        return ottava.nn.NormLinear(width, other, dtype=dtype, recipe=recipe)
    if kind == "NormMLP":
        return ottava.nn.NormMLP(width, other, activation=chance.choice(("gelu", "swiglu", "relu2")), dtype=dtype,
                                 recipe=recipe)  # fmt: skip
    return chance.choice((ottava.nn.RMSNorm, ottava.nn.LayerNorm))(width, dtype=dtype)


def call_layer(chance: Random) -> None:
    """A module: one way to call it gives the bits of a plain call; a Linear's y is the product of its operands."""
    kind, recipe = chance.choice(("Linear", "Linear", "NormLinear", "NormMLP", "norm")), chance.choice(list(RECIPES))
    dtype, width = chance.choice(FLOATS), chance.choice([size for size in SIZES if size])
    layer = made(chance, kind, width, dtype, recipe)
    shape = (*(chance.choice(SIZES[:10]) for _ in range(chance.choice((0, 1, 1, 1, 2, 3)))), width)
    wrong = chance.random()
    if wrong < 0.12 and RECIPES[recipe].quantized and kind == "Linear":  # what is torch's own says it as torch does
        bad: list[Any] = [None, [1.0] * width, torch.tensor(1.0).to(dtype), torch.zeros(shape, device="meta")]
        bad += [numbers(chance, (*shape[:-1], width + 1), dtype, False), torch.zeros(2, width, dtype=dtype).to_sparse()]
        bad += [numbers(chance, shape, chance.choice(OTHERS), False)]
        layer(chance.choice(bad))
        return
    x = numbers(chance, shape, dtype, wild=wrong > 0.8)
    if wrong < 0.2:
        assert layer.to("meta")(x.to("meta")).shape[:-1] == x.shape[:-1]
        return
    twin, expected = copy.deepcopy(layer), None
    odd = laid(chance, x)
    plain = odd.detach().as_subclass(Tensor).resolve_neg().clone(memory_format=torch.contiguous_format)
    how, count = chance.choice(HOW), chance.choice((1, 1, 2))
    with threads(count), ruled():
        expected, got = step(twin, plain, HOW[0]), step(layer, odd, how)
    for number, (one, other) in enumerate(zip(got, expected, strict=False)):
        # a subclass, and what runs under bf16, is torch's; gradients of weights are sums over rows, in high precision
        torchs = recipe == "bf16" or kind == "norm" or type(odd) is Sub or number > 1 or odd.is_neg()
        same(one, other, f"{number} of {kind} under {recipe}, {tuple(shape)}", torchs)
    cells = RECIPES[recipe].fprop
    pair = [cells.lhs, cells.rhs]
    if kind == "Linear" and cells.compute == "native" and wrong <= 0.8 and None not in pair and x.dim() == 2:
        if any(c.transform or c.rounding == "stochastic" for c in pair):  # type: ignore[union-attr]
            return
        weight, bias = (getattr(twin, name) for name in ("weight", "bias"))
        values = [ottava.quantize(t.detach(), replace(c, scaling="current")).dequantize(torch.float32)
                  for t, c in ((plain, pair[0]), (weight, pair[1]))]  # fmt: skip
        near(expected[0], *values, None if bias is None else bias.detach(), f"Linear under {recipe}, {tuple(shape)}")


CALLS: dict[str, Callable[[Random], None]] = {"cast": call_cast, "gemm": call_gemm, "layer": call_layer}


def draw(name: str, chance: Random) -> None:
    """One call; raises what ottava raises, and AssertionError if it is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Refused):
            CALLS[name](chance)
