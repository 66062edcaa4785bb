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
    only_a = [k for k in mine if k not in known and k.kind != "recomputed" and not _optional(k)]
    only_b = [k for k in known if k not in mine and k.kind != "recomputed" and not _optional(k)]
    common = [k for k in mine if k in known]
    if len(common) * 10 < min(len(mine), len(known)) or not common:
        raise UnlikeError(_unlike(a, b, mine, known))
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


def _optional(key: Key) -> bool:
    return key.kind in ("clipped gradient", "buffer")


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
        row.b, row.shards = _whole(entry.value, held, key, maps)
    if row.b is None:
        shapes = " and ".join(dict.fromkeys(str(tuple(e.value.shape)) for _, own in held for e in own))
        row.said = f"has shape {tuple(entry.value.shape)} in A and {shapes or 'no value'} in B"
    return row


def _whole(target: Tensor, held: list[tuple[int, list[TensorSeen]]], key: Key, maps: Any) -> tuple[Any, Any]:
    """B's tensor in the shape of A's, and which rank holds what."""
    flat = [(rank, e) for rank, own in held for e in own]
    if any(e.shard for _, e in flat):
        return _pasted(flat, target.shape), [(rank, _place(e)) for rank, e in flat if e.shard]
    locals_ = []
    for rank, own in held:
        values = [e.value for e in own]
        if len(values) == 1:
            locals_.append((rank, values[0]))
        else:
            dim = _batch_dim(target, values)
            locals_.append((rank, torch.cat(values, dim) if dim is not None else values[0]))
    if len(locals_) == 1:
        value = _fit(target, locals_[0][1], maps.get(locals_[0][0]))
        return value, [(locals_[0][0], ...)]
    return _arranged(target, locals_, maps, key)


def _sum_of_parts(row: JudgedTensor, pieces: list[tuple[int, TensorSeen]]) -> None:
    """A layer that is cut by columns gives each rank a part of a sum; a module around it adds them up."""
    if len(pieces) > 1 and row.b is not None and all(e.value.shape == row.a.shape and not e.shard for _, e in pieces):
        total = torch.stack([e.value for _, e in pieces]).sum(0)
        if distance(row.a, total).whole < distance(row.a, row.b).whole:
            row.b, row.shards = total, []


def _batch_dim(target: Tensor, values: Sequence[Tensor]) -> int | None:
    if any(v.dim() != values[0].dim() for v in values) or not values[0].dim():
        return None
    for dim in range(values[0].dim()):
        others = [tuple(n for d, n in enumerate(v.shape) if d != dim) for v in values]
        if len(set(others)) == 1:
            return dim
    return None


def _fit(target: Tensor, value: Tensor, index: Any) -> Tensor | None:
    """One process: the same shape, or the same numbers in another; rows in another order are put back."""
    if value.shape != target.shape:
        if value.numel() != target.numel():
            return None
        value = value.reshape(target.shape)
    if index is not None and target.dim() and not _is_range(index.get(0)) and len(index.get(0, ())) == target.shape[0]:
        back = torch.empty_like(value)
        back[index[0]] = value
        return back
    return value


def _is_range(index: Any) -> bool:
    return index is None or bool((index == torch.arange(len(index))).all())


def _place(entry: TensorSeen) -> Any:
    shard = entry.shard
    assert shard is not None
    return tuple(slice(o, o + n) for o, n in zip(shard.offset, entry.value.shape, strict=True))


def _pasted(pieces: Sequence[tuple[int, TensorSeen]], shape: Any = None) -> Tensor | None:
    """The whole tensor of shards; copies that differ give the one that is farther from the first."""
    known = [e for _, e in pieces if e.shard is not None]
    if not known or known[0].shard is None:
        return None
    whole = torch.zeros(known[0].shard.shape, dtype=known[0].value.dtype)
    for e in known:
        if e.shard is not None and e.shard.partial:
            whole[_place(e)] += e.value
        elif e.value.numel():
            whole[_place(e)] = e.value
    return (
        whole
        if shape is None or whole.shape == shape
        else whole.reshape(shape)
        if whole.numel() == math.prod(shape)
        else None
    )


