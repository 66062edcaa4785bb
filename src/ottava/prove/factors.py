"""Casts and scales as factors: in which respects each may go wrong, one at a time, then two at once.

What a cast does has factors: what its amax sees, how that becomes a scale, for which of two levels, how codes are made,
and which part is written. A GEMM reads the scale of a row and a block of K at some place: a function of the row and one
of the block, or one with a stride. `explain` tries these where the plain list of `hypotheses` finds nothing.
"""

# ruff: noqa: E501  (an entry is a line)
# mypy: disable-error-code="misc"
# (a lambda with a default has no type that mypy infers)
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.numerics.formats import E4M3
from ottava.numerics.tensor import QuantizationSpec
from ottava.prove.codes import SCALE_SLACK, by_memory, on_grid
from ottava.prove.hypotheses import OPTIMIZERS, Asked, Fault, always, changed, scale_faults
from ottava.prove.judge import block_amax, scale_inv_of, spread

# fmt: off
_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
_HALVES = (("BF16", torch.bfloat16), ("FP16", torch.float16))

class Factor(NamedTuple):
    """One respect in which a cast goes wrong."""

    name: str
    sentence: str
    does: Mapping[str, Any]
    """"sees" (x -> what amax sees), "grid" (amaxes -> amaxes), "level" (which of two), "divisor", "unwritten", and
    knobs of `judge.cast_allowed`. Factors that share one exclude each other."""

