"""Logic of a forward, tried: what an output may depend on, whatever the numbers are.

    sees_later    a sequence's later tokens are changed: does the output before them move?
    mixes         the second half of a batch is replaced: does the output of the first half move?
    by_place      the samples come in another order: are their outputs others, though neither half moves the other?

All run a captured forward again without casts, with the same random state, once as it ran and once with the change. A
sample's output is asked in evaluation mode, where a batch norm takes no statistics from its neighbours. None is a
fault by itself: a model of masked words sees both sides. `diagnose.laws` says when it is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ottava.experiments.program import Forward, Slot, Way, leaves, tensors_in, tree_map
from ottava.experiments.snapshot import Kept, under_ambient, under_autocasts

_FEWEST, _LONGEST = 4, 6  # samples of a batch, tokens of a sequence
_MOVES = 1e-4  # of the root mean square: equal rows in equal shapes give equal sums
_FAR = -4.0  # factor of numbers that replace others: a softmax of small scores hardly moves else
_LABELS = ("label", "labels", "target", "targets")


def reasons(forwards: Sequence[Forward], way: Way) -> dict[str, bool | None]:
    """What was tried with the first forward, and None for what has no meaning there.

    Args:
        forwards: of a captured step.
        way: without casts: one scale for a tensor lets every element depend on every other one.

    Example:
        >>> from ottava.experiments.program import AS_IT_RAN, Recorder
        >>> model = torch.nn.Sequential(torch.nn.Flatten(1), torch.nn.Linear(6, 2))
        >>> recorder = Recorder([model])
        >>> _ = model(torch.randn(8, 3, 2))
        >>> reasons(recorder.finish().forwards, AS_IT_RAN)
        {'sees_later': None, 'mixes': False, 'by_place': False}
    """
    first = next((f for f in forwards if not f.chained), None)
    if first is None:
        return dict.fromkeys(("sees_later", "mixes", "by_place"))
    mixes, by_place = _samples(first, way)
    return {"sees_later": _sees_later(first, way), "mixes": mixes, "by_place": by_place}


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

    def other(x: Tensor) -> Tensor:
        return changed if x.shape == tokens.shape and x.dtype == tokens.dtype and torch.equal(x, tokens) else x

    one, two = _run(forward, way), _run(forward, way, other)
    for a, b in zip(one, two, strict=False):
        if a.dim() >= 3 and a.shape[:2] == tokens.shape and a.shape == b.shape:
            moved = _moved(a[:, half - 1], b[:, half - 1])
            differ = changed[:, half] != tokens[:, half]
            return bool(moved[differ].float().mean() > 0.5)
    return None


def _tokens(forward: Forward) -> Tensor | None:
    """The tokens that outputs continue: those of the decoder, if there is one."""
    args, kwargs = forward.arguments
    named = [(str(i), x) for i, x in enumerate(args)] + [(str(k), x) for k, x in kwargs.items()]
    found: dict[str, Tensor] = {}
    for name, x in named:
        value = x.value() if isinstance(x, Kept) else x
        if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point() or name in _LABELS:
            continue
        if value.shape[1] >= _LONGEST and int(value.max()) > 1:
            found[name] = value
    return found.get("decoder_input_ids", next(iter(found.values()), None))


def _samples(forward: Forward, way: Way) -> tuple[bool | None, bool | None]:
    """Whether samples depend on others of their batch, and whether on their place in it."""
    inputs = [x.value() for x in leaves(forward.arguments) if isinstance(x, Kept)]
    main = next((x for x in inputs if x.dim() >= 3 or (x.dim() == 2 and not x.is_floating_point())), None)
    if main is None or len(main) < _FEWEST:
        return None, None
    square, own = main.shape[0] == main.shape[1], _run(forward, way, evaluates=True)

    def moved(change: Any, kept: Any, dim: int = 0, again: Any = None) -> bool | None:
        """Whether what `kept` takes of an output is other under a change of the inputs along a dimension."""

        def changed(x: Tensor) -> Tensor:
            return change(x.transpose(0, dim)).transpose(0, dim) if x.shape[: dim + 1] == main.shape[: dim + 1] else x

        for a, b in zip(own, _run(forward, way, changed, evaluates=True), strict=False):
            if a.dim() >= 2 + dim and a.shape == b.shape and a.shape[: dim + 1] == main.shape[: dim + 1]:
                a, b = a.transpose(0, dim), b.transpose(0, dim)
                return bool(_moved(kept(a), (again or kept)(b)).float().mean() > 0.5)
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
        return None, None
    mixes = moved(lambda x: torch.cat([x[: len(x) - len(x) // 2], far(first(x))]), first)
    if mixes is not False or moved(lambda x: torch.cat([far(last(x)), x[len(x) // 2 :]]), last) is not False:
        return None if mixes and square else mixes, None
    return mixes, moved(_turned, _turned, again=lambda x: x)


def _turned(x: Tensor) -> Tensor:
    return x.roll(1, 0)


def _moved(a: Tensor, b: Tensor) -> Tensor:
    """Whether each row moved."""
    size = a.float().square().mean().sqrt().clamp_min(1e-30)
    return ((a.float() - b.float()).abs().flatten(1).amax(1) > _MOVES * size) & b.isfinite().flatten(1).all(1)


def _run(forward: Forward, way: Way, change: Any = None, *, evaluates: bool = False) -> list[Tensor]:
    forward.around.restore(forward.module)

    def value(x: Any) -> Any:
        x = x.value() if isinstance(x, Kept) else x
        return change(x) if change is not None and isinstance(x, Tensor) and not isinstance(x, Slot) else x

    args, kwargs = tree_map(value, forward.arguments)
    modes = [(m, m.training) for m in forward.module.modules()]
    if evaluates:
        forward.module.eval()
    try:
        around = forward.around
        under = under_ambient(way.ambient(around.ambient))
        with torch.no_grad(), under_autocasts(around.autocasts), under, way.on():
            return [x.detach() for x in tensors_in(forward.module(*args, **kwargs)) if x.is_floating_point()]
    finally:
        for module, mode in modes:
            module.training = mode
