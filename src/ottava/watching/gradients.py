"""The norm of a step's gradients: before anybody clips them, and as the optimizer gets them.

The first is read when a backward has ended, the second before the optimizer steps: at looks, and between them where a
gradient is another tensor or its version has moved. `p.grad.data.clamp_()`, a GradScaler and an all-reduce move none;
where a look finds that, all steps read both.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ottava.experiments.snapshot import stepped_by
from ottava.watching.operands import plain


def dense(x: Tensor | None) -> Tensor | None:
    """The tensor with readable numbers, as `plain` gives it, also one of a single number; None if it has none."""
    if x is None:
        return None
    if type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and x.is_floating_point() and not x.is_meta:
        return x if x.numel() else None
    return plain(x)[0]


class Gradients:
    """Norms of the gradients since the last step.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> gradients = Gradients()
        >>> (3 * weight).sum().backward()
        >>> gradients.note([weight])
        >>> _ = torch.nn.utils.clip_grad_norm_([weight], 1.5)
        >>> {name: round(norm.item(), 3) for name, norm in gradients.norms(optimizer, [weight], {}).items()}
        {'grad_norm_used': 1.5, 'grad_norm': 6.0}
    """

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._found: list[tuple[weakref.ref[Tensor], int]] = []
        """Each gradient as the backward left it, and its version."""
        self._told = True
        """Whether every change since then was one that the versions tell."""
        self._norms: list[Tensor] = []
        self._scale: Tensor | None = None
        self._last = 0
        self._together: dict[int, list[weakref.ref[Optimizer]]] = {}

    def note(self, parameters: Sequence[Tensor], scale: Tensor | None = None) -> None:
        """Reads the gradients of these parameters. scale: a factor in them."""
        usable = [(p, g) for p in parameters if (g := dense(p.grad)) is not None]
        self._place = {id(p): i for i, (p, _) in enumerate(usable)}
        self._norms = _norms([g for _, g in usable])
        self._found = [(weakref.ref(g), _version(g)) for p, _ in usable if (g := p.grad) is not None]
        self._scale = None if scale is None else scale.detach().clone()

    def joins(self, optimizer: Optimizer) -> None:
        """This optimizer steps after the one that ended the step. From now on its gradients belong to that step."""
        together = self._together.setdefault(self._last, [])
        if id(optimizer) != self._last and not any(ref() is optimizer for ref in together):
            together.append(weakref.ref(optimizer))

    def norms(
        self, optimizer: Optimizer, usable: Sequence[Tensor], old: Mapping[str, Tensor], look: bool = True
    ) -> dict[str, Tensor]:
        """ "grad_norm", if a backward was seen, and "grad_norm_used", joined with those of earlier optimizers.

        Args:
            usable: the parameters of the optimizer that have a gradient.
            old: numbers of the step so far.
            look: whether to read gradients whose versions have not moved.
        """
        self._last = id(optimizer)
        others = [other for ref in self._together.get(id(optimizer), ()) if (other := ref()) is not None]
        own = [*usable, *(p for other in others for p in stepped_by(other) if p.grad is not None)]
        kept = [self._norms[self._place[id(p)]] for p in own] if self._told and all(map(self._is_as_found, own)) else []
        read = kept if kept and not look else _norms([g for p in own if (g := dense(p.grad)) is not None])
        if kept and look:
            pairs = zip(kept, read, strict=True)
            self._told = all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in pairs)
        # a fused optimizer divides by its grad_scale
        found = {"grad_norm_used": _joined(read, getattr(optimizer, "grad_scale", None))}
        if self._norms:
            some = [self._norms[self._place[id(p)]] for p in own if id(p) in self._place]
            # an optimizer of copies holds none of the model's parameters: theirs is the norm before clipping
            found["grad_norm"] = _joined(some or self._norms, self._scale)
        elif not own:
            found["grad_norm"] = found["grad_norm_used"]
        return {name: torch.hypot(old[name], new) if name in old else new for name, new in found.items()}

    def total(self) -> dict[str, Tensor]:
        """ "grad_norm" of all that the last backward left, if one was seen."""
        return {"grad_norm": _joined(self._norms, self._scale)} if self._norms else {}

    def drain(self) -> None:
        """The step has ended."""
        self._place, self._found, self._norms, self._scale = {}, [], [], None

    def _is_as_found(self, p: Tensor) -> bool:
        if (i := self._place.get(id(p))) is None or (g := p.grad) is None:
            return False
        known, version = self._found[i]
        return known() is g and 0 <= version == _version(g)


def _version(gradient: Tensor) -> int:
    return -1 if gradient.is_inference() else gradient._version


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each, in fp32 or wider."""
    if not gradients:
        return []
    wide = any(g.dtype == torch.float64 for g in gradients)
    return [*torch._foreach_norm(list(gradients), 2, torch.float64 if wide else torch.float32)]


def _joined(norms: Sequence[Tensor], scale: Any) -> Tensor:
    """fp32 (1,): the norm of all, without a factor in them."""
    if not norms:
        return torch.zeros(1, dtype=torch.float32)
    device = norms[0].device
    whole: Tensor = (
        torch.stack([x if x.device == device else x.to(device) for x in norms]).norm().to(torch.float32).reshape(1)
    )
    return torch.div(whole, scale.to(device)) if isinstance(scale, Tensor) else whole
