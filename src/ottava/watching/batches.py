"""Notes what a step was trained on: hashes of inputs and labels, and shares of labels that are ignored or equal.

The same data gives the same hash in every step: with and without a look, with gradient accumulation, with a second
model or an evaluation in between. Labels are those that the model is called with; only if it gets none, those that the
losses behind a backward read. Numbers alone, such as the `num_items_in_batch` of Hugging Face's Trainer, are no input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.watching.operands import unobserved

_PRIME = 8_388_593  # fp32, in which numbers come from a GPU, holds the sum of two whole numbers below it
_HASHED = 65_536  # elements of a tensor that are hashed
_SEARCH = 32  # nodes of the graph behind a loss in which its labels may be
_SHAPES = ("View", "Reshape", "UnsafeView", "ToCopy", "Slice", "Transpose", "Permute", "Clone", "Alias", "Squeeze")
_SEQUENCE = 6  # tokens; in shorter rows labels are like inputs by chance
_LABELS = frozenset({"labels", "label", "targets", "target"})
_NO_BATCH = frozenset({"num_items_in_batch"})


class _Forward(NamedTuple):
    """What one forward of a model got."""

    training: bool
    numbers: dict[str, Tensor]
    """"input" and "label": `_batch` of all such tensors."""
    ids: list[Tensor]
    """Its inputs of whole numbers, which labels may copy."""


class Batches:
    """Collects the batches of a step until `drain`.

    A forward counts when a backward begins. Of forwards in both modes those in evaluation mode then do not count: a
    loop that evaluates without `no_grad` trained on none of that.

    Example:
        >>> batches = Batches()
        >>> batches.forward((torch.arange(6).reshape(2, 3),), {}, training=True)
        >>> batches.drain()["forwards"]
        1
    """

    def __init__(self) -> None:
        self._numbers: dict[str, Tensor] = {}
        self._pending: list[_Forward] = []
        self._ids: list[Tensor] = []
        self._losses = self.forwards = self.evaluating = 0
        """Backwards and forwards of the running step, and of these the ones behind a backward in evaluation mode."""
        self.dtypes: set[str] = set()
        """Dtypes of inputs so far."""
        self.arguments: list[str] = []
        """Names, or places, of the tensors that the first forward in training got."""
        self.classes: int | None = None
        """Classes of a mean cross-entropy over labels."""
        self.softmax_twice: bool | None = None
        """Whether a softmax feeds the cross-entropy; None: there was none."""

    def forward(self, args: Any, kwargs: Mapping[str, Any], *, training: bool) -> None:
        """A model was called with these."""
        seen = _Forward(training, {}, [])
        for name, x in arguments_of(args, kwargs):
            if x.requires_grad or x.dim() == 0 or not x.numel() or x.layout != torch.strided or name in _NO_BATCH:
                continue
            self.dtypes.add(str(x.dtype).removeprefix("torch."))
            kind = "label" if name in _LABELS else "input"
            with unobserved(x):
                x = x.detach()
                _add(seen.numbers, kind, _batch(x))
                if kind == "input":
                    seen.ids.extend([] if x.is_floating_point() else [x])
        if training and not self.arguments:
            self.arguments = sorted(name for name, _ in arguments_of(args, kwargs))
        self._pending.append(seen)

    def backward(self, roots: Sequence[Tensor]) -> None:
        """A backward begins at these losses."""
        self._commit()
        self._losses += 1
        first = "labels" not in self._numbers
        for target, ignore, classes, places in (found for root in roots for found in _labels(root)):
            with unobserved(target):
                target = target.detach()
                if ignore is not None and first:
                    shares, old = self._shares(target, ignore, places), self._numbers.get("labels")
                    self._numbers["labels"] = shares if old is None else old + shares
                if "label" not in self._numbers:
                    self._place("target", _batch(target), self._losses)
            self.classes = classes or self.classes
        for root in roots if self.softmax_twice is None else ():
            self.softmax_twice = _softmax_twice(root)

    def drain(self) -> dict[str, Any]:
        """The numbers of the step that ended, on their devices, and the counts "forwards" and "evaluating"."""
        if not self._losses:  # the backward is out of sight, as in compiled code
            self._commit()
        numbers: dict[str, Any] = self._numbers
        target = numbers.pop("target", None)
        if target is not None:
            numbers.setdefault("label", target)
        numbers |= {"forwards": self.forwards, "evaluating": self.evaluating}
        self._numbers, self._ids, self.forwards, self._losses, self.evaluating = {}, [], 0, 0, 0
        return numbers

    def _commit(self) -> None:
        pending, self._pending = self._pending, []
        trains = any(seen.training for seen in pending)
        self.evaluating += 0 if trains else len(pending)
        for seen in pending:
            if trains and not seen.training:
                continue
            self.forwards += 1
            self._ids += seen.ids
            for kind in ("input", "label"):
                if kind in seen.numbers:
                    self._place(kind, seen.numbers[kind], self.forwards)

    def _place(self, kind: str, numbers: Tensor, number: int) -> None:
        """Adds numbers whose hash counts as often as the number of their forward, because the order matters."""
        turn = (numbers[:1].to(torch.int64) * number % _PRIME).to(torch.float32)
        _add(self._numbers, kind, torch.cat([turn, numbers[1:]]))

    def _shares(self, x: Tensor, ignore: int, places: tuple[int, int] | None) -> Tensor:
        """[ignored, used, as the first, and `_matches`]."""
        flat = x.reshape(-1)
        used = flat != ignore
        first = flat.index_select(0, used.to(torch.uint8).argmax().reshape(1))  # without waiting for a GPU
        counts = torch.stack([(~used).sum(), used.sum(), (flat == first).sum()]).to(torch.float32)
        return torch.cat([counts, _matches(flat, used, self._ids, places)])

    def columns(self, name: str, read: Sequence[float]) -> dict[str, float]:
        """Columns of steps.jsonl from one of the numbers of `drain`, once it was read."""
        if name in ("input", "label"):
            return {f"{name}_hash": read[0], f"{name}_nonfinite": read[1]}
        if name == "labels":
            ignored, used, equal, compared, *matches = read
            columns = {"labels_ignored_pct": 100 * ignored / max(ignored + used, 1.0)}
            columns |= {"labels_equal_pct": 100 * equal / used} if used > 1 else {}
            shifts = {f"labels_ahead_{k}_pct": 100 * n / compared for k, n in enumerate(matches) if compared}
            return columns | shifts
        return {}


def arguments_of(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a call with their names, also those in a batch that is one mapping, list or tuple."""
    for name, value in [*((str(i), x) for i, x in enumerate(args)), *kwargs.items()]:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((str(key), x) for key, x in value.items() if isinstance(x, Tensor))
        elif isinstance(value, (tuple, list)):
            yield from ((name, x) for x in value if isinstance(x, Tensor))