def _left_out() -> Iterator[tuple[str, tuple[int, Callable[..., Tensor]]]]:
    """Parts of a matrix; an axis (2: the matrix as a list), and a rule of (index, size of a block, size) for what remains."""
    for axis, word in enumerate(("row", "column", "number")):
        yield from ((f"{word}s beyond the last whole {n}", (axis, lambda k, block, size, n=n: k < size // n * n)) for n in _SIZES)
        yield f"the second half of the {word}s", (axis, lambda k, block, size: k < size // 2)
    for axis, word in enumerate(("row", "column")):
        yield from ((f"the last {word} of each block", (axis, lambda k, block, size: (k % block < block - 1) & (k < size - 1))), (f"the first {word}", (axis, lambda k, block, size: k > 0)))
        for n in (1, *_SIZES[2:], 512, 1024, 2048):
            yield f"all {word}s of a block but the first {n}", (axis, lambda k, block, size, n=n: k % block < n)
            yield f"all {word}s but the first {n}", (axis, lambda k, block, size, n=n: k < n)
        yield from ((f"every second {word}, from number {1 - rest} on" if n == 2 else f"all {word}s but number {rest} of each {n}", (axis, lambda k, block, size, n=n, rest=rest: k % n == rest)) for n, rest in ((2, 0), (2, 1), (4, 0)))
    yield from ((f"numbers behind the first {n:,}", (2, lambda k, block, size, n=n: k < n)) for n in (1024, 2048, 4096, 8192, 16384))

def _remains(rule: tuple[int, Callable[..., Tensor]], x: Tensor, spec: QuantizationSpec) -> Tensor:
    size, block = (*x.shape, x.numel())[rule[0]], (*spec.granularity.block_shape((x.shape[0], x.shape[1])), 1)[rule[0]]
    return rule[1](torch.arange(size).view(((-1, 1), (1, -1), x.shape)[rule[0]]), block, size).expand(x.shape)

def _amaxes() -> Iterator[Factor]:
    for what, rule in _left_out():
        yield Factor("amax leaves out numbers", f"amax leaves out {what}", {"sees": lambda x, spec, rule=rule: torch.where(_remains(rule, x, spec), x, 0 * x.nan_to_num(0.0, 0.0, 0.0))})
    for sentence, sees in (
        ("amax looks at x, not at its magnitude", lambda x, spec: x.clamp(min=0)),
        ("amax looks at the negative numbers only", lambda x, spec: x.clamp(max=0)),
        ("amax leaves out infinity and NaN", lambda x, spec: x.nan_to_num(0.0, 0.0, 0.0)),
        ("amax leaves out NaN", lambda x, spec: x.nan_to_num(0.0, math.inf, -math.inf)),
        ("amax is taken of memory row by row, whatever the strides of x are", lambda x, spec: x if (seen := by_memory(x)) is None else seen),
        *((f"amax is rounded to {to}", lambda x, spec, dtype=dtype: x.to(dtype)) for to, dtype in _HALVES),
    ):
        yield Factor("amax of other numbers", sentence, {"sees": sees})
    yield from (Factor(name.replace("scale", "amax"), f"{sentence}, and codes are made with it", {"grid": change}) for name, sentence, change in scale_faults())
    yield from (Factor(f"amax at least {eps:g}", f"amax ends at {eps:g}, so small numbers lose bits", {"grid": lambda a, eps=eps: a.clamp(min=eps)}) for eps in (1.0, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-10, 1e-12))

def _rules() -> Iterator[Factor]:
    yield Factor("OCP's floor for the scale", "The exponent of the scale is floor(log2(amax)) - emax, so the largest numbers saturate", {"exponent": "floor"})
    yield Factor("scale no power of two", "The scale is max / amax, not a power of two", {"exponent": "none"})
    yield from (Factor(f"scale rounded {text}", f"The multiplier is a power of two rounded {text}; the recipe asks for another rule", {"exponent": text}) for text in ("up", "down", "nearest", "ceil"))
    yield Factor("scale without the format's exponent", "The exponent of the scale is floor(log2(amax)), without the format's largest exponent", {"exponent": "bare"})
    for at, (word, sign) in product(range(1, 16), (("at least", 1), ("more than", -1))):
        yield Factor("another threshold of the exponent", f"The exponent of the scale is floor(log2(amax)) - emax, and one more where amax is {word} {1 + at / 16:g} times a power of two", {"exponent": sign * (1 + at / 16)})
    for how, text in (("truncate", "toward zero"), ("away", "up")):
        yield Factor(f"block scale rounded {how}", f"The block's E4M3 scale is rounded {text}, not to nearest", {"exponent": how, "needs": "e4m3"})
    yield from (Factor(f"tensor scale in {text}", f"The tensor's scale is rounded to {text}", {"exponent": to, "needs": "e4m3"}) for text, to in _HALVES)
    for top in (240.0, 224.0, 256.0, 57344.0, 448.0, 127.0, 128.0, 1.0, 6.0, 7.0, 4.0, 512.0, 896.0, 464.0, 416.0, 480.0):
        yield Factor(f"scaled to {top:g}", f"The largest number of a block goes to {top:g}, not to the format's largest", {"scale_top": top})
        yield Factor(f"tensor scale for {top:g}", f"The tensor's factor of the scale brings the largest block's to {top:g}, not to 448", {"outer": top, "level": "tensor"})

def _writes() -> Iterator[Factor]:
    for name, sentence, divisor in (
        ("codes without the tensor's scale", "Codes are made with the block's factor of the scale alone", lambda scale, outer, plain: scale / outer),
        ("codes without the block's scale", "Codes are made with the tensor's factor of the scale alone", lambda scale, outer, plain: outer.expand(scale.shape)),
        ("codes under the unrounded scale", "Codes are made with max / amax, before the scale is rounded", lambda scale, outer, plain: plain),
        ("multiplied by scale_inv", "x is multiplied by scale_inv, not divided", lambda scale, outer, plain: 1 / scale),
        *((f"multiplier in {text}", f"x is multiplied by 1 / scale_inv rounded to {text}", lambda scale, outer, plain, to=to: 1 / (1 / scale).to(to).double()) for text, to in _HALVES),
    ):
        yield Factor(name, sentence, {"divisor": divisor} | ({"needs": "e4m3"} if "factor" in sentence else {}))
    for level, stored in (("block's", lambda scale, outer: scale / outer), ("tensor's", lambda scale, outer: outer.expand(scale.shape))):
        yield Factor(f"the {level} factor alone is stored", f"The {level} factor of the scale is stored alone; codes are right", {"stored": stored, "needs": "e4m3"})
    for how, text in (("truncate", "toward zero"), ("ties_away", "with ties away from zero"), ("away", "away from zero")):
        yield Factor("codes rounded otherwise", f"Codes are rounded {text}", {"rounding": how})
    yield Factor("subnormals flushed", "Codes of subnormal numbers become zero", {"flush": True})
    yield from (Factor("tail not written", f"It does not write {what}", {"unwritten": rule}) for what, rule in _left_out() if not what.startswith(("all", "the first")))

def _together(call: Asked, does: Mapping[str, Any]) -> dict[str, Any] | None:
    """The knobs of a cast that does all this."""
    way, spec, x, right = dict(does), call.spec, call.inputs["x"], call.amax()
    sees, grid, level, divisor, needs, stored = (way.pop(key, None) for key in ("sees", "grid", "level", "divisor", "needs", "stored"))
    if not x.numel() or ((level or needs) and spec.scale_format != "e4m3"):
        return None
    amax = right if sees is None else block_amax(sees(x, spec), spec.granularity)
    if (amax := amax if grid is None else grid(amax)) is None or amax.shape != right.shape:
        return None
    if level:
        top = torch.where(right.isfinite(), amax if level == "tensor" else right, 0.0).amax()
        way["outer"] = torch.where(top > 0, top, 1.0) / (spec.format.max * way.get("outer", E4M3.max))
        amax = right if level == "tensor" else amax
    if stored is not None:
        way["written"] = lambda scale: stored(scale, torch.where(right.isfinite(), right, 0.0).amax() / (spec.format.max * E4M3.max))
    if "unwritten" in way:
        way["unwritten"] = ~_remains(way["unwritten"], x, spec)
    if divisor is not None:
        scale = scale_inv_of(amax, spec, way.get("scale_top"), way.get("exponent"), 1.0, way.get("outer"))
        scale = divisor(scale, amax.amax() / (spec.format.max * E4M3.max), scale_inv_of(amax, spec, exponent="none"))
        slack = SCALE_SLACK * (spec.scale_format in ("fp32", "e4m3"))
        ends = torch.stack([on_grid(x.double() / spread(scale, spec, x.shape) * by, spec.format) for by in (1 - slack, 1 + slack)])
        way["values"] = (ends.amin(0), ends.amax(0))
    return way if amax is right else way | {"amax": amax}

def _fault(*factors: Factor) -> Fault:
    does, count = {key: value for one in factors for key, value in one.does.items()}, sum(len(one.does) for one in factors)
    return Fault(factors[0].name, ". ".join(one.sentence for one in factors), ("cast",), partial(_together, does=does) if len(does) == count else lambda call: None)

def alone() -> Iterator[Fault]:
    """Casts with one factor that is wrong, and backwards that are unlike their forwards."""
    yield from _backward()
    for names in (("data",), ("data", "scale_inv")):
        yield Fault("strides of x for the result", f"{' and '.join(names)} is written with the strides of x", ("cast",), lambda c, names=names: {"turned": names} if c.inputs["x"].stride(0) == 1 and c.inputs["x"].stride(1) > 1 else {})
    yield Fault("zeros divided by zero", "Zeros become NaN in a block of zeros: its scale divides by an amax of zero", ("cast",), lambda c: {"unwritten": spread(c.amax(), c.spec, c.inputs["x"].shape) == 0})
    yield from (_fault(one) for one in (*_rules(), *_amaxes(), *_writes()) if "out all" not in one.sentence)

def _casts() -> Iterator[Fault]:
    """Rare factors, then two: where the first holds, the same part neither seen nor written, other pairs."""
    amaxes, rules, writes = [*_amaxes()], [*_rules()], [*_writes()]
    codes, unwritten = ([one for one in writes if ("unwritten" in one.does) is tail] for tail in (False, True))
    places = [Factor("", f"It is so for the {level}'s factor of the scale alone", {"level": level}) for level in ("tensor", "block")]
    yield from (_fault(one) for one in amaxes if "out all" in one.sentence)
    yield from (_fault(one, two) for one, two in product(amaxes, unwritten) if one.sentence.split("out ")[-1] == two.sentence.split("write ")[-1])
    for some, others in (((*amaxes, *rules), places), (amaxes, codes), (rules, codes), (amaxes, [one for one in amaxes if one.name.startswith("amax at least")]), (amaxes, rules)):
        yield from (_fault(one, two) for one, two in product(some, others))

def _index(what: str) -> Iterator[tuple[str, Callable[[Tensor, int], Tensor]]]:
    """Which number of `what` is read where number i of n belongs."""
    yield from (("", lambda i, n: i), (f"the first {what}", lambda i, n: 0 * i), (f"the last {what}", lambda i, n: 0 * i + n - 1), (f"the {what} before it", lambda i, n: i - 1), (f"the {what} behind it", lambda i, n: i + 1), (f"the {what} at the same place of the first half", lambda i, n: i % -(-n // 2)))
    yield from ((f"its neighbour in a pair of {what}s", lambda i, n: i ^ 1), (f"the {what} counted from the end", lambda i, n: n - 1 - i), (f"the {what} in tiles of 4 x 32", lambda i, n: i // 128 * 128 + i % 4 * 32 + i // 4 % 32))
    for size in _SIZES[:-1]:
        yield from ((f"the first of each {size} {what}s", lambda i, n, size=size: i // size * size), (f"the {what} whose number is its own modulo {size}", lambda i, n, size=size: i % size), (f"the {what} whose number is its own over {size}", lambda i, n, size=size: i // size))

def _reads() -> Iterator[tuple[str, Callable[[Tensor], Tensor | None]]]:
    """Which scale a row and a block of K get: a sentence, and the scales as they are read."""
    for n in (1, 4, 8, 16, 32, 128):
        yield f"Scales are read in the order of the transpose, its rows padded to a multiple of {n}", partial(_at, lambda i, j, m, k, n=n: j * (-(-m // n) * n) + i)
        yield f"Scales are read with rows padded to a multiple of {n} blocks", partial(_at, lambda i, j, m, k, n=n: i * (-(-k // n) * n) + j)
        for tile in (16, 32, 64, 128):
            yield f"Each {tile} rows of scales are read as if those before had been padded to a multiple of {n} blocks", partial(_at, lambda i, j, m, k, n=n, tile=tile: i // tile * tile * (-(-k // n) * n) + i % tile * k + j)
    for (of_row, row), (of_block, block) in product(_index("row"), _index("block of K")):
        if said := " and ".join(text for text in (of_row, of_block) if text):
            yield f"The scale that is read is that of {said}", partial(_at, lambda i, j, m, k, row=row, block=block: row(i, m).clamp(0, m - 1) * k + block(j, k).clamp(0, k - 1))

def _columns() -> Iterator[tuple[str, Callable[[Tensor, int, int], Tensor]]]:
    """Which block's scale a column of K gets: a sentence, and a function of (column, size of a block, K)."""
    for by in (1, -1, 8, -8, 16, -16, 32, -32, 64, -64):
        yield f"Blocks of K begin {abs(by)} column{'s' * (abs(by) > 1)} {'early' if by > 0 else 'late'}", lambda k, block, size, by=by: torch.div(k + by, block, rounding_mode="floor")
    yield from ((f"Scales are read as if blocks of K had {n} columns", lambda k, block, size, n=n: k // n) for n in (*_SIZES[3:], 512))
    yield "Scales are read as if blocks of K were equal parts", lambda k, block, size: k // -(-size // -(-size // block))
    yield "Blocks of K take turns from column to column", lambda k, block, size: k % -(-size // block)
    for n, whole in product((2, 3, 4, 8), (True, False)):
        def cut(k: Tensor, size: int, n: int = n, whole: bool = whole) -> tuple[Tensor, Tensor, int]:
            width = max(-(-size // n) if whole else size // n, 1)
            part = (k // width).clamp(max=n - 1)
            return part, k - part * width, width
        text = f"K is split in {n}, and each part counts its blocks from its own start"
        yield f"{text}, which has the scale of the block that it lies in", lambda k, block, size, cut=cut: (c := cut(k, size))[0] * c[2] // block + c[1] // block
        yield f"{text} and from the first scale on", lambda k, block, size, cut=cut: cut(k, size)[1] // block
        yield f"{text}; scales are counted on, part by part", lambda k, block, size, cut=cut: (c := cut(k, size))[0] * -(-c[2] // block) + c[1] // block

def _at(place: Callable[..., Tensor], s: Tensor) -> Tensor | None:
    """Scales of other places of their memory; beyond its end the last."""
    if s.dim() < 2 or not s.numel():
        return None
    m, k = s.shape[-2:]
    return s.reshape(*s.shape[:-2], -1)[..., place(torch.arange(m)[:, None], torch.arange(k)[None], m, k).clamp(max=m * k - 1).expand(m, k)]

def _grown(n: int, restart: int, rows: int, s: Tensor) -> Tensor | None:
    """Each tile of n rows also has the scales of the tiles before it: of `rows` rows of these."""
    if s.dim() != 2 or s.dtype == torch.uint8 or len(s) <= n:
        return None
    made = s.clone()
    for start in (start for start in range(n, len(s), n) if start // n % restart):
        made[start : start + n] *= made[start - n : start - n + rows][: len(made) - start]
    return made

def _scales() -> Iterator[Fault]:
    """Scales of GEMMs that are multiplied into each other, or read at other places; sums of few bits."""
    kinds, names = ("gemm", "grouped"), {"scale_inv_a": ("scale_inv_a",), "scale_inv_b": ("scale_inv_b",), "both scales": ("scale_inv_a", "scale_inv_b")}
    for (sentence, columns), (text, of) in product(_columns(), names.items()):
        yield Fault("scale of another column", f"{sentence}: {text}", kinds, always(columns=tuple(columns if f"scale_inv_{side}" in of else None for side in "ab")))
    for (sentence, change), (text, of) in product(_reads(), names.items()):
        yield Fault("scale of another place", f"{sentence}: {text}", kinds, changed(**dict.fromkeys(of, change)))
    for n, (anew, restart), first, sides in product((1, 16, 32, 64, 128, 256), (("", 1 << 30), (", anew after two tiles", 2), (", anew after four tiles", 4)), (False, True), ("ab", "ba")):
        said = f"Scales of {sides[1]} are multiplied in place by those of {sides[0]}: a tile of {n} rows also has the scales of {'the first row' if first else 'the same place'} in the tiles before it{anew}"
        yield Fault("scales multiplied in place", said, kinds, changed(**{f"scale_inv_{sides[0]}": partial(_grown, n, restart, 1 if first else n)}))
    for bits, (how, sign), n, late in product((8, 10, 11, 12, 13, 14, 16, 18), (("cut off", -1), ("rounded", 1)), (16, 32, 64, 128, 256), (False, True)):
        yield Fault(f"accumulates in {bits} bits", f"Sums are {how} to {bits} bits after each {n} products{', and scaled at the end' * late}", kinds, always(steps=(sign * bits, n), late=late))
    for (one, said, change), (two, other, more) in product(scale_faults(), repeat=2):
        yield Fault(f"{one} (a), {two} (b)", f"{said}: scale_inv_a. {other}: scale_inv_b", kinds, changed(scale_inv_a=change, scale_inv_b=more))

def _backward() -> Iterator[Fault]:
    """What the backward of attention does and its forward does not: another mask, other scores, heads of others."""
    masks: dict[str, dict[str, Any]] = {
        "sees all keys": {"causal": False}, "hides later keys": {"causal": True, "offset": 0},
        **{f"sees {n} key{'s' * (n > 1)} too many": {"offset": n} for n in (1, 2)}, **{f"sees {n} key{'s' * (n > 1)} too few": {"offset": -n} for n in (1, 2)},
        **{f"hides whole tiles of {n} later keys only": {"causal": True, "tile": n} for n in _SIZES[2:7]},
        **{f"sees the last {n} keys only": {"causal": True, "offset": 0, "window": n} for n in _SIZES[:7]},
        **{f"takes scores {by:g} times as large": {"by": by} for by in (2.0, 0.5, math.log(2), 1 / math.log(2))},
    }
    for (said, back), (more, anew) in product(masks.items(), (("", {}), (", and makes its softmax of them", {"anew": True}))):
        yield Fault("backward unlike the forward", f"The backward {said}{more}; the forward is right", ("attention",), lambda c, back=back, anew=anew: None if "offset" in back and "causal" not in back and not c.what.get("causal") else {"back": back | anew})
    yield Fault("backward unlike the forward", "The backward does not multiply scores by the softmax scale; the forward does", ("attention",), lambda c: {"back": {"by": c.inputs["q"].shape[-1] ** 0.5}})

def _along(dim: int, index: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor | None:
    n = x.shape[dim]
    return x.index_select(dim, index(torch.arange(n), n).clamp(0, n - 1)) if n > 1 else None

def _heads() -> Iterator[Fault]:
    """Which head or batch a head or a batch reads."""
    for (dim, word), sides in product(((1, "head"), (0, "batch")), (("k", "v"), ("k",), ("v",), ("q",), ("grad",), ("q", "k", "v"))):
        for said, index in _index(word):
            if said:
                yield Fault(f"{word} of another place", f"The {word} of {' and '.join(sides)} that is read is {said}", ("attention",), changed(**dict.fromkeys(sides, partial(_along, dim, index))))

def _steps() -> Iterator[Fault]:
    """Two faults of an optimizer at once."""
    for (one, said), (two, more) in combinations(OPTIMIZERS, 2):
        yield Fault(f"{one}, {two}", f"{said}. {more}", ("optimizer",), always(fault=(one, two)))

def factored(kind: str) -> Iterator[Fault]:
    """What factors give for a kind of kernel where one alone gives nothing."""
    of_kind: Mapping[str, Callable[[], Iterable[Fault]]] = {"cast": _casts, "gemm": _scales, "grouped": _scales, "attention": _heads, "optimizer": _steps}
    made = of_kind.get(kind, tuple)()
    yield from (one for one in made if kind in one.kinds)