def _arranged(target: Tensor, held: list[tuple[int, Tensor]], maps: Any, key: Key) -> tuple[Any, Any]:
    """Local tensors of several ranks: copies, or cut along a dimension, in any mesh; the best that gives the shape."""
    values = [v for _, v in held]
    if any(v.dim() != target.dim() for v in values):
        flat = [
            v.reshape(-1, *target.shape[1:])
            for v in values
            if target.dim() and v.numel() % max(math.prod(target.shape[1:]), 1) == 0
        ]
        if len(flat) != len(values):
            return None, []
        values = flat
    best: tuple[float, Any, Any] | None = None
    for mesh in _meshes(len(values)):
        for cut in itertools.product(range(-1, target.dim()), repeat=len(mesh)):
            shape = list(values[0].shape)
            for size, dim in zip(mesh, cut, strict=True):
                if dim >= 0:
                    shape[dim] *= size
            even = len({v.shape for v in values}) == 1
            if (even and tuple(shape) != tuple(target.shape)) or (not even and len(mesh) > 1):
                continue
            laid = _lay(target, held, values, mesh, cut, maps)
            if laid is None:
                continue
            far = distance(target, laid[0]).whole
            if best is None or far < best[0]:
                best = far, *laid
    return (None, []) if best is None else (best[1], best[2])


def _meshes(count: int) -> list[tuple[int, ...]]:
    return [(count,), *((n, count // n) for n in range(2, count) if count % n == 0)]


def _lay(
    target: Tensor, held: Any, values: list[Tensor], mesh: tuple[int, ...], cut: tuple[int, ...], maps: Any
) -> Any:
    whole = torch.full(target.shape, math.nan, dtype=torch.promote_types(values[0].dtype, torch.float32))
    places, done, worst = [], [0] * target.dim(), -1.0
    for number, value in enumerate(values):
        rank = held[number][0]
        where: list[Any] = [slice(None)] * target.dim()
        rest = number
        coordinates: list[int] = []
        for size in reversed(mesh):
            coordinates.insert(0, rest % size)
            rest //= size
        starts: dict[int, int] = {}
        for coordinate, size, dim in zip(coordinates, mesh, cut, strict=True):
            if dim >= 0:
                starts[dim] = starts.get(dim, 0) * size + coordinate
        for dim, start in starts.items():
            index = (maps.get(rank) or {}).get(dim)
            n = value.shape[dim]
            begin = done[dim] if len(mesh) == 1 else start * n
            if index is not None and len(index) == n and int(index.max()) < target.shape[dim]:
                where[dim] = index
            else:
                where[dim] = slice(begin, begin + n)
            if len(mesh) == 1:
                done[dim] = begin + n
        if sum(isinstance(w, Tensor) for w in where) > 1:
            where = [slice(int(w[0]), int(w[0]) + len(w)) if isinstance(w, Tensor) else w for w in where]
        place = tuple(where)
        if whole[place].shape != value.shape:
            return None
        old, new = whole[place], value.to(whole.dtype)
        if bool(old.isnan().all()) and worst < 0:
            whole[place] = new
        else:  # a copy: the one that is farther from the reference counts
            reference = target[place]
            if bool(old.isnan().all()) or distance(reference, new).whole > distance(reference, old).whole:
                whole[place] = new
        places.append((rank, place))
    return whole, places


def _row_maps(
    mine: dict[Key, list[TensorSeen]], theirs: list[dict[Key, list[TensorSeen]]]
) -> dict[int, dict[int, Tensor]]:
    """Rank -> dimension -> which rows of A's data it took, where its data is a part of A's or another order of it."""
    key = next(
        (k for k in mine if k.kind == "input" and mine[k][0].value.dim() and all(k in one for one in theirs)), None
    )
    if key is None:
        return {}
    whole = torch.cat([e.value for e in mine[key]]) if len(mine[key]) > 1 else mine[key][0].value
    maps: dict[int, dict[int, Tensor]] = {}
    for rank, one in enumerate(theirs):
        own = torch.cat([e.value for e in one[key]]) if len(one[key]) > 1 else one[key][0].value
        if own.dim() != whole.dim() or (own.shape == whole.shape and torch.equal(own, whole)):
            continue
        for dim in range(min(whole.dim(), 2)):
            if [n for d, n in enumerate(own.shape) if d != dim] == [n for d, n in enumerate(whole.shape) if d != dim]:
                wanted = {bytes(r.contiguous().view(torch.uint8).numpy()): i for i, r in enumerate(whole.unbind(dim))}
                found = [wanted.get(bytes(r.contiguous().view(torch.uint8).numpy()), -1) for r in own.unbind(dim)]
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


def _unlike(a: StepRecording, b: StepRecording, mine: Any, known: Any) -> str:
    def some(keys: Any) -> str:
        names = list(dict.fromkeys(k.path for k in keys if k.path))
        return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "") if names else "none"

    return (
        f"check: A and B have hardly a name in common. Modules and parameters of A: {some(mine)}; of B: {some(known)}. "
        "Give two programs of one model, or names={name in B: name in A}"
    )