def _add(numbers: dict[str, Tensor], kind: str, new: Tensor) -> None:
    old = numbers.get(kind)
    if old is not None:
        joined = old + new
        joined[0] %= _PRIME
        new = joined
    numbers[kind] = new


def _batch(x: Tensor) -> Tensor:
    """[hash, infinities and NaN] of a tensor, fp32 (2,)."""
    flat = x.reshape(-1)[:: -(-x.numel() // _HASHED)]
    broken = (
        _broken(x, flat.to(torch.float32))
        if x.is_floating_point()
        else torch.zeros((), dtype=torch.float32, device=x.device)
    )
    return torch.stack([_hashed(flat), broken.to(torch.float32)])


def _hashed(x: Tensor) -> Tensor:
    """A hash along the last dimension, below `_PRIME`."""
    bits = x.to(torch.float32).view(torch.int32) if x.is_floating_point() else x
    place = torch.arange(1, x.shape[-1] + 1, device=x.device)
    return ((bits.to(torch.int64) % _PRIME * place % _PRIME).sum(-1) % _PRIME).to(torch.float32)


def _broken(x: Tensor, sample: Tensor) -> Tensor:
    """The infinities and NaNs of a sample of x, 1 if only the rest has some; 0 of a mask that is added to scores."""
    ends = torch.stack(x.aminmax()).to(torch.float32)
    finite = sample.isfinite()
    mask = (ends[0] == -math.inf) & (ends[1] == 0) & (torch.where(finite, sample, 0) == 0).all()
    return torch.maximum((~finite).sum(), (~ends.isfinite()).any()) * ~mask


def _matches(labels: Tensor, used: Tensor, inputs: Sequence[Tensor], places: tuple[int, int] | None) -> Tensor:
    """[labels that were compared, how many of them are the input's token at their place, the next, the one after that].

    Zeros where no input is a batch of sequences at least as long as the labels.
    """
    best = torch.zeros(4, dtype=torch.float32, device=labels.device)
    for ids in inputs:
        if ids.dim() != 2 or ids.shape[1] < _SEQUENCE or ids.device != labels.device or ids.dtype == torch.bool:
            continue
        rows, length = len(ids), labels.numel() // len(ids)
        if labels.numel() != rows * length or not _SEQUENCE <= length <= ids.shape[1]:
            continue
        # labels of the places that the scores were cut to; else of all, or of those behind a prompt
        fits = places is not None and places[0] == ids.shape[1] and places[1] + length <= ids.shape[1]
        for first in {places[1]} if fits and places else {0, ids.shape[1] - length}:
            count = length - 2
            x, some = (t.reshape(rows, -1)[:, :count] for t in (labels, used))
            equal = [((x == ids[:, first + k : first + k + count]) & some).sum() for k in range(3)]
            best = torch.maximum(best, torch.stack([some.sum(), *equal]).to(torch.float32))
    return best


def _behind(root: Tensor, of: Callable[[Any], bool]) -> Iterator[Any]:
    """The nearest nodes of the graph behind a root that are of a kind."""
    waiting, visited = [root.grad_fn], 0
    while waiting and visited < _SEARCH:
        node: Any = waiting.pop(0)
        visited += 1
        if node is None:
            continue
        if of(node):
            yield node
        else:
            waiting += [following for following, _ in node.next_functions]


def _labels(root: Tensor) -> Iterator[tuple[Tensor, int | None, int | None, tuple[int, int] | None]]:
    """The targets that losses behind a root saved, the label that they ignore, the classes of a mean over labels, and
    `_places` of the scores."""
    try:
        for node in _behind(root, lambda node: isinstance(getattr(node, "_saved_target", None), Tensor)):
            ignore = getattr(node, "_saved_ignore_index", None)
            scores = node._saved_self if ignore is not None and getattr(node, "_saved_reduction", 0) == 1 else None
            classes = scores.shape[1] if isinstance(scores, Tensor) and scores.dim() > 1 else None
            signed = ignore if ignore is None or ignore < 1 << 63 else ignore - (1 << 64)
            yield node._saved_target, signed, classes, _places(node)
    except RuntimeError:  # the graph was freed
        return


def _places(node: Any) -> tuple[int, int] | None:
    """(L, first) of scores (B, L, classes) that were cut to places from `first` on."""
    while (node := node.next_functions[0][0]) is not None and node.name().startswith((*_SHAPES, "LogSoftmax")):
        if node.name().startswith("Slice"):
            break
    if getattr(node, "_saved_dim", None) != 1 or not node.name().startswith("Slice"):
        return None
    length, start = node._saved_self_sym_sizes[1], node._saved_start
    return length, start if start < 1 << 63 else start - (1 << 64) + length


def _softmax_twice(root: Tensor) -> bool | None:
    """Whether a softmax feeds the cross-entropy behind a root, which has its own; None without a cross-entropy."""
    for node in _behind(root, lambda node: node.name().startswith("LogSoftmax")):
        while (node := node.next_functions[0][0]) is not None and node.name().startswith(_SHAPES):
            pass
        return node is not None and node.name().startswith(("Softmax", "LogSoftmax"))
    return None
