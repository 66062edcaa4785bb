"""Logic of a forward, tried: what an output may depend on, whatever the numbers are.

    sees_later    a sequence's later tokens are changed: does the output before them move?
    mixes         the second half of a batch is replaced: does the output of the first half move?
    padding       the model gets one row without its padding: do the outputs of the row's own tokens move?
    hidden        a row's own tokens are changed, but for the last: does the output of the last one stay?
    crosses       the first document of a packed row is changed: does the output of the last one move?
    unmasked      rows end in equal tokens, and no mask is seen: do other tokens there move the row's outputs?
    uncounted     do the positions that a model is given not count along the sequence?
    taught        are more than a fifth of the labels those of padding?

All run a captured forward again without casts, with the same random state, once as it ran and once with the change. A
sample's output is asked in evaluation mode, where a batch norm takes no statistics from its neighbours. None is a
fault by itself: a model of masked words sees both sides. `diagnose.laws` says when it is one.

Padding is what a mask says it is: a tensor of two values, one for each token, that the forward reads or makes, which
parts each row in two, where the tokens of one part are all the same. So a mask with its values exchanged is told too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ottava.engine.groups import Collectives
from ottava.experiments.program import Forward, Slot, Way, leaves, tensors_in, tree_map
from ottava.experiments.snapshot import Kept, under_ambient, under_autocasts

_FEWEST, _LONGEST = 4, 6  # samples of a batch, tokens of a sequence
_MOVES = 1e-4  # of the root mean square: equal rows in equal shapes give equal sums
_FAR = -4.0  # factor of numbers that replace others: a softmax of small scores hardly moves else
_LABELS = ("label", "labels", "target", "targets")
_DOCUMENTS = ("segment_ids", "doc_ids", "document_ids", "sequence_ids", "seq_ids", "seq_idx")
_ROWS = 4  # are cut to their own length
_ANOTHER = 0.02  # of the root mean square: in other shapes BF16 sums are others by half a percent
_ATTENTION = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
_ATTENDS = frozenset({*_ATTENTION, "softmax"})
_INSIDE = 0.05  # of a row's own tokens: more of them, and a row of equal ones is data, as the ground of a picture


def reasons(forwards: Sequence[Forward], way: Way, *, ranks: bool = False) -> dict[str, bool | None]:
    """What was tried with the first forward, and None for what has no meaning there.

    Args:
        forwards: of a captured step.
        way: without casts: one scale for a tensor lets every element depend on every other one.
        ranks: other ranks try their own forwards. How often depends on the batch, so one that sends is not tried.

    Example:
        >>> from ottava.experiments.program import AS_IT_RAN, Recorder
        >>> model = torch.nn.Sequential(torch.nn.Flatten(1), torch.nn.Linear(6, 2))
        >>> recorder = Recorder([model])
        >>> _ = model(torch.randn(8, 3, 2))
        >>> reasons(recorder.finish().forwards, AS_IT_RAN)
        {'sees_later': None, 'mixes': False, 'in_time': None}
    """
    first = next((f for f in forwards if not f.chained), None)
    if first is None:
        return dict.fromkeys(("sees_later", *_UNKNOWN))
    if ranks:
        with Collectives() as sent:
            _run(first, way)
        if sent.rows:
            return {}
    found = {"sees_later": _sees_later(first, way), **_samples(first, way)}
    return found | (_of_rows(first, way) if found["mixes"] is not True else {})


def _sees_later(forward: Forward, way: Way) -> bool | None:
    tokens = _tokens(forward)
    if tokens is None:
        return None
    length = tokens.shape[1]
    half = length // 2
    changed = tokens.clone()
    changed[:, half:] = changed.roll(1, 0)[:, half:].roll(1, 1)
    if bool((changed[:, half] == tokens[:, half]).all()):
        return None

    one, two = _run(forward, way), _run(forward, way, _with(changed, tokens))
    for a, b in zip(one, two, strict=False):
        if a.dim() >= 3 and a.shape[:2] == tokens.shape and a.shape == b.shape:
            moved = _moved(a[:, half - 1], b[:, half - 1])
            differ = changed[:, half] != tokens[:, half]
            return bool(moved[differ].float().mean() > 0.5)
    return None


def _with(changed: Tensor, tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """Puts `changed` in the place of an argument that is `tokens`."""
    return lambda x: changed if x.shape == tokens.shape and x.dtype == tokens.dtype and torch.equal(x, tokens) else x


def _tokens(forward: Forward) -> Tensor | None:
    """The tokens that outputs continue: those of the decoder, if there is one."""
    found: dict[str, Tensor] = {}
    for name, value in _named(forward):
        if value.dim() != 2 or value.is_floating_point() or name in _LABELS or "position" in name:
            continue
        if value.shape[1] >= _LONGEST and int(value.max()) > 1:
            found[name] = value
    return found.get("decoder_input_ids", next(iter(found.values()), None))


def _named(forward: Forward) -> list[tuple[str, Tensor]]:
    """The tensors among the arguments, with the names that the forward gives them, or numbers."""
    args, kwargs = forward.arguments
    takes = inspect.signature(forward.module.forward).parameters.values()
    names = [one.name for one in takes if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    names += [str(i) for i in range(len(names), len(args))]
    named = [*zip(names, args, strict=False), *((str(k), x) for k, x in kwargs.items())]
    values = [(name, x.value() if isinstance(x, Kept) else x) for name, x in named]
    return [(name, x) for name, x in values if isinstance(x, Tensor) and not isinstance(x, Slot)]


class _Seen(TorchFunctionMode):
    """What a forward reads and makes of one number for each token, and the functions of torch that it calls."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape, self.found, self.functions = tuple(shape), list[Tensor](), set[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.functions.add(getattr(function, "__name__", ""))
        for x in (*args, *(kwargs or {}).values(), result):
            if type(x) is Tensor and x.shape == self.shape and not any(x is y for y in self.found):
                self.found.append(x)
        return result


