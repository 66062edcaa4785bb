"""What attention and an optimizer's steps may give, and the reference of each kind of kernel; see `judge`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ottava.base.errors import need_known
from ottava.numerics.formats import E8M0, Format, get_format
from ottava.numerics.tensor import QuantizationSpec
from ottava.prove.codes import U32, Allowed, Values, decode_allowed, encode_allowed
from ottava.prove.judge import (
    between,
    cast_allowed,
    cast_interval,
    cast_spec,
    gemm_allowed,
    grouped_allowed,
    linear_allowed,
)
from ottava.recipe import ATTENTION_TENSORS, AttentionRecipe

# --- attention -------------------------------------------------------------------------------------------------------


def _cast_together(spec: QuantizationSpec | None, *parts: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tensors (and how far they may be off) after a cast with one scale for all of them."""
    if spec is None:
        return list(parts)
    flat, off = (torch.cat([part[i].reshape(1, -1) for part in parts], 1) for i in (0, 1))
    sizes = [part[0].numel() for part in parts]
    cast = [side.split(sizes, 1) for side in cast_interval(flat, spec, off)]
    return [(cast[0][i].view(part[0].shape), cast[1][i].view(part[0].shape)) for i, part in enumerate(parts)]


def _times(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], u: float) -> tuple[Tensor, Tensor]:
    """A product of two tensors and how far they may be off; the sums in it err by u of their magnitudes."""
    (x, dx), (y, dy) = a, b
    return x @ y, dx @ y.abs() + (x.abs() + dx) @ dy + u * (x.abs() @ y.abs())


def _moved_odds(share: Tensor, off: Tensor) -> Tensor:
    """By which part of it a share of a softmax may change if each score is off by that much.

    Against the others together its odds change by a factor of e ** (what it is off + what the worst is off) at most.
    """
    kept = (-(off.amax(-1, keepdim=True) + off)).exp()
    rest = 1 - share
    return rest * (1 - kept) / torch.minimum(rest * kept + share, rest + share * kept).clamp(min=1e-300)


def _turned(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].mT, pair[1].mT


def _seen(queries: int, keys: int, offset: int, window: int, tile: int) -> Tensor:
    """The keys that each query sees under a causal mask; see `attention_allowed`."""
    if tile:
        return torch.arange(queries)[:, None] // tile >= torch.arange(keys) // tile
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(offset)
    return seen.triu(1 - window) if window else seen


