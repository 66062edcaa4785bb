"""Faults planted on purpose: (kind, what the adapter claims, the fault's name, the adapter)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ottava.kernels.reference import quantize
from ottava.nn.layer import Linear
from ottava.numerics import rounding
from ottava.numerics.formats import E4M3, E4M3FNUZ, E5M2, get_format
from ottava.prove.codes import on_grid
from ottava.prove.expected import adamw
from ottava.prove.judge import cast_spec, decoded, gemm_allowed, gemm_specs, stored

F8, BF16 = torch.float8_e4m3fn, torch.bfloat16
Planted = tuple[str, dict[str, Any], str, Callable[..., Any]]


def encode(x: Tensor, **way: Any) -> Tensor:
    return rounding.encode(on_grid(x, E4M3, **way).float(), E4M3)


def tail_unwritten(x: Tensor) -> Tensor:
    codes, whole = torch.empty(x.shape, dtype=torch.uint8), x.numel() // 16 * 16
    codes.view(-1)[:whole] = rounding.encode(x.reshape(-1)[:whole], E4M3).view(torch.uint8)
    return codes


def carry_lost(x: Tensor) -> Tensor:
    codes = rounding.encode(x, E4M3).view(torch.uint8)
    up = (codes % 8 == 0) & (rounding.decode(codes.view(F8), E4M3).abs() > x.float().abs())
    return torch.where(up, codes - 8, codes).view(F8)


def by_memory(x: Tensor) -> Tensor:
    return rounding.encode(torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset()), E4M3)


def codecs() -> Iterator[Planted]:
    e4m3: dict[str, Any] = {"format": "e4m3"}
    for name, way in (
        ("truncates", {"rounding": "truncate"}),
        ("ties away", {"rounding": "ties_away"}),
        ("no saturation", {"overflow": "nan"}),
        ("clamps at 240", {"top": 240.0}),
        ("subnormals flushed", {"flush": True}),
        ("NaN lost", {"lost_nan": 0.0}),
        ("zero loses its sign", {"plain_zero": True}),
        ("rounds twice, FP16 first", {"before": torch.float16}),
    ):
        yield "encode", e4m3, name, partial(encode, **way)
    yield "encode", e4m3, "E5M2 written", lambda x: x.clamp(-57344, 57344).to(E5M2.dtype).view(torch.uint8)
    yield "encode", e4m3, "E4M3FNUZ written", lambda x: rounding.encode(x, E4M3FNUZ).view(torch.uint8)
    yield "encode", e4m3, "rounds at random", lambda x: rounding.encode(x, E4M3, rounding="stochastic")
    yield "encode", e4m3, "strides ignored", by_memory
    yield "encode", e4m3, "carry lost", carry_lost
    yield "encode", e4m3, "input changed", lambda x: x.clamp_(-448, 448).to(F8)
    yield "encode", e4m3, "tail not written", tail_unwritten
    yield "encode", {"format": "e5m2"}, "output of another type", lambda x: rounding.encode(x, E4M3)
    yield "decode", {"format": "e5m2"}, "read as E4M3", lambda c: rounding.decode(c.view(F8), E4M3)
    yield "decode", e4m3, "NaN lost", lambda c: rounding.decode(c, E4M3).nan_to_num(480.0)


def cast(recipe: str, operand: str, change: Callable[..., Any]) -> Callable[..., Any]:
    spec = cast_spec({"recipe": recipe, "operand": operand})
    assert spec is not None

    def run(x: Tensor, data: Tensor, scale_inv: Tensor) -> Any:
        made = quantize(x, spec)
        return change(x, made.data, stored(made.scale_inv, spec), data, scale_inv)

    return run


def floored_amax(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    amax = x.abs().amax().float().clamp(min=1e-3) if x.numel() else torch.ones(())
    return (x.float() * (448 / amax)).clamp(-448, 448).to(F8), amax / 448


def outside(x: Tensor, codes: Tensor, scale: Tensor, data: Tensor, scale_inv: Tensor) -> None:
    data.view(torch.uint8).copy_(codes.view(torch.uint8))
    scale_inv.copy_(scale)
    torch.as_strided(data.view(torch.uint8), (1,), (1,), data.storage_offset() + data.numel()).fill_(0)


def stale() -> Callable[..., Any]:
    """The scale of the call before."""
    kept: list[Tensor] = []

    def run(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
        amax = x.abs().amax().float().clamp(min=1e-12) if x.numel() else torch.ones(())
        used = kept.pop() if kept else amax
        kept.append(amax)
        return (x.float() * (448 / used)).clamp(-448, 448).to(F8), used / 448

    return run


def casts() -> Iterator[Planted]:
    for recipe, operand, name, change in (
        ("tensorwise", "x", "scale inverted", lambda x, c, s, *_: (c, 1 / s)),
        ("blockwise", "weight", "scale transposed", lambda x, c, s, *_: (c, s.t().contiguous().view(s.shape))),
        ("mxfp8", "x", "scale shifted by one block", lambda x, c, s, *_: (c, s.roll(1, 1))),
        ("tensorwise", "x", "amax at least 0.001", floored_amax),
        ("tensorwise", "x", "writes outside", outside),
    ):
        yield "cast", {"recipe": recipe, "operand": operand}, name, cast(recipe, operand, change)
    yield "cast", {"recipe": "mxfp8"}, "OCP's floor for the scale", cast("mxfp8_floor", "x", lambda x, c, s, *_: (c, s))
    yield "cast", {"recipe": "tensorwise"}, "scale of another step", stale()


def product(recipe: str, before: Callable[..., Any] | None = None, sums: Callable[..., Any] | None = None) -> Any:
    lhs, rhs = gemm_specs({"recipe": recipe})

    def run(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
        if before is not None:
            a, scale_a = before(a, scale_a)
        x, w = decoded(a, scale_a, lhs).float(), decoded(b, scale_b, rhs).float()
        return (x @ w.t()).to(BF16) if sums is None else sums(x, w)

    return run


def without_tail(a: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    a = a.clone()
    a.view(torch.uint8)[:, a.shape[1] // 32 * 32 :] = 0
    return a, scale


def last_tile(a: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    a = a.clone()
    a.view(torch.uint8)[:, : max(a.shape[1] - 1, 0) // 32 * 32] = 0
    return a, scale


def crossed(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> None:
    for row in range(0, len(a), 128):
        mine = scale_b[min(row // 128, len(scale_b) - 1)].expand(scale_b.shape)
        one = a[row : row + 128], b, scale_a[row : row + 128], mine, out
        out[row : row + 128] = product("blockwise")(*one)


def odd_last(a: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([a[:, ::2], a[:, 1::2]], 1), scale


def turned(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).t().reshape(len(x), -1).to(BF16)


def in_bf16(x: Tensor, w: Tensor) -> Tensor:
    total = torch.zeros(len(x), len(w), dtype=BF16)
    for k in range(0, x.shape[1], 16):
        total = (total.float() + x[:, k : k + 16] @ w[:, k : k + 16].t()).to(BF16)
    return total


def cut(x: Tensor, w: Tensor) -> Tensor:
    return (((x @ w.t()).view(torch.int32) >> 16) << 16).view(torch.float32).to(BF16)


def added(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> None:
    out += product("rowwise")(a, b, scale_a, scale_b, out)


def hopper(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    inputs = {"a": a, "b": b, "scale_inv_a": scale_a, "scale_inv_b": scale_b}
    return gemm_allowed(inputs, {"recipe": "tensorwise"}, accumulator="hopper")["out"].low.to(BF16)


def groups(chosen: Callable[[int, int, int], int]) -> Callable[..., None]:
    def run(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> None:
        start = used = 0
        for group, stop in enumerate(ends.tolist()):
            which = chosen(group, used, len(ends))
            if stop > start:
                one = (a[start:stop], b[which], scale_a[start:stop], scale_b[which], out)
                out[start:stop], used = product("rowwise")(*one), used + 1
            start = stop

    return run


def sums() -> Iterator[Planted]:
    for recipe, name, function in (
        ("tensorwise", "a read as E4M3", product("tensorwise", lambda a, s: (a.view(F8), s))),
        ("tensorwise", "scale of a inverted", product("tensorwise", lambda a, s: (a, 1 / s))),
        ("rowwise", "scale ignored (a)", product("rowwise", lambda a, s: (a, torch.ones_like(s)))),
        ("blockwise", "scale shifted by one block (a)", product("blockwise", lambda a, s: (a, s.roll(1, 1)))),
        ("tensorwise", "tail of K dropped", product("tensorwise", without_tail)),
        ("tensorwise", "only the last tile of K, 32", product("tensorwise", last_tile)),
        (
            "rowwise",
            "halves of K interleaved",
            product("rowwise", lambda a, s: (torch.cat([a[:, ::2], a[:, 1::2]], 1), s)),
        ),
        (
            "rowwise",
            "result transposed",
            product("rowwise", sums=lambda x, w: (x @ w.t()).t().reshape(len(x), -1).to(BF16)),
        ),
        ("blockwise", "scales of b chosen by the other side", crossed),
        ("rowwise", "accumulates in BF16", product("rowwise", sums=in_bf16)),
        ("rowwise", "result truncated", product("rowwise", sums=cut)),
        ("rowwise", "all zeros", product("rowwise", sums=lambda x, w: (x @ w.t() * 0).to(BF16))),
        ("rowwise", "reads what nobody wrote", added),
        ("tensorwise", "accumulates like hopper", hopper),
    ):
        yield "gemm", {"recipe": recipe, "out": "bfloat16"}, name, function
    rowwise = {"recipe": "rowwise", "out": "bfloat16"}
    yield "grouped", rowwise, "empty group shifts the others", groups(lambda group, used, count: used)
    yield "grouped", rowwise, "weight of the next group", groups(lambda group, used, count: min(group + 1, count - 1))


def linear(recipe: str, x: Tensor, weight: Tensor, grad: Tensor, change: Callable[..., Any] | None = None) -> Any:
    layer = Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, recipe=recipe)
    layer.weight.data.copy_(weight)
    leaf = x.detach().clone().requires_grad_()
    y = layer(leaf)
    y.backward(grad.reshape(y.shape))
    results = (y.detach(), leaf.grad, layer.weight.grad)
    return results if change is None else change(*results)


def kept_weight() -> Callable[..., Any]:
    """A copy of the weight, made anew only if torch counts a write."""
    kept: dict[Any, Tensor] = {}

    def run(x: Tensor, weight: Tensor, grad: Tensor) -> Any:
        key = (weight.data_ptr(), weight._version)
        if key not in kept:
            kept.clear()
            kept[key] = weight.clone()
        return linear("tensorwise", x, kept[key], grad)

    return run


def attention(offset: int, scale: float | None, gain: float, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Any:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * (scale or q.shape[-1] ** -0.5)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(offset)
    o = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0) @ leaves[2]
    o.backward(grad)
    return (o.detach() * gain, *(x.grad for x in leaves))


def unmasked_backward(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Any:
    o = attention(0, None, 1.0, q, k, v, grad)[0]
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    p = (scores - scores.masked_fill(hidden, -math.inf).logsumexp(-1, keepdim=True)).exp()
    g = grad.double()
    ds = p * (g @ v.double().mT - (g * o.double()).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return o, *(x.to(q.dtype) for x in (ds @ k.double(), ds.mT @ q.double(), p.mT @ g))


def stepped(fault: str, parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    zeros = torch.zeros_like(parameter, dtype=torch.float64)
    what = {"lr": 1e-2, "weight_decay": 0.1}
    moments = state.get("m", zeros), state.get("v", zeros)
    after, state["m"], state["v"], _ = adamw(parameter.double(), grad.double(), *moments, step, what, fault=(fault,))
    parameter.copy_(after)


def layers() -> Iterator[Planted]:
    tensorwise: dict[str, Any] = {"recipe": "tensorwise"}
    yield "linear", tensorwise, "no cast of anything", partial(linear, "bf16")
    yield (
        "linear",
        tensorwise,
        "no gradient of the weight",
        partial(linear, "tensorwise", change=lambda y, dx, dw: (y, dx, dw * 0)),
    )
    yield "linear", tensorwise, "weight of the step before", kept_weight()
    for name, arguments in (
        ("causal mask one late", (1, None, 1.0)),
        ("causal mask one early", (-1, None, 1.0)),
        ("no softmax scale", (0, 1.0, 1.0)),
        ("o times 0.72", (0, None, 0.72)),
        ("o times -1", (0, None, -1.0)),
        ("o times 0", (0, None, 0.0)),
    ):
        yield "attention", {"causal": True}, name, partial(attention, *arguments)
    yield "attention", {"causal": True}, "backward unlike the forward", unmasked_backward
    for fault in ("no bias correction", "decay coupled", "eps under the root", "step stays 1", "no decay"):
        yield "optimizer", {"lr": 1e-2, "weight_decay": 0.1}, fault, partial(stepped, fault)


def planted() -> Iterator[Planted]:
    """All of them."""
    for made in (codecs, casts, sums, layers):
        yield from made()


ENCODED = get_format("e4m3")