def _of_rows(forward: Forward, way: Way) -> dict[str, bool | None]:
    """What is asked of a sequence of tokens: its padding, its documents, its positions and labels."""
    found: dict[str, bool | None] = {}
    named = _named(forward)
    if (main := _tokens(forward)) is None:
        main = next((x for _, x in named if x.dim() == 3 and x.is_floating_point()), None)
    if main is None or main.shape[1] < _LONGEST:
        return found
    each = [(name, x) for name, x in named if x.shape == main.shape[:2]]
    seen = _Seen(main.shape[:2])
    own = _run(forward, way, evaluates=True, seen=seen)
    real = next((r for x in (*(x for _, x in each), *seen.found) if (r := _real(x, main)) is not None), None)
    named_places = ((name, x) for name, x in each if "position" in name and not x.is_floating_point())
    kind, places = next(named_places, ("", None))
    counts = False
    if places is not None:
        inside = slice(None) if real is None else real[:, 1:] & real[:, :-1]
        counts = bool((places.diff(dim=1)[inside] == 1).float().mean() >= 0.5)
        if "position_ids" in kind:  # by another name they may be places in a picture, or come in another order
            found["uncounted"] = not counts
    parts = next((x for name, x in each if name in _DOCUMENTS), None)
    if parts is None and places is not None and counts and main.dim() == 2:
        parts = (places == 0).cumsum(1) if real is None else (places.eq(0) & real).cumsum(1)
    if parts is not None and main.dim() == 2:
        found["crosses"] = _crosses(forward, way, main, parts, own)
    if real is None and seen.functions & _ATTENDS and (filled := _filled(main)) is not None:
        found["unmasked"] = _reaches(forward, way, main, filled, own)
    if real is not None:
        labels = next((x for name, x in each if name in _LABELS and not x.is_floating_point()), None)
        if labels is not None:
            found["taught"] = bool(((labels >= 0) & ~real).sum() > 0.2 * (labels >= 0).sum())
        found |= _padding(forward, way, main, real, own, places is not None, seen.functions)
    return found


def _real(mask: Tensor, main: Tensor) -> Tensor | None:
    """True where a row has tokens of its own, if `mask` parts them from its padding in either sense."""
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        return None
    one = mask.bool()
    turns = (one[:, 1:] != one[:, :-1]).sum(1)
    if bool((turns > 1).any()) or not bool(turns.any()) or one.float().mean(1).unique().numel() < 2:
        return None
    for real in (one, ~one):
        behind, inside = main[~real], main[real]
        if bool((behind == behind[:1]).all()) and not bool((inside == inside[:1]).all()) and bool(real.any(1).all()):
            return real
    return None


def _filled(tokens: Tensor) -> Tensor | None:
    """True where rows of different lengths end, or begin, in one token that is rare elsewhere."""
    if tokens.dim() != 2 or tokens.is_floating_point():
        return None
    for turned in (tokens, tokens.flip(1)):
        same = turned == turned[:, -1].mode().values
        run = same.flip(1).cumprod(1).flip(1).bool()
        lengths, own = run.sum(1), ~run
        several = (lengths > 1).float().mean() >= 0.5 and lengths.unique().numel() > 2
        if several and bool(own.any(1).all()) and (same & own).sum() <= _INSIDE * own.sum():
            return run if turned is tokens else run.flip(1)
    return None