def _behind_tiles(scores: Tensor, total: Tensor, tile: int, lazy: float) -> Tensor:
    """Weights of the running maximum behind each tile of keys, and of rises by `lazy` octaves, over the sum."""
    ends = [min(j // tile * tile + tile, scores.shape[-1]) - 1 for j in range(scores.shape[-1])]
    top = scores.cummax(-1).values[..., ends]
    rise = top.diff(dim=-1, append=top[..., -1:])
    later = torch.where(rise >= lazy * math.log(2), rise, 0.0).flip(-1).cumsum(-1).flip(-1)
    return (scores - top - later).exp() * torch.where(total == 0, 0.0, 1 / total)


def _odds_again(raw: Tensor, off: Tensor, top: Tensor, total: Tensor, back: Values) -> tuple[Tensor, Tensor]:
    """Probabilities that a backward makes of the scores and the forward's sums, and how far they may be off.

    back: causal, offset, tile, window: its own mask. anew: it makes a softmax of its own, without the forward's sums.
        by: the factor of its scores. base: its exponential's base.
    """
    scores = raw * back.get("by", 1.0)
    if back["causal"]:
        tile, window = back.get("tile", 0), back.get("window", 0)
        seen = _seen(raw.shape[-2], raw.shape[-1], back["offset"], window, tile).to(raw.device)
        scores = scores.masked_fill(~seen, -math.inf)
    if back.get("anew"):
        top = scores.amax(-1, keepdim=True).clamp(min=-1e300)
        total = (scores - top).exp().sum(-1, keepdim=True)
    p = (scores - top).exp() / torch.where(total == 0, 1.0, total)
    return p, p * torch.expm1(off + off.amax(-1, keepdim=True))


def _attention_grads(
    given: tuple[tuple[Tensor, Tensor], ...],
    s: tuple[Tensor, Tensor],
    of_p: tuple[Tensor, Tensor],
    of_o: tuple[Tensor, Tensor],
    scale: float,
    u: float,
    specs: Mapping[str, QuantizationSpec],
    fault: str,
    last: int,
) -> list[tuple[Tensor, Tensor]]:
    """dq, dk and dv, and how far they may be off; given: q, k, v and grad, s: the probabilities that meet v."""
    (q, k, v, g), (p, ep), (o, eo) = given, of_p, of_o
    queries, keys, width = q[0].shape[-2], k[0].shape[-2], v[0].shape[-1]
    dp, edp = _times(g, _turned(v), (width + 4) * U32 + u)
    delta = (g[0] * o).sum(-1, keepdim=True)
    edelta = (g[0].abs() * (eo + u * o.abs()) + g[1] * o.abs()).sum(-1, keepdim=True)
    edelta += (width + 4) * U32 * (g[0] * o).abs().sum(-1, keepdim=True)
    if fault == "no delta":
        delta = torch.zeros_like(delta)
    ds = p * (dp - delta)
    eds = ep * (dp - delta).abs() + (p + ep) * (edp + edelta) + 2 * u * ds.abs()
    (dscores,) = _cast_together(specs.get("dp"), (ds, eds))
    factor = 1.0 if fault == "gradients without scale" else scale
    by_key, by_query = dscores, dscores
    if last:
        by_key = ds * (torch.arange(keys) // last == (keys - 1) // last), eds
        late = (torch.arange(queries) // last == (queries - 1) // last)[:, None]
        by_query, s = (ds * late, eds), (s[0] * late, s[1])
    dq, dk = _times(by_key, k, (keys + 4) * U32), _times(_turned(by_query), q, (queries + 4) * U32)
    dq, dk = ((x * factor, off * factor) for x, off in (dq, dk))
    return _cast_together(specs.get("dqkv"), dq, dk, _times(_turned(s), g, (queries + 4) * U32))


def attention_allowed(
    inputs: Values,
    what: Values,
    *,
    scale: float | None = None,
    offset: int = 0,
    causal: bool | None = None,
    fault: str = "",
    pad: int = 0,
    window: int = 0,
    tile: int = 0,
    rescaled: int = 0,
    lazy: float = math.inf,
    back: Values | None = None,
    last: int = 0,
    rounded: Mapping[str, torch.dtype] | None = None,
    casts: Mapping[str, str] | None = None,
) -> dict[str, Allowed]:
    """o, dq, dk and dv of softmax(q k.T / sqrt(D)) v; each rounding of an ordinary kernel to the operands' type counts.

    Args:
        offset: by which the causal mask is late; None is right.
        fault: what else is wrong, see `hypotheses`.
        pad: keys are padded to a multiple of it, with zeros that count.
        window: keys that a query sees, itself among them; 0: all.
        tile: the causal mask hides whole tiles of so many keys.
        rescaled: the tile of keys behind which the sum of values is not rescaled to a score larger by `lazy` octaves.
        back: what the backward alone does, see `_odds_again`.
        last: the backward keeps only the last tile of so many keys (for dq) or queries (for dk and dv).
        rounded: "scores" or "p", and a type that they are rounded to.
        casts: tensor of `AttentionRecipe` -> a format in place of its own, or "skip".
    """
    given = [
        (inputs[key].double(), torch.zeros_like(inputs[key], dtype=torch.float64)) for key in ("q", "k", "v", "grad")
    ]
    (queries, depth), keys, dtype = inputs["q"].shape[-2:], inputs["v"].shape[-2], inputs["q"].dtype
    casts = casts or {}
    known = {name: spec for name in ATTENTION_TENSORS if (spec := getattr(AttentionRecipe(), name)) is not None}
    changed = {n: replace(known[n], format=get_format(to)) for n, to in casts.items() if to != "skip"}
    specs = (known if what.get("recipe") == "fp8" else {}) | changed
    specs = {name: spec for name, spec in specs.items() if casts.get(name) != "skip"}
    q, k, v = _cast_together(specs.get("qkv"), *given[:3])
    (g,) = _cast_together(specs.get("do"), given[3])
    u = max(torch.finfo(dtype).eps / 2, U32)
    scale = 1 / math.sqrt(depth) if scale is None else scale
    scores, off = (x * scale for x in _times(q, _turned(k), (depth + 4) * U32))
    off = off + 2 * u * scores.abs()  # sums in fp32, then one rounding of the scores
    raw, raw_off, hides = scores, off, what.get("causal", False) if causal is None else causal
    if hides:
        seen = _seen(queries, keys, offset, window, tile).to(scores.device)
        scores, off = scores.masked_fill(~seen, -math.inf), off.masked_fill(~seen, 0.0)
    if rounded and "scores" in rounded:
        scores = scores.to(rounded["scores"]).double()
    top = scores.amax(-1, keepdim=True).clamp(min=-1e300)
    raised = (scores - top).exp()
    total = raised.sum(-1, keepdim=True)
    if pad:  # keys of zeros behind the last one, which nobody hides
        total = total + (-keys % pad) * (-top).exp()
    share = raised / torch.where(total == 0, 1.0, total)
    p = raised if fault == "not normalized" else share
    moved = _moved_odds(share, off) + (keys + 16) * U32 + 2 * u
    ep = p * moved
    p = p.to(rounded["p"]).double() if rounded and "p" in rounded else p
    (s,) = _cast_together(specs.get("s"), (p, ep))
    summed = (late := _behind_tiles(scores, total, rescaled, lazy), late * moved) if rescaled else s
    ((o, eo),) = _cast_together(specs.get("o"), _times(summed, v, (keys + 4) * U32))
    if fault == "dv not normalized":
        s = raised, ep
    mine = o
    if back is not None:
        p, ep = _odds_again(
            raw, raw_off + (keys + 16) * U32 + 2 * u, top, total, {"causal": hides, "offset": offset, **back}
        )
        s, mine = (p, ep), p @ v[0] if back.get("anew") else o
    grads = _attention_grads((q, k, v, g), s, (p, ep), (mine, eo), scale, u, specs, fault, last)
    # second order: the bounds above are of first order, and errors of a few percent multiply
    return {
        name: between(center, error * 1.1 + torch.finfo(torch.float32).tiny, dtype)
        for name, (center, error) in zip(("o", "dq", "dk", "dv"), [(o, eo), *grads], strict=True)
    }


# --- optimizers ------------------------------------------------------------------------------------------------------


def adamw(
    p: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    t: int,
    what: Values,
    *,
    fault: Collection[str] = (),
    stale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step in float64: parameter, both moments, and the error that fp32 may make of the parameter."""
    lr, (b1, b2) = float(what.get("lr", 1e-3)), what.get("betas", (0.9, 0.999))
    eps, decay = float(what.get("eps", 1e-8)), float(what.get("weight_decay", 0.01))
    g = gradient if stale is None else stale
    if "betas swapped" in fault or "betas of moments swapped" in fault:
        b1, b2 = b2, b1
    if "decay coupled" in fault:
        g, decay = g + decay * p, 0.0
    counts = {"step one late": t - 1, "step one early": t + 1, "step stays 1": 1, "step counted twice": 2 * t}
    t = next((count for name, count in counts.items() if name in fault), t)
    g = g.clamp(-1, 1) if "clipped" in fault else g
    g = g / max(float(g.norm()), 1.0) if "clipped norm" in fault else g
    kept = 1 - (decay if "decay without lr" in fault else lr * decay)
    kept = 1.0 if "no decay" in fault else kept
    kept = 1 - lr * decay / (1 - b1**t) if "decay corrected" in fault and b1**t < 1 else kept
    kept = float(torch.tensor(kept).bfloat16()) if "decay factor rounded" in fault else kept
    old_m, old_v = m, v
    begins = "moments begin as the gradient" in fault and t == 1
    m = g if begins else b1 * m + (1 - b1) * g if "momentum undamped" not in fault else b1 * m + g
    v = g * g if begins else b2 * v + (1 - b2) * (g.abs() if "gradient not squared" in fault else g * g)
    new = m, v
    m, v = (old_m, old_v) if "moments of the step before" in fault else new
    m = m.float().bfloat16().double() if "first moment rounded" in fault else m
    v = v.float().bfloat16().double() if "second moment rounded" in fault else v
    c1, c2 = (1 - beta**t for beta in ((b1, b2) if "betas of moments swapped" not in fault else (b2, b1)))
    c1 = 1 - b2**t if "first correction of beta2" in fault else c1
    c2 = 1 - b1**t if "second correction of beta1" in fault else c2
    c1 = 1.0 if "no bias correction" in fault or "first moment uncorrected" in fault else c1
    c2 = 1.0 if "no bias correction" in fault or "second moment uncorrected" in fault else c2
    c1, c2 = (1 / c1, 1 / c2) if "corrections multiply" in fault and c1 and c2 else (c1, c2)
    hat = v / c2 if c2 else v * math.inf
    root = (hat + eps).sqrt() if "eps under the root" in fault else hat.sqrt() + eps
    if "eps corrected too" in fault:
        root = v.sqrt() * (1 / math.sqrt(c2) if c2 else math.inf) + eps / (math.sqrt(c2) if c2 else 1)
    root = hat if "no root" in fault else torch.ones_like(hat) if "no second moment" in fault else root
    direction = m / c1 if c1 else m * math.inf
    direction = direction.sign() if "sign of the first moment" in fault else direction
    direction = -direction if "sign" in fault else direction
    if "nesterov" in fault:
        direction = (b1 * m + (1 - b1) * g) / c1
    step = lr * direction / root
    behind = (p * kept).float().bfloat16().double() if "decay rounded" in fault else p * kept
    after = (p - step) * kept if "decay after the step" in fault else behind - step
    # a moment is a chain of roundings, the update a dozen, the parameter three
    error = 4 * U32 * p.abs() + (16 + 8 * t) * U32 * lr * (m.abs() + abs(1 - b1) * g.abs()) / c1 / root if c1 else after
    return after, *(new if "moments of the step before" in fault else (m, v)), error


def optimizer_allowed(
    inputs: Values, what: Values, *, fault: Collection[str] = (), moments: tuple[str | None, str | None] | None = None
) -> dict[str, Allowed]:
    """The parameter after each of some steps; inputs: parameter, and grads (steps, ...).

    moments: how the first and the second are kept; None: as was told.
    """
    p, dtype = inputs["parameter"].double(), inputs["parameter"].dtype
    m, v, wide = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    dm, dv = torch.zeros_like(p), torch.zeros_like(p)  # how far another rounding may bring a stored moment
    told = str(what.get("moments", "float32"))
    told = {"float32": "fp32", "bfloat16": "bf16"}.get(told, told)
    names = (told, told) if moments is None else tuple(told if name is None else name for name in moments)
    u, (b1, b2), lr = torch.finfo(dtype).eps / 2, what.get("betas", (0.9, 0.999)), float(what.get("lr", 1e-3))
    steps = []
    for t, g in enumerate(inputs["grad"].double(), start=1):
        stale = inputs["grad"][t - 2].double() if "gradient of the step before" in fault and t > 1 else None
        stale = inputs["grad"][:t].double().sum(0) if "gradients add up" in fault else stale
        kept = m * b1 / (1 - b1)
        was = p, m, v
        p, m, v, error = adamw(p, g, m, v, t, what, fault=fault, stale=stale)
        if "zero gradients skipped" in fault:
            p, m, v = (torch.where(g == 0, old, new) for old, new in zip(was, (p, m, v), strict=True))
        if names != ("fp32", "fp32"):
            # a sum that cancels keeps the roundings of its terms
            dm, dv = b1 * dm + 8 * U32 * (1 - b1) * (g.abs() + kept.abs()), b2 * dv
            share = torch.where(dv < v, dv / torch.where(v > 0, v, 1.0), torch.where(dv > 0, math.inf, 0.0))
            root = (v / (1 - b2**t)).sqrt() + float(what.get("eps", 1e-8))
            step, moved = lr * m.abs() / (1 - b1**t) / root, lr * dm / (1 - b1**t) / root
            error = error + ((step + moved) * share).nan_to_num(0.0, posinf=math.inf) + moved
            (m, dm), (v, dv) = _held(names[0], m, dm, False), _held(names[1], v, dv, True)
        if "moments forgotten" in fault:
            m, v = torch.zeros_like(p), torch.zeros_like(p)
        wide = wide + error + (0.0 if dtype == torch.float32 else 1.01 * u * p.abs())
        steps.append(between(p, wide, dtype))
        p = p.to(dtype).double() if dtype != torch.float32 else p
    low, high, exact = (torch.stack([getattr(one, end) for one in steps]) for end in ("low", "high", "exact"))
    return {"parameter": Allowed(low, high, (dtype,), exact=exact)}


def _held(name: str, moment: Tensor, off: Tensor, positive: bool) -> tuple[Tensor, Tensor]:
    """A moment out of its storage, and how far it moves if what is stored moves by `off` and a few roundings."""
    from ottava.optim.storage import STORAGES

    if name == "fp32":
        return moment, off
    need_known("", "moments", name, STORAGES)
    storage = STORAGES[name]
    # neighbours in turn, and large numbers against small ones: the ends of a group set its grid
    turn = torch.where(torch.arange(moment.numel(), device=moment.device).view(moment.shape) % 2 == 0, 1.0, -1.0)
    ends = torch.where(moment.abs() > moment.abs().median(), 1.0, -1.0)
    read = []
    small = 64 * U32 * moment.abs()  # alone, too: what moves a group's ends moves its grid
    away = [(way * sign, by) for sign in (turn, ends * moment.sign()) for way in (1, -1) for by in (small, small + off)]
    for sign, by in [(turn, 0 * small), *away]:
        x = (moment + sign * by).float()
        held = storage.empty(x)
        storage.write([held], [x.clamp(min=0) if positive else x], positive=positive)
        read.append(storage.read([held], positive=positive)[0].double().view(moment.shape))
        if "_exponent" in held:  # the exponent of a group, and so all of its grid, hangs on its smallest number
            return read[0], _half_steps(moment, held, storage.groups["_exponent"]) * 2 * (moment.abs() + off) + off
    moved = torch.stack([(one - read[0]).abs() for one in read]).amax(0)
    return read[0], 1.1 * moved + 64 * U32 * read[0].abs()  # a power in fp32 is off by some units


def _half_steps(moment: Tensor, held: Mapping[str, Tensor], size: int) -> Tensor:
    """How far, as a share of it, a number may be from what a grid of E4M3 under a power reads, see `optim.storage`.

    A power x ** (e / 16) lies half a step from its code: 2**-4 of it, and 2**-10 where it is subnormal.
    """

    def each(name: str) -> Tensor:
        return held[name].double().view(-1).repeat_interleave(size)[: moment.numel()].view(moment.shape)

    exponent, center = (each("_exponent") - 1).clamp(min=1) / 16, each("_center")
    raised = (moment.abs() / torch.where(center == 0, 1.0, center)) ** exponent
    half = (2.0**-10 / torch.where(raised == 0, 1.0, raised)).clamp(2.0**-4, 0.75)
    return (1 - half) ** (-1 / exponent) - 1


def expect(kind: str, inputs: Values, what: Values, got: Values | None = None, **way: Any) -> dict[str, Allowed]:
    """What each result of a call may be; knobs in `way` make it the result of a faulty kernel."""
    if kind == "cast":
        return cast_allowed(inputs, what, got, **way)
    made: Mapping[str, Callable[..., dict[str, Allowed]]] = {
        "encode": lambda inputs, what, **way: {"codes": encode_allowed(inputs["x"], what, **way)},
        "decode": lambda inputs, what, **way: {"values": decode_allowed(inputs["codes"], what, **way)},
        "gemm": gemm_allowed,
        "grouped": grouped_allowed,
        "linear": linear_allowed,
        "attention": attention_allowed,
        "optimizer": optimizer_allowed,
    }
    return made[kind](inputs, what, **way)


def result_format(kind: str, name: str, what: Values) -> Format | None:
    """The format of a result that is codes."""
    if (kind, name) == ("encode", "codes"):
        return get_format(what.get("format", "e4m3"))
    spec = cast_spec(what) if kind == "cast" else None
    if spec is None:
        return None
    return spec.format if name == "data" else E8M0 if spec.scale_format.startswith("e8m0") else None
