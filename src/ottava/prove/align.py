"""Puts two recordings side by side: one row a tensor, with calls, micro-batches and ranks made whole.

calls        the n-th call of a module meets the n-th call
micro-batch  where one program calls a module k times as often, its k calls are one batch
ranks        DTensors know their place; other tensors are laid side by side in the arrangement that gives the shape
             of the reference. Rows that ranks took in another order are found by the rows of the data
data         a rank averages the loss over its own rows, so the gradients of its activations are n times as large
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ottava.base.text import listed
from ottava.prove.recorder import GRADIENTS, Key, StepRecording, TensorSeen
from ottava.prove.tolerance import distance

_LATE = 1e9
"""After everything, in a program without updates."""


class UnlikeError(ValueError):
    """Two programs have nothing in common, or not enough; the message says what differs."""


@dataclass(eq=False)
class JudgedTensor:
    """One tensor of both programs."""

    key: Key
    call: int
    a: Tensor
    b: Tensor | None
    operation: str
    unit: torch.dtype
    """The coarser dtype of both."""
    order: float
    shards: list[tuple[int, Any]] = field(default_factory=list)
    """Rank -> the part of `b` that it holds, as an index."""
    said: str = ""
    """Why `b` is None, or what it is."""


@dataclass(eq=False)
class Aligned:
    """The rows in the order of A, and what has no partner."""

    rows: list[JudgedTensor]
    only_a: list[Key]
    only_b: list[Key]
    share: int = 1
    """How much larger gradients of activations are on a rank."""


def align(a: StepRecording, b: StepRecording) -> Aligned:
    """The tensors of two programs by meaning.

    Raises:
        UnlikeError: less than one in ten of A's modules and parameters is in B.
    """
    mine = a.by_key() if not a.ranks else _joined(a)
    theirs = [one.by_key() for one in (b.ranks or [b])]
    _at_the_step(mine, theirs)
    known = dict.fromkeys(key for one in theirs for key in one)
    optional = ("recomputed", "clipped gradient", "buffer")
    only_a, only_b = (
        [k for k in one if k not in other and k.kind not in optional] for one, other in ((mine, known), (known, mine))
    )
    common = [k for k in mine if k in known]
    if len(common) * 10 < min(len(mine), len(known)) or not common:
        shown = [listed(dict.fromkeys(k.path for k in keys if k.path), most=4) or "none" for keys in (mine, known)]
        raise UnlikeError(
            f"check: A and B have hardly a name in common. Modules and parameters of A: {shown[0]}; of B: {shown[1]}. "
            "Give two programs of one model, or names={name in B: name in A}"
        )
    maps = _row_maps(mine, theirs)
    cut = {
        k.path.rpartition(".")[0]
        for k in common
        if k.kind == "weight" and any(k in one and one[k][0].value.shape != mine[k][0].value.shape for one in theirs)
    }
    paths = {k.path for k in common}
    rows: list[JudgedTensor] = []
    for key in [*common, *(k for k in known if k.kind == "recomputed")]:
        reference = mine.get(key if key.kind != "recomputed" else key._replace(kind="output"))
        if reference is None:
            continue
        pieces = [one[key] for one in theirs if key in one]
        ranks = [r for r, one in enumerate(theirs) if key in one]
        for call, entry in enumerate(reference):
            rows.append(_row(key, call, entry, len(reference), pieces, ranks, maps))
            if any(_other_sum(reference, one, paths) for one in pieces):
                rows[-1].b, rows[-1].said = None, "is a sum over other modules in B than in A"
            elif key.kind == "input gradient" and key.path in cut:
                _sum_of_parts(
                    rows[-1], [(rank, one[call]) for rank, one in zip(ranks, pieces, strict=True) if call < len(one)]
                )
    rows.sort(key=lambda row: (row.key.step, row.order))
    aligned = Aligned(rows, only_a, only_b)
    _share_gradients(aligned, len(theirs))
    _add_missing(aligned, mine, theirs)
    return aligned


def _at_the_step(mine: dict[Key, list[TensorSeen]], theirs: list[dict[Key, list[TensorSeen]]]) -> None:
    """Gradients at the step of the optimizer: where only one program changes them, the other's are as they were.

    A program that reduces gradients itself after the backward has none that are whole before.
    """
    for key in [k for one in (mine, *theirs) for k in one if k.kind == "clipped gradient"]:
        whole = key._replace(kind="gradient")
        locals_ = [one[whole][0] for one in theirs if whole in one]
        if len(locals_) > 1 and not locals_[0].shard and _differ([*enumerate(locals_)]):
            for one in theirs:
                if key in one:
                    one[whole] = one.pop(key)
        elif any(key in one for one in theirs):
            updates = [e[0].order for k, e in mine.items() if k.kind == "update" and k.step == key.step]
            late = min(updates, default=_LATE) - 0.5
            mine.setdefault(key, [replace(e, order=late) for e in mine.get(whole, [])])
        else:
            for one in theirs:
                one.setdefault(key, one.get(whole, []))


def _other_sum(a: Sequence[TensorSeen], b: Sequence[TensorSeen], paths: set[str]) -> bool:
    """Whether gradients of B add up the parts of other modules (of both programs) than those of A."""
    known = [[e.beside for e in one if e.beside is not None] for one in (a, b)]
    mine, theirs = (paths & {path for beside in one for path in beside} for one in known)
    return all(known) and mine != theirs


def _joined(a: StepRecording) -> dict[Key, list[TensorSeen]]:
    """A reference of several ranks: what DTensors or equal copies make whole; other tensors stay those of rank 0."""
    found: dict[Key, list[TensorSeen]] = {}
    per_rank = [one.by_key() for one in a.ranks]
    for key in dict.fromkeys(k for one in per_rank for k in one):
        held = [one[key] for one in per_rank if key in one]
        found[key] = []
        for call, entry in enumerate(held[0]):
            pieces = [(r, one[call]) for r, one in enumerate(held) if call < len(one)]
            value = _pasted(pieces) if entry.shard else None
            if value is None and key.path and not entry.shard and _differ(pieces) and entry.value.dim():
                value = torch.cat([e.value for _, e in pieces])  # data parallel: every rank has its own rows
            whole = entry.value if value is None else value
            found[key].append(replace(entry, value=whole, shard=None))
    return found


def _differ(pieces: Sequence[tuple[int, TensorSeen]]) -> bool:
    first = pieces[0][1].value
    return any(e.value.shape != first.shape or not torch.equal(e.value, first) for _, e in pieces[1:])


def _row(
    key: Key, call: int, entry: TensorSeen, calls: int, pieces: list[list[TensorSeen]], ranks: list[int], maps: Any
) -> JudgedTensor:  # fmt: skip
    held: list[tuple[int, list[TensorSeen]]] = []
    for rank, one in zip(ranks, pieces, strict=True):
        many = len(one) // calls if len(one) % calls == 0 else 0
        held.append((rank, [one[call + j * calls] for j in range(many)] if many else one[call : call + 1]))
    held = [(rank, own) for rank, own in held if own]
    dtypes = [entry.value.dtype, *(e.value.dtype for _, own in held for e in own)]
    coarse = max(dtypes, key=lambda d: torch.finfo(d).eps if d.is_floating_point else 0.0)
    row = JudgedTensor(key, call, entry.value, None, entry.operation, coarse, entry.order)
    if held and held[0][1]:
        row.operation = held[0][1][0].operation or row.operation
        row.b, row.shards = _whole(entry.value, held, maps)
    if row.b is None:
        shapes = " and ".join(dict.fromkeys(str(tuple(e.value.shape)) for _, own in held for e in own))
        row.said = f"has shape {tuple(entry.value.shape)} in A and {shapes or 'no value'} in B"
    return row


def _whole(target: Tensor, held: list[tuple[int, list[TensorSeen]]], maps: Any) -> tuple[Any, Any]:
    """B's tensor in the shape of A's, and which rank holds what."""
    flat = [(rank, e) for rank, own in held for e in own]
    if any(e.shard for _, e in flat):
        return _pasted(flat, target.shape), [(rank, _place(e)) for rank, e in flat if e.shard]
    locals_ = []
    for rank, own in held:
        values = [e.value for e in own]
        dim = _batch_dim(values) if len(values) > 1 else None
        locals_.append((rank, values[0] if dim is None else torch.cat(values, dim)))
    if len(locals_) > 1:
        return _arranged(target, locals_, maps)
    ((rank, value),) = locals_
    return _fit(target, value, (maps.get(rank) or {}).get(0)), [(rank, ...)]


def _sum_of_parts(row: JudgedTensor, pieces: list[tuple[int, TensorSeen]]) -> None:
    """A layer that is cut by columns gives each rank a part of a sum; a module around it adds them up."""
    if len(pieces) > 1 and row.b is not None and all(e.value.shape == row.a.shape and not e.shard for _, e in pieces):
        total = torch.stack([e.value for _, e in pieces]).sum(0)
        if distance(row.a, total).whole < distance(row.a, row.b).whole:
            row.b, row.shards = total, []


def _batch_dim(values: Sequence[Tensor]) -> int | None:
    """Along which tensors are parts of one."""
    if len({v.dim() for v in values}) > 1:
        return None
    rest = ({(*v.shape[:dim], *v.shape[dim + 1 :]) for v in values} for dim in range(values[0].dim()))
    return next((dim for dim, shapes in enumerate(rest) if len(shapes) == 1), None)


def _fit(target: Tensor, value: Tensor, rows: Tensor | None) -> Tensor | None:
    """One process: the same shape, or the same numbers in another; rows in another order are put back."""
    if value.numel() != target.numel():
        return None
    value = value.reshape(target.shape)
    if rows is not None and target.dim() and len(rows) == target.shape[0]:
        back = torch.empty_like(value)
        back[rows] = value
        return back
    return value


def _place(entry: TensorSeen) -> Any:
    shard = entry.shard
    assert shard is not None
    return tuple(slice(o, o + n) for o, n in zip(shard.offset, entry.value.shape, strict=True))


def _pasted(pieces: Sequence[tuple[int, TensorSeen]], shape: Any = None) -> Tensor | None:
    """The whole tensor of shards; copies that differ give the one that is farther from the first."""
    known = [(e, e.shard) for _, e in pieces if e.shard is not None]
    if not known:
        return None
    whole = torch.zeros(known[0][1].shape, dtype=known[0][0].value.dtype)
    for e, shard in known:
        if shard.partial:
            whole[_place(e)] += e.value
        elif e.value.numel():
            whole[_place(e)] = e.value
    return whole if shape is None else whole.reshape(shape) if whole.numel() == math.prod(shape) else None


def _arranged(target: Tensor, held: list[tuple[int, Tensor]], maps: Any) -> tuple[Any, Any]:
    """Local tensors of several ranks: copies, or cut along a dimension, in any mesh; the best that gives the shape."""
    if any(v.dim() != target.dim() for _, v in held):
        row = max(math.prod(target.shape[1:]), 1)
        if not target.dim() or any(v.numel() % row for _, v in held):
            return None, []
        held = [(rank, v.reshape(-1, *target.shape[1:])) for rank, v in held]
    even = len({v.shape for _, v in held}) == 1
    best: tuple[float, Any, Any] = math.inf, None, []
    for mesh in [(len(held),), *((n, len(held) // n) for n in range(2, len(held)) if len(held) % n == 0)]:
        for cut in itertools.product(range(-1, target.dim()), repeat=len(mesh)):
            shape = [*held[0][1].shape]
            for size, dim in zip(mesh, cut, strict=True):
                if dim >= 0:
                    shape[dim] *= size
            fits = tuple(shape) == tuple(target.shape) if even else len(mesh) == 1
            if fits and (laid := _lay(target, held, mesh, cut, maps)) is not None:
                best = min(best, (distance(target, laid[0]).whole, *laid), key=lambda one: (one[0], one[1] is None))
    return best[1:]


def _lay(target: Tensor, held: list[tuple[int, Tensor]], mesh: tuple[int, ...], cut: tuple[int, ...], maps: Any) -> Any:
    whole = torch.full(target.shape, math.nan, dtype=torch.promote_types(held[0][1].dtype, torch.float32))
    places, done = [], [0] * target.dim()
    for (rank, value), spot in zip(held, itertools.product(*map(range, mesh)), strict=True):
        where: list[Any] = [slice(None)] * target.dim()
        starts: dict[int, int] = {}
        for coordinate, size, dim in zip(spot, mesh, cut, strict=True):
            if dim >= 0:
                starts[dim] = starts.get(dim, 0) * size + coordinate
        for dim, start in starts.items():
            index, n = (maps.get(rank) or {}).get(dim), value.shape[dim]
            begin = done[dim] if len(mesh) == 1 else start * n
            known = index is not None and len(index) == n and int(index.max()) < target.shape[dim]
            where[dim] = index if known else slice(begin, begin + n)
            done[dim] = begin + n
        if sum(isinstance(w, Tensor) for w in where) > 1:
            where = [slice(int(w[0]), int(w[0]) + len(w)) if isinstance(w, Tensor) else w for w in where]
        place = tuple(where)
        old, new, reference = whole[place], value.to(whole.dtype), target[place]
        if old.shape != value.shape:
            return None
        # of copies the one that is farther from the reference counts
        if bool(old.isnan().all()) or distance(reference, new).whole > distance(reference, old).whole:
            whole[place] = new
        places.append((rank, place))
    return whole, places


def _row_maps(
    mine: dict[Key, list[TensorSeen]], theirs: list[dict[Key, list[TensorSeen]]]
) -> dict[int, dict[int, Tensor]]:
    """Rank -> dimension -> which rows of A's data it took, where its data is a part of A's or another order of it."""

    def joined(calls: list[TensorSeen]) -> Tensor:
        return torch.cat([e.value for e in calls]) if len(calls) > 1 else calls[0].value

    def bits(x: Tensor, dim: int) -> list[bytes]:
        return [bytes(row.contiguous().view(torch.uint8).numpy()) for row in x.unbind(dim)]

    known = (k for k in mine if k.kind == "input" and mine[k][0].value.dim() and all(k in one for one in theirs))
    if (key := next(known, None)) is None:
        return {}
    whole = joined(mine[key])
    maps: dict[int, dict[int, Tensor]] = {}
    for rank, one in enumerate(theirs):
        own = joined(one[key])
        if own.dim() != whole.dim() or (own.shape == whole.shape and torch.equal(own, whole)):
            continue
        for dim in range(min(whole.dim(), 2)):
            if [n for d, n in enumerate(own.shape) if d != dim] == [n for d, n in enumerate(whole.shape) if d != dim]:
                wanted = {row: i for i, row in enumerate(bits(whole, dim))}
                found = [wanted.get(row, -1) for row in bits(own, dim)]
                if len(wanted) == whole.shape[dim] and min(found) >= 0:
                    maps.setdefault(rank, {})[dim] = torch.tensor(found)
    return maps


def _share_gradients(aligned: Aligned, ranks: int) -> None:
    """Gradients of activations that ranks averaged over their own rows."""
    if ranks == 1:
        return
    rows = [r for r in aligned.rows if r.key.kind in GRADIENTS and r.b is not None]
    split = [r for r in rows if len({str(place) for _, place in r.shards}) > 1]
    if not split:
        return
    first = split[0]
    assert first.b is not None
    far = {n: distance(first.a, first.b.double() / n).whole for n in range(1, ranks + 1) if ranks % n == 0}
    aligned.share = min(far, key=lambda n: far[n])
    for row in rows:
        if row.b is not None and aligned.share > 1:
            row.b = row.b.double() / aligned.share


def _add_missing(
    aligned: Aligned, mine: dict[Key, list[TensorSeen]], theirs: list[dict[Key, list[TensorSeen]]]
) -> None:
    """A parameter whose gradient or update B lacks is a row: B has zero. Then gradients of activations are, too."""
    paths = {k.path for one in theirs for k in one}
    lost = [k for k in aligned.only_a if k.kind in ("gradient", "update") and k.path.rpartition(".")[0] in paths]
    for key in list(aligned.only_a):
        if key in lost or (lost and key.kind in GRADIENTS and key.path in paths):
            for call, entry in enumerate(mine[key]):
                zero = torch.zeros_like(entry.value)
                how = entry.operation, entry.value.dtype, entry.order
                aligned.rows.append(JudgedTensor(key, call, entry.value, zero, *how, [], "is missing in B"))
            aligned.only_a.remove(key)
    aligned.rows.sort(key=lambda row: (row.key.step, row.order))
