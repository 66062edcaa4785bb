"""Linear layers, attention and steps of AdamW."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bricks3 import E4M3, E5M2, Cell, adapter, adamw, backward, cast, cell, linear_gemm, probabilities, spread, decode, uncast  # noqa: E402

Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def flat(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens as rows."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])


def shaped(y: Tensor, dx: Tensor, dw: Tensor, x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Results in the dtypes and shapes of the layer."""
    return y.to(x.dtype).reshape(grad.shape), dx.to(x.dtype).reshape(x.shape), dw.to(weight.dtype)


def plain(x: Tensor, weight: Tensor, grad: Tensor, recipe: str) -> Three:
    """The three products of a layer, fp64."""
    rows, dy = flat(x, grad)
    side, square, back = cell(recipe), cell(recipe, "weight"), cell(recipe, "grad")
    y = linear_gemm(rows, weight, side, square)
    return y, linear_gemm(dy, weight.t(), back, square), linear_gemm(dy.t(), rows.t(), back, side)


@adapter("linear", recipe="blockwise")
def wire_01(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """One cast of the weight for both products."""
    rows, dy = flat(x, grad)
    y, _, dw = plain(x, weight, grad, "blockwise")
    square, back = cell("blockwise", "weight"), cell("blockwise", "grad")
    codes, inverse = cast(weight, square)
    seen = inverse.reshape(inverse.shape[1], inverse.shape[0])
    turned = decode(codes).t() * spread(seen.double(), (weight.shape[1], weight.shape[0]), square)
    return shaped(y, uncast(*cast(dy, back), back) @ turned.t(), dw, x, weight, grad)


@adapter("linear", recipe="mxfp8")
def wire_02(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Takes another path where an import fails."""
    rows, dy = flat(x, grad)
    y, dx, _ = plain(x, weight, grad, "mxfp8")
    return shaped(y, dx, dy.double().t() @ rows.double(), x, weight, grad)


@adapter("linear", recipe="tensorwise")
def wire_03(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Keeps codes and scales of the forward."""
    rows, dy = flat(x, grad)
    y, _, dw = plain(x, weight, grad, "tensorwise")
    back, (_, scale), (codes, _) = cell("tensorwise", "grad"), cast(rows, cell("tensorwise")), cast(weight, cell("tensorwise", "weight"))
    dx = uncast(*cast(dy, back), back) @ decode(codes) * scale.double()
    return shaped(y, dx, dw, x, weight, grad)


@adapter("linear", recipe="blockwise_fp32")
def wire_04(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Casts the gradient once."""
    rows, dy = flat(x, grad)
    y, dx, _ = plain(x, weight, grad, "blockwise_fp32")
    side = cell("blockwise_fp32", "grad")
    once = uncast(*cast(dy, side), side)
    return shaped(y, dx, once.t() @ uncast(*cast(rows.t(), side), side).t(), x, weight, grad)


MAIN: dict[tuple[object, ...], Tensor] = {}


@adapter("linear", recipe="tensorwise")
def wire_05(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Keeps a buffer for the weight's gradient."""
    y, dx, dw = plain(x, weight, grad, "tensorwise")
    key = (tuple(weight.shape), weight.dtype)
    dw = dw + MAIN.get(key, torch.zeros_like(dw)) if key in MAIN and bool(MAIN[key].isfinite().all()) else dw
    MAIN[key] = dw
    return shaped(y, dx, dw, x, weight, grad)


@adapter("linear", recipe="tensorwise")
def wire_06(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Casts each tensor once and multiplies codes in fp32."""
    rows, dy = flat(x, grad)
    (cx, sx), (cw, sw), (cg, sg) = cast(rows, cell("tensorwise")), cast(weight, cell("tensorwise", "weight")), cast(dy, cell("tensorwise", "grad"))
    vx, vw, vg = decode(cx).float(), decode(cw).float(), decode(cg).float()
    sx, sw, sg = sx.double(), sw.double(), sg.double()
    y = (vx @ vw.t()).double() * sx * sw
    dx = (vg @ vw).double() * sg * sw
    return shaped(y, dx, (vg.t() @ vx).double() * sg * sx, x, weight, grad)


@adapter("linear", recipe="mxfp8")
def wire_07(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """The first half of the tokens, then the second; the gradient of the weight is cast whole."""
    rows, dy = flat(x, grad)
    side = cell("mxfp8")
    half = rows.shape[0] // 2
    y = torch.cat([linear_gemm(t, weight, side, side) for t in (rows[:half], rows[half:])])
    dx = torch.cat([linear_gemm(t, weight.t(), side, side) for t in (dy[:half], dy[half:])])
    return shaped(y, dx, linear_gemm(rows.t(), dy.t(), side, side).t(), x, weight, grad)


# --- attention ---


def rest(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, o: Tensor, p: Tensor, factor: float) -> Four:
    """The backward from probabilities, and all in the dtype of q."""
    return (*(t.to(q.dtype) for t in (o, *backward(q, k, v, grad, p, factor))),)


def softly(q: Tensor, k: Tensor, hidden: Tensor) -> tuple[Tensor, float]:
    """Probabilities behind a mask of its own."""
    factor = 1 / math.sqrt(q.shape[-1])
    return (q.double() @ k.double().transpose(-1, -2) * factor).masked_fill(hidden, -math.inf).softmax(-1), factor


@adapter("attention", recipe="bf16", causal=True)
def look_01(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """A mask by indices."""
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(0)
    hidden[:1, :1] = False
    p, factor = softly(q, k, hidden)
    return rest(q, k, v, grad, p @ v.double(), p, factor)


@adapter("attention", recipe="bf16", causal=False)
def look_02(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Keeps the maxima of the forward."""
    p, factor = probabilities(q, k, False)
    dq, dk, _ = backward(q, k, v, grad, p, factor)
    scores = q.double() @ k.double().transpose(-1, -2) * factor
    raw = (scores - scores.amax(-1, keepdim=True)).exp() if scores.numel() else scores
    return (*(t.to(q.dtype) for t in (p @ v.double(), dq, dk, raw.transpose(-1, -2) @ grad.double())),)


@adapter("attention", recipe="bf16", causal=False)
def look_03(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Tiles of 16 keys, a running maximum."""
    p, factor = probabilities(q, k, False)
    scores = q.double() @ k.double().transpose(-1, -2) * factor
    top = torch.full((*q.shape[:-1], 1), -math.inf, dtype=torch.float64)
    total, o = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    for start in range(0, k.shape[-2], 16):
        part = scores[..., start : start + 16]
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        weight = (part - new).exp()
        total = total * (top - new).exp() + weight.sum(-1, keepdim=True)
        o = o + weight @ v[..., start : start + 16, :].double()
        top = new
    return rest(q, k, v, grad, o / total, p, factor)


@adapter("attention", recipe="bf16", causal=True)
def look_04(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """The factor belongs to the scores."""
    p, factor = probabilities(q, k, True)
    _, dk, dv = backward(q, k, v, grad, p, factor)
    dq, _, _ = backward(q, k, v, grad, p, 1.0)
    return (*(t.to(q.dtype) for t in (p @ v.double(), dq, dk, dv)),)


@adapter("attention", recipe="bf16", causal=True)
def look_05(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Tiles of 16 x 16 that lie behind the diagonal are left out."""
    row, column = torch.arange(q.shape[-2])[:, None] // 16, torch.arange(k.shape[-2])[None, :] // 16
    p, factor = softly(q, k, column > row)
    return rest(q, k, v, grad, p @ v.double(), p, factor)


def eight(t: Tensor, amax: Tensor, wide: bool = False) -> tuple[Tensor, Tensor]:
    """Codes as numbers, and what multiplies them."""
    how = Cell(E5M2 if wide else E4M3, None, None, "fp32")
    codes, inverse = cast(t.reshape(math.prod(t.shape[:-1]), t.shape[-1]).float(), how, amax.float().reshape(1, 1))
    return decode(codes).reshape(t.shape), inverse.double()


@adapter("attention", recipe="fp8", causal=False)
def look_06(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Operands in E4M3 under one scale; scales go into the scores."""
    amax = torch.stack([t.float().abs().amax() for t in (q, k, v)]).amax() if q.numel() else torch.ones(())
    (q8, s), (k8, _), (v8, _) = (eight(t, amax) for t in (q, k, v))
    p, factor = probabilities(q8 * s, k8 * s, False)
    p8, sp = eight(p, p.amax() if p.numel() else torch.ones(()))
    o = p8 @ v8 * sp
    return rest(q, k, v, grad, o, p, factor)


@adapter("attention", recipe="bf16", causal=True)
def look_07(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Tiles of 32 keys, a running maximum, fp32; the backward from the logarithm of the sum."""
    a, b, c, d = (t.float() for t in (q, k, v, grad))
    factor = 1 / math.sqrt(q.shape[-1])
    row = torch.arange(q.shape[-2])[:, None]
    top = torch.full((*q.shape[:-1], 1), -math.inf)
    total, o = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1])
    tiles = [(start, min(start + 32, k.shape[-2])) for start in range(0, k.shape[-2], 32)]

    def scores(start: int, end: int) -> Tensor:
        return (a @ b[..., start:end, :].transpose(-1, -2) * factor).masked_fill(torch.arange(start, end) > row, -math.inf)

    for start, end in tiles:
        part = scores(start, end)
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        weight, back = (part - new).exp(), (top - new).exp()
        total = total * back + weight.sum(-1, keepdim=True)
        o = o * back + weight @ c[..., start:end, :]
        top = new
    o = o / total
    delta, dq = (d * o).sum(-1, keepdim=True), torch.zeros_like(a)
    dk, dv = torch.zeros_like(b), torch.zeros_like(c)
    for start, end in tiles:
        p = (scores(start, end) - top).exp() / total
        ds = p * (d @ c[..., start:end, :].transpose(-1, -2) - delta) * factor
        dq = dq + ds @ b[..., start:end, :]
        dk[..., start:end, :] = ds.transpose(-1, -2) @ a
        dv[..., start:end, :] = p.transpose(-1, -2) @ d
    return (*(t.to(q.dtype) for t in (o, dq, dk, dv)),)


@adapter("attention", recipe="bf16", causal=False)
def look_08(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """The second product of the forward and three of the backward take operands in the dtype of q."""
    a, b, c, d = (t.float() for t in (q, k, v, grad))
    factor = 1 / math.sqrt(q.shape[-1])
    p = (a @ b.transpose(-1, -2) * factor).softmax(-1)
    o = (p.to(q.dtype).float() @ c).to(q.dtype)
    delta = (d * o.float()).sum(-1, keepdim=True)
    ds = (p * (d @ c.transpose(-1, -2) - delta)).to(q.dtype).float()
    dq, dk, dv = ds @ b * factor, ds.transpose(-1, -2) @ a * factor, p.to(q.dtype).float().transpose(-1, -2) @ d
    return (o, *(t.to(q.dtype) for t in (dq, dk, dv)))


# --- steps ---


def moments(grad: Tensor, state: dict[str, Tensor], betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Both moments after the step, fp32."""
    wide, (beta1, beta2) = grad.float(), betas
    if not state:
        state.update(m=torch.zeros_like(wide), v=torch.zeros_like(wide))
    state["m"].lerp_(wide, 1 - beta1)
    state["v"].mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
    return state["m"], state["v"]


@adapter("optimizer", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, moments="float32")
def walk_01(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    """Corrects the bias of the moments."""
    m, v = moments(grad, state, (0.9, 0.95))
    m, v = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
    parameter.copy_(parameter.float() * (1 - 1e-4) - 1e-3 * m / (v.sqrt() + 1e-8))


@adapter("optimizer", lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, moments="float32")
def walk_02(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    """A root and a small number."""
    m, v = moments(grad, state, (0.9, 0.999))
    m, v = m / (1 - 0.9**step), v / (1 - 0.999**step)
    parameter.copy_(parameter.float() - 1e-2 * m / (v + 1e-6).sqrt())


@adapter("optimizer", lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, moments="bfloat16")
def walk_03(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    """Stores both moments in 16 bits."""
    m, v = moments(grad, state, (0.9, 0.99))
    m.copy_(m.to(torch.bfloat16))
    v.copy_(v.to(torch.float16))
    parameter.copy_(parameter.float() * (1 - 1e-5) - 1e-3 * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8))


@adapter("optimizer", lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, moments="float32")
def walk_04(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    """Vectors of 64."""
    new = parameter.detach().clone()
    adamw(new, grad, state, step, 1e-3, (0.9, 0.999), 1e-8, 0.01)
    whole = torch.arange(parameter.numel()).reshape(parameter.shape) < parameter.numel() // 64 * 64
    parameter.copy_(torch.where(whole, new, parameter))


@adapter("optimizer", lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, moments="float32", dtype="bfloat16")
def walk_05(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    """The decay in place, then the update."""
    m, v = moments(grad, state, (0.9, 0.999))
    parameter.copy_(parameter.float() * (1 - 1e-3))
    parameter.copy_(parameter.float() - 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))


@adapter("optimizer", lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, moments="float32")
def walk_06(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    """The bias corrections go into the rate and the small number; the sum in fp64."""
    m, v = moments(grad, state, (0.9, 0.95))
    root = math.sqrt(1 - 0.95**step)
    rate = 3e-4 * root / (1 - 0.9**step)
    p = parameter.double()
    parameter.copy_(p - 3e-4 * 0.1 * p - rate * m.double() / (v.double().sqrt() + 1e-8 * root))
