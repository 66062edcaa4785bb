"""Why two sides multiply other numbers at one layer: one hypothesis after the other, until one gives the stored bits.

A hypothesis is a transformation of what training multiplied: other rounding, a clamp, bits of another format, scales in
another order. It counts if it makes the stored codes, all of them but one in a thousand (ties of one FP32 rounding).
The order matters: what explains codes and scales comes before what explains one of them, and "stale" is what is left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from functools import partial
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor

from ottava.numerics.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Format
from ottava.numerics.rounding import code_values, encode, round_to_format
from ottava.numerics.scaling import PER_TENSOR
from ottava.numerics.tensor import QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.serving.engines import Decision, units
from ottava.serving.formula import Cause
from ottava.serving.sides import Model, Side
from ottava.serving.source import same_numbers
from ottava.weights.layouts import REGEX
from ottava.weights.parameter import powers_only

CAUSES = MappingProxyType(
    {
        "unread": "the engine does not read this layout, or reads it wrong",
        "formula": "a field of config.json is another one than in training, and changes what is computed",
        "unknown": "not certified: a field, a setting or a row of the receipt that no rule reads",
        "parts": "the config leaves some of the linears in BF16 that the engine joins: it does not load them",
        "missing": "one side lacks the tensor, or has another shape",
        "regex-dot": "a dot in a regular expression matches any character, and so a linear that was not meant",
        "substring": "a pattern matches in the middle of a longer name",
        "ignored": "training cast it, and the engine runs it in BF16",
        "unscaled": "the engine expects codes, and the checkpoint has none: no scale beside the weight",
        "router": "training left the router in BF16, and the engine casts it",
        "head": "training left the output head in BF16, and the engine casts it",
        "extra": "training left it in BF16, and the engine casts it",
        "format": "the codes are of another number format",
        "granularity": "a scale is for other blocks than in training",
        "reciprocal": "the stored scale quantizes, and the engine expects the one that dequantizes",
        "scale-layout": "the scales are those of training in another order",
        "misread": "the bits are codes of another format, or in another order, than the one they are read as",
        "scale-format": "the scales are rounded to another format: powers of two, or BF16",
        "master": "one side casts the FP32 master, the other its rounding to BF16",
        "joined-scale": "the engine joins linears that had a scale each, and rounds their codes a second time",
        "scales": "the scales are other numbers than in training, and the codes are those of training or fit them",
        "clamp": "the codes end before the largest number of their format",
        "rounding": "the codes are rounded by another rule",
        "swapped": "the numbers are those of another tensor",
        "transposed": "the numbers are those of the transposed weight",
        "rows": "the rows are those of training in another order",
        "stale": "the numbers are not those of the trained weight: of another step, or changed after training",
        "device": "on this device the engine casts no activations, and multiplies in BF16",
        "decoded": "the engine decodes codes to BF16, which rounds their products with the scales",
        "activation-granularity": "activations have scales for other elements than in training",
        "activation-scale": "the static scale of activations is another one than in training, or missing",
        "activation-format": "scales of activations are powers of two on one side only",
        "activation-rounding": "the engine casts a fused activation without its rounding to BF16",
        "activation-arithmetic": "the engine computes scales of activations in BF16, or by a rule of its own",
        "executed": "the engine ran, and multiplied other numbers than its rules say: they are not certified",
        "tied": "head and embedding are one tensor on one side only",
        "plain": "a tensor in high precision differs after rounding to BF16",
        "kv-cache": "the engine caches keys and values in FP8, and training attended to them in high precision",
        "not-fp8": "the recipe casts it, and by its receipt training ran it in high precision",
    }
)
"""Cause -> what it means. In the order in which causes of one layer are named."""

_PROBE = 64  # rows
_SAME = 1e-6  # of two fp32 roundings of one quotient
ROUTER = re.compile(r"(^|\.)(router|gate|gating|shared_expert_gate)$")
HEAD = re.compile(r"(^|\.)(lm_head|output|head|embed_out|score|classifier)$")


def layer_set(name: str, side: Side, there: Side, decision: Decision) -> Cause | None:
    """(cause, what was found) if the two sides do not cast the same linears; `there` is the engine's."""
    if decision.refused:
        return "parts", decision.refused
    cast = decision.quantized and there.cast is not None
    if side.cast is not None and not decision.quantized:
        how = f"pattern {decision.pattern!r} matches by {decision.rule}" if decision.pattern else decision.rule
        cause = _pattern_cause(name, decision)
        return cause, f"trained as {side}, served in BF16: {how or 'no scale beside it'}"
    if side.cast is not None and not cast:
        return "unscaled", f"trained as {side}; the engine expects codes, and the checkpoint has {there.weight.dtype}"
    if side.cast is None and (cast or there.codes or (decision.quantized and there.activations is not None)):
        kind = "router" if ROUTER.search(name) else "head" if HEAD.search(name) else "extra"
        return kind, f"trained in BF16, served as {there}"
    return None


