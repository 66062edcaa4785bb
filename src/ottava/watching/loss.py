"""Finds the loss of any training loop: the tensor on which `backward()` is called.

The tap patches `torch.autograd.backward`, which `Tensor.backward` calls, to see its roots; and
`torch.amp.GradScaler.scale` to see the unscaled loss, because with it the root is the loss times a factor.
"""

from __future__ import annotations

import functools
import math
import statistics
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ottava.base.errors import Guard

Share = float | Tensor | None


class LossTap:
    """Calls `seen` with every scalar loss before its backward begins.

    Args:
        seen: called with a detached tensor of one element, on its device (reading it waits for the device), and with
            what it is times the mean over its labels: 1 for a mean, 1/4 where a loop divides by four micro-batches.
            A number, a tensor, or None where the graph does not say.
        rooted: called before a backward with all its roots, which lead to the graph.
        ended: called when a backward has ended and every gradient is in place, with the factor of a GradScaler, or
            None.
        began: called with every root, also one that is no scalar: the root, the unscaled loss, the gradient that the
            backward begins with, and whether the graph is retained.
        guard: wraps what a backward calls.

    Edge cases: ignores roots that are no scalars (a pipeline stage passes gradients on), and a backward inside a
        backward (reentrant checkpointing). It does not see `torch.autograd.grad`, which is no training step, nor a
        backward inside compiled code: give that loss to `Watch.log`.

    Example:
        >>> losses = []
        >>> tap = LossTap(lambda loss, share: losses.append((loss.item(), share)))
        >>> tap.attach()
        >>> (torch.ones(3, requires_grad=True) * 2).sum().backward()
        >>> (torch.nn.functional.mse_loss(torch.ones(3, requires_grad=True), torch.zeros(3)) / 4).backward()
        >>> tap.detach()
        >>> losses
        [(6.0, None), (0.25, 0.25)]
    """

    def __init__(
        self,
        seen: Callable[[Tensor, Share], None],
        rooted: Callable[[list[Tensor]], None] = lambda roots: None,
        ended: Callable[[Tensor | None], None] = lambda scale: None,
        began: Callable[[Tensor, Tensor, Tensor | None, bool], None] = lambda root, loss, gradient, retain: None,
        guard: Guard = lambda hook: hook,
    ) -> None:
        self._guard = guard
        self._seen, self._rooted, self._ended, self._began = seen, rooted, ended, began
        self._active = False
        self._patches: list[tuple[Any, str, Any, Any]] = []
        self._unscaled: tuple[weakref.ref[Tensor], Tensor, Tensor | None] | None = None
        self._scale: Tensor | None = None

    def attach(self) -> None:
        """Starts calling `seen`."""
        if self._active:
            return
        self._active = True
        if not self._patches:
            self._patch(torch.autograd, "backward", self._before_backward, self._after_backward)
            self._patch(torch.amp.GradScaler, "scale", None, self._after_scale)

    def detach(self) -> None:
        """Stops and restores torch's functions. If others wrapped one since, our wrapper stays inside it, idle."""
        self._active, self._unscaled = False, None
        wrapped = []
        for owner, name, ours, original in self._patches:
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
            else:
                wrapped.append((owner, name, ours, original))
        self._patches = wrapped

    def _patch(
        self, owner: Any, name: str, before: Callable[..., None] | None, after: Callable[..., None] | None
    ) -> None:
        original = vars(owner)[name]
        before, after = before and self._guard(before), after and self._guard(after)

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

    def _before_backward(
        self, tensors: Any = None, grad_tensors: Any = None, retain_graph: Any = None, *_: Any, **__: Any
    ) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        roots: Iterable[Any] = (tensors,) if isinstance(tensors, Tensor) else tensors
        if not isinstance(roots, (tuple, list)):
            return  # a GradientEdge, or an error that torch will raise
        self._scale = None
        gradients = grad_tensors if isinstance(grad_tensors, (tuple, list)) else [grad_tensors] * len(roots)
        for i, (root, gradient) in enumerate(zip(roots, gradients, strict=False)):
            if isinstance(root, Tensor):
                self._began(root, self._as_it_was(root), gradient, bool(retain_graph) or i + 1 < len(roots))
        usable = [x for x in roots if isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta]
        for root in usable:
            if root.numel() == 1:
                loss = self._as_it_was(root)
                # behind the scaler's factor the graph goes on
                node = root.grad_fn if loss is root or root.grad_fn is None else root.grad_fn.next_functions[0][0]
                self._seen(loss.detach(), _share(node))
        self._rooted(usable)

    def _after_backward(self, *_: Any, **__: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            scale, self._scale = self._scale, None
            self._ended(scale)

    def _after_scale(self, result: Any, scaler: Any, outputs: Any, *_: Any, **__: Any) -> None:
        if isinstance(outputs, Tensor) and isinstance(result, Tensor) and result is not outputs:
            self._unscaled = (weakref.ref(result), outputs.detach(), getattr(scaler, "_scale", None))

    def _as_it_was(self, root: Tensor) -> Tensor:
        if self._unscaled is not None and self._unscaled[0]() is root:
            self._scale = self._unscaled[2]
            return self._unscaled[1]
        return root


def of_step(parts: Sequence[float], shares: Sequence[float], how: str = "auto") -> float:
    """The loss of a step, from the losses of its micro-batches and what each is times a mean over its labels.

    Where the shares add to about one, and not to their number, the loop has divided.

    Example:
        >>> of_step([3.0, 5.0], [1.0, 1.0]), of_step([1.5, 2.5], [0.5, 0.5]), of_step([3.0, 5.0], [math.nan, math.nan])
        (4.0, 4.0, 4.0)
    """
    total = math.fsum(shares)
    divided = len(parts) > 1 and 0.5 < total < math.sqrt(len(parts))
    if how == "sum" or (how == "auto" and divided):
        return math.fsum(parts) / (total if how == "auto" else 1)
    return statistics.fmean(parts)


def _share(node: Any) -> Share:
    """What a loss is times the mean over its labels, from the products and sums between it and the reduction."""
    share: float | Tensor = 1.0
    for _ in range(64):  # nodes; a loss is a few operations behind its reduction
        if node is None:
            return None
        try:
            target, reduction = getattr(node, "_saved_target", None), getattr(node, "_saved_reduction", None)
            other = getattr(node, "_saved_other", None)
        except RuntimeError:  # the graph was freed
            return None
        if isinstance(target, Tensor):
            counted: Any = target.numel()
            if (ignored := getattr(node, "_saved_ignore_index", None)) is not None and not target.is_floating_point():
                counted = (target != (ignored if ignored < 1 << 63 else ignored - (1 << 64))).sum()
            return share if reduction == 1 else share * counted if reduction == 2 else None
        if node.name().startswith("Mean"):
            return share
        following = [after for after, _ in node.next_functions if after is not None]
        if node.name().startswith(("Div", "Mul")):
            if len(following) != 1 or not isinstance(other, Tensor) or other.numel() != 1:
                return None
            with _disable_current_modes():  # a number of Python comes to a mode as no tensor
                factor = other.detach() if other.device.type != "cpu" else float(other)
            if isinstance(factor, float) and not factor:
                return None
            share = share / factor if node.name().startswith("Div") else share * factor
        node = following[0] if following else None
    return None