def _reaches(forward: Forward, way: Way, tokens: Tensor, filled: Tensor, own: list[Tensor]) -> bool | None:
    """Whether what fills the rows moves the outputs of their own tokens, or of rows that have but one."""
    others = tokens[~filled]
    changed = tokens.masked_scatter(filled, others[torch.arange(int(filled.sum())) % len(others)])
    for a, b in zip(own, _run(forward, way, _with(changed, tokens), evaluates=True), strict=False):
        if a.shape != b.shape or a.dim() < 2 or len(a) != len(tokens):
            continue
        rows = filled.sum(1) > 1
        if a.dim() > 2 and a.shape[:2] == tokens.shape:
            moved = _moved(a.flatten(0, 1), b.flatten(0, 1)).view(tokens.shape)
            return bool(moved[rows][~filled[rows]].float().mean() > 0.5)
        return bool(_moved(a, b)[rows].float().mean() > 0.5)
    return None


def _padding(
    forward: Forward, way: Way, main: Tensor, real: Tensor, own: list[Tensor], counted: bool, functions: set[str]
) -> dict[str, bool | None]:
    """Whether padding moves the outputs of a row's own tokens, and whether the mask hides these from each other."""
    length, lengths, attends = main.shape[1], real.sum(1), bool(functions & _ATTENDS)
    left = not bool(real[:, 0].all())
    rows = [int(i) for i in lengths.argsort()[:_ROWS] if 3 < lengths[i] < length]
    if len(main) == length or (left and not counted):
        return {}
    moves, stays = [], []
    for row in rows:
        span = slice(length - int(lengths[row]), None) if left else slice(0, int(lengths[row]))

        def alone(x: Tensor, row: int = row) -> Tensor:
            return x[row : row + 1] if x.dim() and x.shape[0] == len(main) else x

        def swapped(x: Tensor, row: int = row, span: slice = span) -> Tensor:
            most, changed = range(length)[span][:-1], main.clone()
            changed[row, most.start : most.stop] = main[row - 1, most.start : most.stop]
            return alone(_with(changed, main)(x), row)

        def cut(x: Tensor, row: int = row, span: slice = span) -> Tensor:
            # the last of three dimensions holds features; masks have four, or two
            dims = [d for d, n in enumerate(x.shape) if n == length and (x.dim() != 3 or d == 1)]
            x = alone(x, row)
            for dim in dims:
                x = x.transpose(0, dim)[span].transpose(0, dim)
            return x

        try:
            runs = [_run(forward, way, change, evaluates=True) for change in (alone, cut, swapped)]
        except Exception:  # a model of one length: other tokens take the place of the padding
            moved = None if main.is_floating_point() else _reaches(forward, way, main, ~real, own)
            return {} if moved is None else {"padding": attends and moved}
        others = not torch.equal(main[row, span], main[row - 1, span])
        for all_, one, short, other in zip(own, *runs, strict=False):
            if all_.dim() < 2 or all_.shape[0] != len(main) or len(short) != 1:
                continue
            a, b, c, d = all_[row], one[0], short[0], other[0]
            if a.dim() > 1 and len(a) == length:
                a, b, d = a[span], b[span], d[span]
                stays += [torch.equal(b[-1], d[-1])] if others else []
            if a.shape == b.shape == c.shape:
                # one scale for a tensor is another one for a row, so a cast by hand moves the row, too
                moves.append(not _distance(c, b) <= max(_ANOTHER, 4 * _distance(a, b)))
            break
    # without attention padding may be read on purpose, as by a recurrence from behind
    found: dict[str, bool | None] = {"padding": attends and sum(moves) > 0.5 * len(moves)} if moves else {}
    return found | ({"hidden": bool(functions & _ATTENTION) and all(stays)} if stays else {})


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.float(), b.float()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp_min(1e-30))


def _crosses(forward: Forward, way: Way, tokens: Tensor, parts: Tensor, own: list[Tensor]) -> bool | None:
    """Whether the last document of a row sees the first."""
    first, last = parts == parts[:, :1], parts == parts.amax(1, keepdim=True)
    changed = torch.where(first, tokens.roll(1, 1), tokens)
    several = ~(first & last).any(1) & (changed != tokens).any(1)
    if not bool(several.any()):
        return None

    for a, b in zip(own, _run(forward, way, _with(changed, tokens), evaluates=True), strict=False):
        if a.dim() >= 3 and a.shape[:2] == tokens.shape and a.shape == b.shape:
            moved = _moved(a.flatten(0, 1), b.flatten(0, 1)).view(tokens.shape)
            return bool((moved & last).any(1)[several].float().mean() > 0.5)
    return None


