"""What a tap needs outside of layers: hooks on every module; dtype, numbers and place in the graph of an operand.

Dynamo guards compiled code on the numbers of the hooks that existed when it compiled. A hook that is registered again
for every step gets a new number each time. Every step would then compile again, until Dynamo gives up and runs eagerly.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from ottava.kernels.gate import no_autocast

_HIGH_PRECISION_INSIDE = MappingProxyType({"WeightWithDynamicFloat8CastTensor": "_tensor"})
"""Tensor classes that quantize themselves -> the attribute with the tensor before the cast."""
_EDGE_SEARCH = 64
"""Largest number of nodes to search in one layer's graph."""
_MADE_SEARCH = 8


def repeats_a_forward() -> bool:
    """Inside a backward: whether this forward already ran with a graph. Non-reentrant checkpointing repeats such a
    forward to unpack a saved tensor; reentrant checkpointing runs it because it has no graph yet."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "unpack_hook":
            return True
        frame = frame.f_back
    return False


def capturing() -> bool:
    """Whether nobody may keep a tensor: a CUDA graph is being captured, which would repeat what a tap does with the
    numbers of that moment; or a transform of torch.func runs, whose tensors end with it."""
    if torch._C._are_functorch_transforms_active():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast gives an operand; None: its own."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


@contextmanager
def unobserved(x: Tensor) -> Iterator[None]:
    """Hides operations on x: no graph, no autocast, no dispatch modes."""
    with torch.no_grad(), no_autocast(x.device), unseen_by_modes():
        yield


def unseen_by_modes() -> AbstractContextManager[object]:
    """Hides operations from dispatch modes. Selective checkpointing is one that counts operations; it would mistake
    those of a tap for the model's."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


SHARD = "is this rank's shard"


def plain(x: Tensor) -> tuple[Tensor | None, str]:
    """(x as a dense tensor with readable numbers, a remark or ""), or (None, the reason)."""
    kind, why = type(x).__name__, ""
    if torch._C._are_functorch_transforms_active() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return None, "is inside a transform of torch.func"  # whatever is computed there has no memory
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None, "is captured in a CUDA graph"
    if kind == "DTensor":
        placements: Any = x.placements  # type: ignore[attr-defined]
        why = "" if all(placement.is_replicate() for placement in placements) else SHARD
        x = x.to_local()  # type: ignore[attr-defined]
        kind = type(x).__name__
    if kind == "AsyncCollectiveTensor":
        x = x.trigger_wait()  # type: ignore[attr-defined]
    elif (inner := _HIGH_PRECISION_INSIDE.get(kind)) is not None:
        x = getattr(x, inner)
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or x.is_meta or x.layout != torch.strided:
        return None, f"is a {type(x).__name__} on {x.device}, {x.layout}".replace("torch.", "")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return None, f"is {x.dtype}, not a float of 16 or 32 bits".replace("torch.", "")
    if x.dim() == 0 or x.numel() == 0:
        return None, "" if x.dim() else "is a single number"
    x = x.detach()
    return (x.to(torch.float32), "is float64, measured as float32") if x.dtype == torch.float64 else (x, why)


def whole(y: Tensor) -> Tensor:
    """The tensor whose gradient the tap hooks: y itself, or its base if y is only a view of it.

    torch's linear returns a view of its 2-D result. An in-place operation on that view, such as nn.ReLU(inplace=True),
    cuts the view and its hooks out of the graph. The gradient of the 2-D result still arrives.
    """
    base = y._base
    if base is None or base.grad_fn is None or base.numel() != y.numel():
        return y
    return base if base.is_contiguous() and y.is_contiguous() else y


def edges_to(target: Tensor, output: Tensor, inputs: tuple[Tensor, ...] = ()) -> Iterator[tuple[Any, int]]:
    """(node, index) for nodes between output and target whose gradient number `index` goes to target. The search stops
    at the inputs, because a tied weight appears again behind them, at the embedding."""
    visited: set[Any] = {x.grad_fn for x in inputs}
    waiting: list[Any] = [output.grad_fn]
    while waiting and len(visited) < _EDGE_SEARCH:
        node = waiting.pop(0)
        if node is None or node in visited:
            continue
        visited.add(node)
        for index, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            if target.is_leaf:
                reached = getattr(following, "variable", None) is target
            else:
                reached = following is target.grad_fn and number == target.output_nr
            if reached:
                yield node, index
            else:
                waiting.append(following)