def _pattern_cause(name: str, decision: Decision) -> str:
    pattern = decision.pattern
    rule, _, against = decision.rule.partition(", against ")
    if pattern in ("", name, against) or rule == "within":
        return "ignored"
    body = pattern.removeprefix(REGEX)
    if pattern.startswith(REGEX) or rule == "bounded":
        literal = re.sub(r"(?<!\\)\.(?![*+?{])", r"\\.", body)
        if literal != body and re.match(literal, against) is None and re.match(body, against) is not None:
            return "regex-dot"
    else:
        body = translate(body.rstrip("*."))[4:-3]  # without (?s: and )\Z
    core = re.sub(r"((?<!\\)(\\?\.[*+]?[?+]?|\$))+$", "", body)  # what follows it is anything
    if not f"{name}.".startswith(f"{against}."):  # of linears that are joined: nobody means the end of such a name
        core = re.sub(r"^\^?\.\*[?+]?(\\\.)?", "", core)
    return "ignored" if _whole(core, against) else "substring"


def _whole(pattern: str, name: str) -> bool:
    """Whether a regular expression matches whole words of a name."""
    words = name.split(".")
    return any(re.fullmatch(pattern, ".".join(words[i:j])) for j in range(len(words) + 1) for i in range(j + 1))


def gap(ours: Tensor, theirs: Tensor | None) -> Cause:
    """(cause, what was found) of a tensor that the checkpoint lacks, or has in another shape."""
    there = "" if theirs is None else f"trained as {tuple(ours.shape)}, the checkpoint has {tuple(theirs.shape)}"
    return "missing", there or "the checkpoint lacks it"


_MATCH = 0.999  # of codes: ties of a quotient in fp32 may fall either way
_ROWS = 64  # that are looked at, spread over the matrix
_FAR, _CAST = 0.5, 0.25  # relative distance of another weight, and of a cast to at least four bits
_CHANGED = 0.9  # of the codes that are not those of training
_STEP = 0.5  # of its norm a weight moves at most, and of its lines at least that share moves both ways
_DRAWN = 0.1  # stochastic rounding leaves 1/6 between a number and the midpoint; a small step of training far less


def weight_cause(name: str, side: Side, there: Side, model: Model, stored: Model) -> Cause | None:
    """(cause, what was found) if the operands are other numbers; both sides cast the linear."""
    ours, theirs = side.cast, there.cast
    assert ours is not None
    assert theirs is not None
    if ours.data.shape != theirs.data.shape:
        return gap(ours.data, theirs.data)
    own, other = ours.spec.format, theirs.spec.format
    if own != other:
        cause = "misread" if _equal(ours.data, theirs.data) else "format"
        return cause, f"trained in {own.name}, served in {other.name}" + (", bit for bit" if cause == "misread" else "")
    if same_numbers(ours, theirs):
        if torch.equal(side.operand(), operand := there.operand()):
            return None
        share = float((side.operand() != operand).double().mean())
        return "decoded", f"codes and scales are those of training; in BF16 {share:.1%} of their products are others"
    same_codes = _equal(ours.data, theirs.data)
    if ours.scale_inv.shape != theirs.scale_inv.shape:
        if ours.scale_inv.numel() == theirs.scale_inv.numel() and same_codes:
            return "scale-layout", f"a grid {tuple(theirs.scale_inv.shape)} instead of {tuple(ours.scale_inv.shape)}"
        if ours.spec.scale_format == "e4m3" and (found := _one_tensor(name, ours, theirs, model)):
            return found
        return "granularity", f"trained as {side}, served as {there}"
    if same_codes and (found := _of_scales(ours.scale_inv, theirs.scale_inv, own.max)):
        return found
    return next(_of_codes(name, side, theirs, model, stored))


