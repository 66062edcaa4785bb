"""Finds the first operation of a step whose result is not finite although what it reads is.

The step runs once more under a TorchDispatchMode, which sees every operation of forward and backward. An infinity that
an operation was told to write, as a mask of attention, does not count; a NaN always does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ottava.experiments.handmade import NARROW
from ottava.experiments.passes import AS_IT_RAN, Player, Way
from ottava.experiments.shadow import local


def first_nonfinite(player: Player, name_of: Callable[[nn.Module], str], *, tail: bool) -> dict[str, Any] | None:
    """module, operation, operand and direction of the first non-finite result; None: all results are finite."""
    seer = _Seer()
    modules = [m for module in player.program.modules for m in module.modules()]
    with _named(modules, name_of, seer):
        player.run(Way(AS_IT_RAN.ambient, lambda: seer.watching()), tail=tail)
    return seer.found


class _Seer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] | None = None
        self.path: list[str] = []
        self.backward = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = [] if self.found else _read(args, kwargs)
        result = func(*args, **kwargs)
        # memory that nobody has written yet holds anything
        if self.found is None and "empty" not in str(func):
            wrong = [x for x in pytree.tree_leaves(result) if _is_float(x) and not bool(x.isfinite().all())]
            if wrong and (operand := _innocent(before, wrong, args, kwargs)) is not None:
                back = torch._C._current_graph_task_id() != -1
                self.found = {
                    "module": self.backward if back else (self.path[-1] if self.path else ""),
                    "operation": _operation(func, args, kwargs),
                    "operand": operand,
                    "direction": "backward" if back else "forward",
                    "value": "nan" if any(bool(x.isnan().any()) for x in wrong) else "inf",
                    "first": True,
                }
        return result


def _operation(func: Any, args: Any, kwargs: Any) -> str:
    narrow = [x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dtype in NARROW]
    name = str(func).removeprefix("aten.").split(".")[0]
    return f"the conversion from {str(narrow[0]).removeprefix('torch.')}" if name == "_to_copy" and narrow else name


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0 and not x.is_meta and x.itemsize > 1


def _read(args: Any, kwargs: Any) -> list[tuple[float, bool]]:
    """amax of every tensor that an operation reads, and whether it has a NaN."""
    tensors = [local(x).detach() for x in pytree.tree_leaves((args, kwargs)) if _is_float(x)]
    return [(float(x.abs().nan_to_num(0.0, math.inf).max()), bool(x.isnan().any())) for x in tensors]


def _innocent(before: Sequence[tuple[float, bool]], wrong: Sequence[Tensor], args: Any, kwargs: Any) -> str | None:
    """The operand with the largest magnitude if the operands did not bring the fault with them; else None."""
    asked = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, float) and not math.isfinite(x)]
    brought = any(nan for _, nan in before)
    infinite = bool(asked) or any(math.isinf(amax) for amax, _ in before)
    new_nan = any(bool(x.isnan().any()) for x in wrong)
    if brought or (infinite and not new_nan):
        return None
    if not before:
        return ""
    index = max(range(len(before)), key=lambda i: before[i][0])
    return f"tensor {index + 1} of {len(before)}, amax {before[index][0]:.4g}"


@contextmanager
def _named(modules: Sequence[nn.Module], name_of: Callable[[nn.Module], str], seer: _Seer) -> Iterator[None]:
    """Tells the seer which module runs."""
    handles: list[Any] = []

    def enter(module: nn.Module, *_: Any) -> None:
        seer.path.append(name_of(module))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if seer.path:
            seer.path.pop()
        name = name_of(module)
        for x in pytree.tree_leaves(output):
            if isinstance(x, Tensor) and x.requires_grad and not module._modules:
                x.register_hook(lambda g: setattr(seer, "backward", name))

    for module in modules:
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