_PLUMBING = re.compile(
    "(ToCopy|T|Transpose|Permute|View|UnsafeView|ReshapeAlias|Unsqueeze|Squeeze|Expand|Slice|Split|SplitWithSizes"
    "|Chunk|Alias|Clone|Index|Cat|NativeDropout|BernoulliScalar)"
)
"""Operations to look behind for the one that made the numbers."""


def made_by(x: Tensor) -> str:
    """The operation that made an operand, from the graph: "gelu", "silu * linear", "native_layer_norm"; "" if unknown.

    Example:
        >>> made_by(torch.nn.functional.gelu(torch.ones(2, 2, requires_grad=True)).view(4))
        'gelu'
    """
    node, name = x.grad_fn, ""
    for _ in range(_MADE_SEARCH):
        if node is None:
            return ""
        name = _operation(node)
        inputs = [following for following, _ in node.next_functions if following is not None]
        if not _PLUMBING.fullmatch(name) or not inputs:
            break
        node = inputs[0]
    factors = [_operation(following) for following, _ in node.next_functions if following is not None] if node else []
    words = [re.sub(r"(?<!^)(?=[A-Z])", "_", word).lower() for word in [name, *factors]]
    gate = next((word for word in words[1:] if word in ("silu", "gelu", "sigmoid", "relu")), "")
    return f"{gate} * gate" if words[0] == "mul" and gate else "" if words[0].startswith("accumulate") else words[0]


def _operation(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", str(node.name()).rpartition("::")[2])


Before = Callable[[nn.Module, Any], None]
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
Left = Callable[[nn.Module, Any, Any], None]


class Hook:
    """What torch calls while a watch runs. In a copy of a model and in its pickle nothing is left of it to call.

    Example:
        >>> import copy, pickle
        >>> hook = Hook(lambda module: module.upper())
        >>> hook("fc1"), copy.deepcopy(hook)("fc1"), pickle.loads(pickle.dumps(hook))("fc1")
        ('FC1', None, None)
    """

    __slots__ = ("_run",)

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._run(*given, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(lambda *_: None)

    def __reduce__(self) -> tuple[Any, ...]:
        # where a model is loaded nobody may have ottava: this part of Python takes any arguments and returns None
        return functools.partial, (sys.audit, "copied hook")


class GlobalHooks:
    """Hooks on every module of the process, with numbers that never change.

    Args:
        before: called with (module, args) before every forward.
        after: called with (module, args, kwargs, output) after it, unless the forward raised.
        left: called with (module, args, output) last; output is None if the forward raised.

    All must begin with `if torch.compiler.is_compiling(): return`, because Dynamo traces them.

    Example:
        >>> import torch
        >>> seen = []
        >>> hooks = GlobalHooks(lambda module, args: None, lambda module, args, kwargs, output: seen.append(module))
        >>> layer = nn.Linear(2, 2)
        >>> for attached in (True, False, True):
        ...     (hooks.attach if attached else hooks.detach)()
        ...     _ = layer(torch.ones(1, 2))
        >>> hooks.detach()
        >>> len(seen)
        2
    """

    def __init__(self, before: Before, after: After, left: Left | None = None) -> None:
        self._before, self._after, self._left = before, after, left
        self._handles: tuple[RemovableHandle, ...] = ()
        self.attached = False

    def attach(self) -> None:
        """Starts calling the hooks."""
        if self.attached:
            return
        self.attached = True
        if not self._handles:
            before = register_module_forward_pre_hook(self._before)
            self._handles = before, register_module_forward_hook(self._after, with_kwargs=True)
            if self._left is not None:
                self._handles += (register_module_forward_hook(self._left, always_call=True),)
            return
        first, second, *third = self._handles
        torch_module._global_forward_pre_hooks[first.id] = self._before
        torch_module._global_forward_hooks[second.id] = self._after
        torch_module._global_forward_hooks_with_kwargs[second.id] = True
        for handle in third:
            assert self._left is not None
            torch_module._global_forward_hooks[handle.id] = self._left
            torch_module._global_forward_hooks_always_called[handle.id] = True

    def detach(self) -> None:
        """Removes every trace of the hooks from torch."""
        self.attached = False
        for handle in self._handles:
            handle.remove()
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch forgets this one