def _one_tensor(name: str, ours: QuantizedTensor, theirs: QuantizedTensor, model: Model) -> Cause | None:
    """Whether NVFP4's scale of the tensor is that of all linears that the engine joins; its rows are finer blocks."""
    group = next((parts for parts in units(model.linears).values() if name in parts), [name])
    weights = [model.linears[part].weight.bfloat16() for part in group]
    whole = quantize(torch.cat(weights), replace(ours.spec, scaling="current")).dequantize(torch.float32)
    start = sum(len(weights[i]) for i in range(group.index(name)))
    if len(group) == 1 or not torch.equal(whole[start : start + theirs.shape[0]], theirs.dequantize(torch.float32)):
        return None
    return "joined-scale", f"the engine joins {', '.join(part.rpartition('.')[2] for part in group)}, in NVFP4"


def _of_scales(ours: Tensor, theirs: Tensor, top: float) -> Cause | None:
    """Why scales differ under equal codes."""
    if torch.allclose(theirs, ours.reciprocal(), rtol=_SAME, atol=0):
        a, b = float(theirs.reshape(-1)[0]), float(ours.reshape(-1)[0])
        return "reciprocal", f"{a:.6g} is stored, {b:.6g} dequantizes"
    if torch.equal(theirs.reshape(-1).sort().values, ours.reshape(-1).sort().values):
        turned = torch.equal(theirs.reshape(-1), ours.t().reshape(-1))
        return "scale-layout", "the grid is stored transposed" if turned else "the same scales in another order"
    return _fewer_bits(ours, theirs, top)


def _fewer_bits(ours: Tensor, theirs: Tensor, top: float) -> Cause | None:
    """Whether scales are those of training in fewer bits: they, their inverses, or the largest numbers."""
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e8m0fnu):
        for a, b in ((theirs, ours), (theirs * top, ours * top), (1 / theirs, 1 / ours)):
            if not torch.equal(ours, theirs) and torch.allclose(a, b.to(dtype).float(), rtol=_SAME, atol=0):
                return "scale-format", f"the fp32 scales are rounded to {str(dtype).removeprefix('torch.')}"
    return None