_UNKNOWN: MappingProxyType[str, bool | None] = MappingProxyType(dict.fromkeys(("mixes", "in_time")))


def _samples(forward: Forward, way: Way) -> dict[str, bool | None]:
    """Whether samples depend on others of their batch, and whether they are taken for steps of time."""
    inputs = [x.value() for x in leaves(forward.arguments) if isinstance(x, Kept)]
    main = next((x for x in inputs if x.dim() >= 3 or (x.dim() == 2 and not x.is_floating_point())), None)
    if main is None or len(main) < _FEWEST:
        return {**_UNKNOWN}
    square, own = main.shape[0] == main.shape[1], _run(forward, way, evaluates=True)

    def moved(change: Any, kept: Any, dim: int = 0, near: bool = False) -> bool | None:
        """Whether what `kept` takes of an output is other under a change of the inputs along a dimension.

        near: the first rows are enough, as where a state that is carried on fades."""

        def changed(x: Tensor) -> Tensor:
            return change(x.transpose(0, dim)).transpose(0, dim) if x.shape[: dim + 1] == main.shape[: dim + 1] else x

        for a, b in zip(own, _run(forward, way, changed, evaluates=True), strict=False):
            if a.dim() >= 2 + dim and a.shape == b.shape and a.shape[: dim + 1] == main.shape[: dim + 1]:
                a, b = a.transpose(0, dim), b.transpose(0, dim)
                rows = _moved(kept(a), kept(b)).float()
                fades = near and len(rows) > 2 and bool(rows[:2].all() and (rows.diff() <= 0).all())
                return fades or bool(rows.mean() > 0.5)
        return None

    def far(x: Tensor) -> Tensor:
        return x * _FAR if x.is_floating_point() and x.numel() == main.numel() else x

    def first(x: Tensor) -> Tensor:
        return x[: len(x) // 2]

    def last(x: Tensor) -> Tensor:
        return x[len(x) - len(x) // 2 :]

    # along a sequence what comes first moves what comes last; a sequence of batches is no batch
    along = moved(lambda x: torch.cat([far(last(x)), x[len(x) // 2 :]]), last, 1)
    if along is False or (square and not along):
        return {**_UNKNOWN}
    mixes = moved(lambda x: torch.cat([x[: len(x) - len(x) // 2], far(first(x))]), first)
    follows = mixes is False and moved(lambda x: torch.cat([far(last(x)), x[len(x) // 2 :]]), last, near=True)
    if mixes is not False or follows is not False:
        # an RNN without batch_first=True: a sample's own sequence says nothing but by its end
        in_time = follows and along is None and not _reads_along(forward, way, main, own)
        return {**_UNKNOWN, "mixes": None if mixes and square else mixes, "in_time": in_time or None}
    return {**_UNKNOWN, "mixes": mixes}


def _reads_along(forward: Forward, way: Way, main: Tensor, own: list[Tensor]) -> bool:
    """Whether the first half of the second dimension of an input moves an output."""
    half = main.shape[1] // 2
    changed = torch.cat([main[:, :half].roll(1, 0), main[:, half:]], 1)
    again = _run(forward, way, _with(changed, main), evaluates=True)
    return not half or any(a.shape == b.shape and bool(_moved(a, b).any()) for a, b in zip(own, again, strict=False))


def _moved(a: Tensor, b: Tensor) -> Tensor:
    """Whether each row moved."""
    size = a.float().square().mean().sqrt().clamp_min(1e-30)
    return ((a.float() - b.float()).abs().flatten(1).amax(1) > _MOVES * size) & b.isfinite().flatten(1).all(1)


def _run(
    forward: Forward,
    way: Way,
    change: Any = None,
    *,
    evaluates: bool = False,
    seen: _Seen | None = None,
) -> list[Tensor]:
    forward.around.restore(forward.module)

    def value(x: Any) -> Any:
        x = x.value() if isinstance(x, Kept) else x
        return change(x).contiguous() if change is not None and isinstance(x, Tensor) and not isinstance(x, Slot) else x

    args, kwargs = tree_map(value, forward.arguments)
    modes = [(m, m.training) for m in forward.module.modules()]
    if evaluates:
        forward.module.eval()
    try:
        around = forward.around
        under = under_ambient(way.ambient(around.ambient))
        with torch.no_grad(), under_autocasts(around.autocasts), under, way.on(), seen or nullcontext():
            return [x.detach() for x in tensors_in(forward.module(*args, **kwargs)) if x.is_floating_point()]
    finally:
        for module, mode in modes:
            module.training = mode
