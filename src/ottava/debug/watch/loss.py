"""Takes the loss from where every training loop has it: what `backward()` is called on.

While attached, `torch.autograd.backward`, which `Tensor.backward` calls, notes its roots first; and
`torch.amp.GradScaler.scale` notes what it multiplies, for the root then is the loss times its factor.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_Told = Callable[..., None]


class LossTap:
    """Hands every scalar loss to `seen` before its backward begins.

    Args:
        seen: called with a detached tensor of one element, on its device: reading it waits for the device.
        rooted: called with the root itself, for those who look at the graph behind it.

    Edge cases: roots that are no scalars (a pipeline stage hands back gradients) are passed over, and so is a backward
        inside a backward, as of reentrant checkpointing. A loop that divides its loss by the number of micro-batches
        has that quotient as its root. `torch.autograd.grad` is not a training step and is not seen, nor is a backward
        inside compiled code: hand its loss to `Watch.log`.

    Example:
        >>> losses = []
        >>> tap = LossTap(lambda loss: losses.append(loss.item()))
        >>> tap.attach()
        >>> (torch.ones(3, requires_grad=True) * 2).sum().backward()
        >>> tap.detach()
        >>> losses
        [6.0]
    """

    def __init__(self, seen: Callable[[Tensor], None], rooted: Callable[[Tensor], None] = lambda root: None) -> None:
        self._seen, self._rooted = seen, rooted
        self._active = False
        self._patches: list[tuple[Any, str, Any, Any]] = []
        self._unscaled: tuple[weakref.ref[Tensor], Tensor] | None = None

    def attach(self) -> None:
        """From now on losses are seen."""
        if self._active:
            return
        self._active = True
        if not self._patches:
            self._patch(torch.autograd, "backward", self._before_backward, None)
            self._patch(torch.amp.GradScaler, "scale", None, self._after_scale)

    def detach(self) -> None:
        """No more; torch is as it was. A function that somebody else has wrapped since stays wrapped, to no effect."""
        self._active, self._unscaled = False, None
        kept = []
        for owner, name, ours, original in self._patches:
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
            else:
                kept.append((owner, name, ours, original))
        self._patches = kept

    def _patch(
        self, owner: Any, name: str, before: Callable[..., None] | None, after: Callable[..., None] | None
    ) -> None:
        original = vars(owner)[name]

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None and self._active and not torch.compiler.is_compiling():
                before(*args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None and self._active and not torch.compiler.is_compiling():
                after(result, *args, **kwargs)
            return result

        setattr(owner, name, wrapped)
        self._patches.append((owner, name, wrapped, original))

    def _before_backward(self, tensors: Any = None, *_: Any, **__: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        roots: Iterable[Any] = (tensors,) if isinstance(tensors, Tensor) else tensors
        if not isinstance(roots, (tuple, list)):
            return  # a GradientEdge, or an error that torch will tell
        for root in roots:
            if isinstance(root, Tensor) and root.numel() == 1 and root.is_floating_point() and not root.is_meta:
                self._seen(self._as_it_was(root).detach())
                self._rooted(root)

    def _after_scale(self, result: Any, scaler: Any, outputs: Any, *_: Any, **__: Any) -> None:
        if isinstance(outputs, Tensor) and isinstance(result, Tensor) and result is not outputs:
            self._unscaled = (weakref.ref(result), outputs.detach())

    def _as_it_was(self, root: Tensor) -> Tensor:
        if self._unscaled is not None and self._unscaled[0]() is root:
            return self._unscaled[1]
        return root