def _of_codes(name: str, side: Side, theirs: QuantizedTensor, model: Model, stored: Model) -> Iterator[Cause]:
    """Why codes differ, for a checkpoint that casts the same blocks: each hypothesis that holds, the last always."""
    ours = side.cast
    assert ours is not None
    spec = replace(ours.spec, scaling="current")
    group = next((parts for parts in units(model.linears).values() if name in parts), [name])
    away = _distance(theirs, side.weight)  # rounded twice: half a unit of E4M3's three bits, twice
    if spec.granularity == PER_TENSOR and _joined(group, model, stored) and away < 2 * 2.0**-4:
        yield "joined-scale", f"the engine joins {', '.join(part.rpartition('.')[2] for part in group)}"
    before, after = powers_only(ours.scale_inv), powers_only(theirs.scale_inv)
    other = replace(spec, scale_format="pow2" if after and not before else "fp32")
    if _equal(ours.data, theirs.data):
        ratio = (theirs.scale_inv / ours.scale_inv).aminmax()
        yield "scales", f"{float(ratio[0]):.4g} to {float(ratio[1]):.4g} times those of training, for equal codes"
    both = ((side.weight.bfloat16(), "bf16(master)"), (side.weight.float(), "the FP32 master"))
    masters = both[: 1 + (side.weight.dtype != torch.bfloat16)]
    if before != after and _is(theirs, quantize(ours.dequantize(torch.float32), other)):
        yield "scale-format", f"{_formats(after)}; the codes of training were cast again"
    for tensor, what in masters:
        if _is(theirs, quantize(tensor, spec)):
            yield "master", f"the checkpoint has codes of {what}, training multiplied codes of the other"
        if before != after and _is(theirs, quantize(tensor, other)):
            yield "scale-format", _formats(after)
    others = ((found, one.cast.data) for found, one in model.linears.items() if one.cast is not None)
    yield from _elsewhere(name, ours.data, theirs.data, others)
    heads = [int(model.config.get(key) or 1) for key in ("num_attention_heads", "num_key_value_heads")]
    yield from _rearranged(ours, theirs, masters[0][0], heads)
    joined = [one.cast.scale_inv for part in group if (one := model.linears[part]).cast is not None]
    for found in _of_rounding(ours, theirs, [tensor for tensor, _ in masters]):
        yield found if found[0] != "scales" else _pooled(ours, theirs, joined) or found
    if _of_master(theirs, side.weight):
        yield "master", "each code is that of a number which BF16 rounds to the trained weight, as its FP32 master is"
    for where, one in model.linears.items() if away > _FAR else ():
        if where != name and one.weight.shape == side.weight.shape and _distance(theirs, one.weight) < _CAST:
            yield "swapped", f"the numbers of {where}"
    own = _distance(ours, side.weight)
    yield "stale", f"decoded, they are {away:.2%} away from the trained weight; its own cast is {own:.2%}"


def _elsewhere(name: str, ours: Tensor, theirs: Tensor, others: Iterable[tuple[str, Tensor]]) -> Iterator[Cause]:
    """Whether codes or numbers of a tensor are those of another, of its transpose, or its rows in another order."""
    for found, one in others:
        if found != name and one.shape == theirs.shape and _equal(one[:1], theirs[:1]) and _equal(one, theirs):
            yield "swapped", f"the numbers of {found}"
    if ours.ndim == 2 and ours.shape[0] == ours.shape[1] and _equal(ours.t(), theirs):
        yield "transposed", "those of W.T, and the matrix is square"
    if _bits(ours).sum() == _bits(theirs).sum() and _row_set(ours) == _row_set(theirs):
        yield "rows", "the same rows in another order"


def _rearranged(
    ours: QuantizedTensor, theirs: QuantizedTensor, weight: Tensor, heads: Sequence[int]
) -> Iterator[Cause]:
    """Whether the stored codes are those of the weight, or its codes, with rows, columns or blocks in other places."""
    codes, values = theirs.data.view(torch.uint8).cpu(), code_values(theirs.spec.format)
    if not bool((theirs.scale_inv > 0).all()):
        return
    grid = theirs.spec.granularity.expand(theirs.scale_inv.float().cpu(), (weight.shape[0], weight.shape[1]))
    base = values[ours.data.view(torch.uint8).int().cpu()]
    for cause, said, turn in _arrangements(weight.shape, heads):
        if _equal(turn(ours.data.view(torch.uint8)), codes):
            yield cause, said
        if _made(round_to_format(turn(weight.float().cpu()) / grid, theirs.spec.format), values[codes.int()], base):
            yield cause, f"{said}, and cast anew"


def _arrangements(shape: Sequence[int], heads: Sequence[int]) -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    """(cause, in words, how a matrix is rearranged)."""
    rows, columns = shape
    if rows == columns:
        yield "transposed", "those of W.T, and the matrix is square", Tensor.t
    for size in (128, 32):
        if not rows % size and not columns % size:
            tiles = partial(_in_tiles, size=size)
            yield "transposed", f"each block of {size} x {size} is transposed", tiles
    for n in dict.fromkeys((1, *heads)):
        if not rows % (2 * n):
            where = "rows of the matrix" if n == 1 else f"rows of each of {n} heads"
            yield "rows", f"{where}: halves are exchanged", partial(_flipped, axis=0, sizes=(n, 2, -1), inner=1)
            yield "rows", f"{where}: halves are interleaved", partial(_crossed, sizes=(n, 2, -1))
            yield "rows", f"{where}: pairs are taken apart into halves", partial(_crossed, sizes=(n, -1, 2))
    for n, (axis, name) in product((2, 4), ((1, "columns"), (0, "rows"))):
        if not shape[axis] % n:
            yield (
                "rows",
                f"{n} parts of the {name} are in reverse",
                partial(_flipped, axis=axis, sizes=(n, -1), inner=0),
            )


def _flipped(x: Tensor, axis: int, sizes: tuple[int, ...], inner: int) -> Tensor:
    made: Tensor = x.unflatten(axis, sizes).flip(axis + inner)
    return made.flatten(axis, axis + len(sizes) - 1)


def _crossed(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    made: Tensor = x.unflatten(0, sizes).transpose(1, 2)
    return made.flatten(0, 2)


def _in_tiles(x: Tensor, size: int) -> Tensor:
    parts: Tensor = x.unflatten(1, (-1, size)).unflatten(0, (-1, size))  # rows / size, size, columns / size, size
    return parts.transpose(1, 3).flatten(2).flatten(0, 1)


def _pooled(ours: QuantizedTensor, theirs: QuantizedTensor, joined: Sequence[Tensor]) -> Cause | None:
    """What scales are those of more elements, or of fewer octaves, than training's."""
    a, b = (one.scale_inv.float().cpu() for one in (ours, theirs))
    top = torch.stack([one.float().cpu().broadcast_to(a.shape) for one in joined if one.shape == a.shape]).amax(0)
    if len(joined) > 1 and torch.allclose(b, top, rtol=_SAME, atol=0):
        return "joined-scale", "each block has the largest scale of the linears that the engine joins"
    for axes, said in (((0,), "a column of blocks"), ((1,), "a row of blocks"), ((0, 1), "the tensor")):
        if a.ndim == 2 and torch.allclose(b, a.amax(axes, keepdim=True).expand_as(b), rtol=_SAME, atol=0):
            return "granularity", f"one scale for {said}, in the grid of the blocks"
    ratio = b / a
    if powers_only(b) and set(ratio.unique().tolist()) <= {0.5, 1.0}:
        return "scale-format", "powers of two are rounded down, and codes of large numbers clip"
    share = float((ratio < 1 - _SAME).double().mean())
    if share and bool(theirs.dequantize(torch.float32).abs().amax() < ours.dequantize(torch.float32).abs().amax()):
        return "clamp", f"{share:.1%} of the scales are too small, and codes of large numbers clip"
    return None


def _of_master(theirs: QuantizedTensor, weight: Tensor) -> bool:
    """Whether a BF16 weight may come from a master of these codes: each casts a number that rounds to it."""
    numbers = weight.double().cpu()
    if not torch.equal(weight.float(), weight.bfloat16().float()) or not bool((theirs.scale_inv > 0).all()):
        return False
    grid = theirs.spec.granularity.expand(theirs.scale_inv.double().cpu(), (weight.shape[0], weight.shape[1]))
    half = numbers.abs() * 2.0**-8  # at most: half a step of BF16
    low, high = (round_to_format(((numbers + way) / grid).float(), theirs.spec.format) for way in (-half, half))
    got = code_values(theirs.spec.format)[theirs.data.view(torch.uint8).int().cpu()]
    return got.shape == low.shape and bool(((low <= got) & (got <= high)).all())


def _formats(powers: bool) -> str:
    sides = ("fp32 scales", "powers of two") if powers else ("powers of two", "fp32 scales")
    return f"{sides[0]} in training, {sides[1]} in the checkpoint"


def _of_rounding(ours: QuantizedTensor, theirs: QuantizedTensor, masters: Sequence[Tensor]) -> Iterator[Cause]:
    """What makes the stored codes of the trained weight: other scales, rounding, a clamp, bits of another format."""
    fmt, shape, size = ours.spec.format, (ours.shape[0], ours.shape[1]), ours.spec.granularity
    values = code_values(fmt)
    got, base = (values[cast.data.view(torch.uint8).int().cpu()] for cast in (theirs, ours))
    top = float(got.abs().nan_to_num(0).max())
    changed = (got != base).any(1).nonzero()[:, 0]  # no sample of all rows: few may have changed
    changed = changed if len(changed) else torch.arange(shape[0])
    some = changed[:: max(1, len(changed) // _ROWS)]
    got, base = got[some], base[some]
    moved = not torch.equal(theirs.scale_inv, ours.scale_inv)
    grids = [size.expand(grid.double().cpu(), shape).broadcast_to(shape)[some]
             for grid in (theirs.scale_inv, ours.scale_inv)[: 1 + moved] if bool((grid > 0).all())]  # fmt: skip
    for exact, grid in ((master.cpu()[some].double(), grid) for grid in grids for master in masters):
        scaled = exact / grid
        nearest = round_to_format(scaled.float(), fmt)
        if moved and _made(nearest, got, base):
            yield _other_scales(ours.scale_inv, theirs.scale_inv, fmt)
        if top < fmt.max and _made(nearest.clamp(-top, top), got, base):
            yield "clamp", f"the codes are those of training, clamped at {top:g}"
        below, above = _neighbours(scaled, values)
        share = ((scaled - below) / (above - below)).nan_to_num(0)
        for said, low in (
            ("toward zero", scaled > 0),
            ("away from zero", scaled < 0),
            ("down", scaled == scaled),
            ("up", scaled != scaled),
            ("to nearest, ties away from zero", torch.where(share == 0.5, scaled < 0, share < 0.5)),
            ("to nearest, ties toward zero", torch.where(share == 0.5, scaled > 0, share < 0.5)),
        ):
            if _made(torch.where(low, below, above), got, base):
                yield "rounding", f"the codes are rounded {said}"
        normal = torch.where(nearest.abs() < fmt.min_normal, 0, nearest)
        if _made(normal, got, base):
            yield "rounding", f"codes below {fmt.min_normal:g}, the least normal number, are zeros"
        for dtype, twice in _twice(exact, grid):
            if _made(round_to_format(twice.float(), fmt), got, base):
                said = f"the codes are rounded twice, first to {str(dtype).removeprefix('torch.')}"
                yield _fewer_bits(ours.scale_inv, theirs.scale_inv, fmt.max) or ("rounding", said)
        drawn = (got != nearest) & (above > below)
        by_chance = bool(drawn.any()) and float((share[drawn] - 0.5).abs().mean()) > _DRAWN
        if by_chance and _made(torch.where(got == above, above, below), got, base):
            yield "rounding", f"{float(drawn.double().mean()):.1%} of the codes are rounded by chance"
    yield from _misread(ours, theirs, masters)


def _twice(x: Tensor, grid: Tensor) -> Iterator[tuple[torch.dtype, Tensor]]:
    """(dtype, quotient): a part of it, or all, has been rounded to fewer bits before codes are made of it; fp64."""
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn):
        scale, factor, weight = (one.float().to(dtype).double() for one in (grid, 1 / grid, x))
        for one in (x / grid, x / scale, x * factor, weight / grid):
            yield from ((dtype, one), (dtype, one.float().to(dtype).double()))


def _misread(ours: QuantizedTensor, theirs: QuantizedTensor, masters: Sequence[Tensor]) -> Iterator[Cause]:
    fmt, shape, size = ours.spec.format, (ours.shape[0], ours.shape[1]), ours.spec.granularity
    bits, base = (cast.data.view(torch.uint8).cpu() for cast in (theirs, ours))
    yield from (("misread", said) for said, one in _bytes(base, fmt.bits) if _made(one, bits, base))
    for other in (one for one in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ) if one != fmt and fmt.bits == 8):
        for grid in (theirs.scale_inv, ours.scale_inv, ours.scale_inv * fmt.max / other.max):
            for master in masters:
                scaled = master.float().cpu() / size.expand(grid.float().cpu(), shape)
                if _made(encode(scaled, other).view(torch.uint8), bits, base):
                    yield "misread", f"the bits are codes of {other.name}, and are read as {fmt.name}"


def _bytes(codes: Tensor, bits: int) -> Iterator[tuple[str, Tensor]]:
    """What may become of codes that are copied as bytes."""
    sign = 1 << (bits - 1)
    yield (
        "negative codes are in two's complement",
        torch.where(codes > sign, (3 * sign - codes.int()).to(torch.uint8), codes),
    )
    yield "codes have lost their signs", codes & (sign - 1)
    yield "codes have the other sign", codes ^ sign
    yield "codes are one step too large", codes + 1
    yield "codes are one step too small", codes - 1
    if bits == 8:
        yield "the halves of each byte are swapped", (codes << 4) | (codes >> 4)
    if codes.shape[1] % 2 == 0:
        said = "each two bytes are swapped" if bits == 8 else "the two codes of each byte are swapped"
        yield said, codes.unflatten(1, (-1, 2)).flip(2).flatten(1)


def _made(candidate: Tensor, got: Tensor, base: Tensor) -> bool:
    """Whether a hypothesis makes the codes, and also most of those that differ from training's."""
    same, other = candidate == got, got != base
    return float(same.double().mean()) >= _MATCH and float(same[other].double().mean()) >= _CHANGED


def _neighbours(x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of a format that is at most x, and the smallest one that is at least x; fp32."""
    grid = values[values.isfinite()].unique()
    x = x.clamp(float(grid[0]), float(grid[-1]))
    above = torch.searchsorted(grid.double(), x).clamp(max=len(grid) - 1)
    exact = grid.double()[above] == x
    return grid[torch.where(exact, above, (above - 1).clamp(min=0))], grid[above]


def _other_scales(ours: Tensor, theirs: Tensor, fmt: Format) -> Cause:
    """What the stored scales are, under which the codes are the cast of the trained weight."""
    low, high = (float(one) for one in (theirs / ours).aminmax())
    if powers_only(theirs) != powers_only(ours):
        return "scale-format", _formats(powers_only(theirs))
    if found := _fewer_bits(ours, theirs, fmt.max):
        return found
    if max(abs(low * E4M3FNUZ.max / fmt.max - 1), abs(high * E4M3FNUZ.max / fmt.max - 1)) < 2 * _SAME:
        return "clamp", f"scales put the largest number at {E4M3FNUZ.max:g} instead of {fmt.max:g}"
    return "scales", f"{low:.4g} to {high:.4g} times those of training, and the codes fit them"


def _joined(group: Sequence[str], model: Model, stored: Model) -> bool:
    """Whether linears that the engine joins have one scale there, where training had one for each."""

    def scales(side: Model) -> set[float]:
        casts = [side.linears[part].cast if part in side.linears else None for part in group]
        return {float("nan") if cast is None else float(cast.scale_inv.max()) for cast in casts}

    return len(scales(stored)) == 1 and len(scales(model)) > 1


def _distance(cast: QuantizedTensor, weight: Tensor) -> float:
    exact = weight.float()
    return float((cast.dequantize(torch.float32) - exact).norm() / exact.norm().clamp_min(1e-30))


def _bits(codes: Tensor) -> Tensor:
    """The bytes of codes, or of numbers in BF16, with 0 for -0."""
    if codes.dtype.itemsize > 1 and codes.is_floating_point():
        return (codes.cpu().bfloat16() + 0).contiguous().view(torch.uint8)
    bits = codes.cpu().contiguous().view(torch.uint8)
    return torch.where(bits == (8 if codes.dtype == torch.uint8 else 128), 0, bits)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _is(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    return torch.equal(one.scale_inv.cpu(), other.scale_inv.cpu()) and _equal(one.data, other.data)


def _row_set(codes: Tensor) -> list[bytes]:
    return sorted(bytes(row) for row in _bits(codes).reshape(len(codes), -1).numpy())


def activation_cause(side: Side, there: Side) -> Cause | None:
    """(cause, what was found) if the input of a linear is cast in another way; both sides cast the weight.

    What their descriptions do not tell apart, a batch of hard numbers does.
    """
    ours, theirs = side.activations, there.activations
    theirs = None if there.arithmetic.inputs == "none" else theirs
    if ours is not None and theirs is None and there.arithmetic.device:
        return "device", f"trained with {ours}, served with BF16: on this device the engine casts no activations"
    if ours is None or theirs is None:
        said = f"trained with {ours or 'BF16'}, served with {theirs or 'BF16'}"
        return None if ours is theirs else ("activation-granularity", said)
    said = f"trained with {ours}, served with {theirs}"
    if ours.granularity != theirs.granularity:
        return "activation-granularity", said
    if ours.static != theirs.static or (ours.static and ours.scale_inv != theirs.scale_inv):
        return "activation-scale", said
    if ours.powers != theirs.powers:
        return "activation-format", said
    if ours.rounded != theirs.rounded:
        return "activation-rounding", "training rounds the activation to BF16 before its cast, the engine does not"
    probe = _probe(side.weight.shape[1])
    if there.arithmetic.inputs != "fp32" and not torch.equal(x := side.rows(probe), y := there.rows(probe)):
        share = float((x != y).double().mean())
        return "activation-arithmetic", f"of hard numbers {share:.2%} become others: {said}, by another arithmetic"
    return None


def _probe(width: int) -> Tensor:
    """Rows of bf16 in which rules of scales part: random ones, and each of BF16's 128 fractions as the largest number
    of a block above numbers of all sizes."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(_PROBE, width, generator=generator)
    wide = torch.exp2(-24 * torch.rand(128, width, generator=generator)) * plain.sign().repeat(2, 1)
    wide[:, ::16] = 1 + torch.arange(128)[:, None] / 128
    return torch.cat([plain, wide]).bfloat16()


def plain_causes(ours: Model, theirs: Model) -> Mapping[str, tuple[str, str]]:
    """Module or tensor -> (cause, what was found), for tensors in high precision."""
    found: dict[str, tuple[str, str]] = {}
    embedding = next((name for name in ours.plain if name.endswith(("embed_tokens.weight", "wte.weight"))), "")
    for name, tensor in ours.plain.items():
        if (other := theirs.plain.get(name)) is None or other.shape != tensor.shape:
            found[name] = gap(tensor, other)
        elif cause := number_cause(name, tensor, other, ours.plain.items()):
            found[name] = cause
    if ours.tied != theirs.tied and embedding in theirs.plain:
        head = theirs.plain[embedding] if theirs.tied else _head(theirs)
        trained = ours.plain[embedding] if ours.tied else _head(ours)
        if head is None or trained is None or not torch.equal(_bf16(head), _bf16(trained)):
            here, there = ("tied" if one.tied else "apart" for one in (ours, theirs))
            found["lm_head"] = "tied", f"{here} in training, {there} in the engine, and the numbers of the head differ"
    return found


def number_cause(name: str, ours: Tensor, theirs: Tensor, others: Iterable[tuple[str, Tensor]]) -> Cause | None:
    """(cause, what was found) if a tensor in high precision has other numbers after its rounding to BF16.

    Training moves a weight a little, up and down in rows and columns: no factor does, and no coarser format.
    """
    if torch.equal(_bf16(ours), _bf16(theirs)):
        return None
    a, b = (one.bfloat16().float() for one in (ours, theirs))
    if (b != b.reshape(-1)[0]).any() and (found := next(_elsewhere(name, a, b, others), None)):
        return found if a.ndim == 2 else ("plain", found[1])
    up, down = b.abs() > a.abs(), b.abs() < a.abs()
    ways = [float((up.any(i) & down.any(i)).double().mean()) for i, size in enumerate(a.shape) if size > 1]
    near = float((b - a).norm()) < _STEP * float(a.norm()) and 2 * len(b.unique()) > len(a.unique())
    stale = near and min(ways, default=0) > _STEP
    return "stale" if stale else "plain", f"{float((a != b).float().mean()):.1%} of it differs"


def _head(model: Model) -> Tensor | None:
    side = model.linears.get("lm_head")
    return side.weight if side is not None else model.plain.get("lm_head.weight")


def _bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
