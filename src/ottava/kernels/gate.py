"""The only gate between a tensor and C++ or Triton code that reads its memory, and between such code and a graph.

C++ trusts an address. A DTensor, a fake or sparse tensor and a tensor that torch.func wraps have no address of their
numbers, and code that reads there crashes the interpreter. So the gate refuses each of them with a reason. For a
plain tensor it checks exact type, device and address, in about 0.1 us. Code that runs in every step makes the same
check inline, `type(x) in PLAIN and address(x) > LOWEST`, and calls the gate only for a tensor that fails it.

Two decorators make a function one opaque node of a compiled graph, or a constant in it. `torch.library.custom_op` adds
ten Python calls around each of ours, which takes three times as long: a layer runs seven operators a step, and a small
layer has short GEMMs. `torch.compiler.assume_constant_result` imports Dynamo, which takes longer than all of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

LOWEST = 1 << 40
"""The gate checks a lower address closely: a tensor without memory has its offset as address."""


PLAIN = (Tensor, Parameter)
"""The exact types of tensors whose numbers lie at their address."""
address = Tensor.data_ptr
"""For a tensor that has passed `refusal`, or that the caller has just made: it checks nothing."""


def refusal(x: Tensor, *others: Tensor) -> str | None:
    """Why only torch's own operations can read one of these tensors; None if their numbers lie at their addresses, on
    any device.

    Raises:
        TypeError: ottava cannot compute with such a tensor, not even by torch's operations: a DTensor, a sparse, nested
            or MKLDNN layout, or freed memory.

    Example:
        >>> refusal(torch.ones(2)), refusal(torch.ones(2, dtype=torch.complex64).conj().imag)
        (None, 'got a tensor that is negated when it is read')
    """
    for tensor in (x, *others):
        kind = type(tensor)
        if kind is Tensor or kind is Parameter:
            try:
                # about 0.1 us: exact types first, because `isinstance` lets subclasses through, and these have no
                # address
                if tensor.data_ptr() > LOWEST and not tensor.is_neg() and not tensor.is_nested:
                    continue
            except RuntimeError:  # it has no storage
                pass
        if reason := _closely(tensor):
            return reason
    return None


def is_plain(x: Tensor) -> bool:
    """Whether the numbers of a tensor lie at its address; False too if `refusal` raises."""
    try:
        return refusal(x) is None
    except TypeError:
        return False


def pointer(x: Tensor | None) -> int:
    """The address of a plain tensor in the memory of the CPU, for C++; 0 for None and for a tensor without elements.

    Raises:
        TypeError: any other tensor. Negated and nested tensors pass: their bits lie there, and `refusal` names them.

    Example:
        >>> pointer(torch.ones(2, device="meta"))
        Traceback (most recent call last):
        ...
        TypeError: ottava's C++ kernels read the memory of a CPU; got a tensor on meta
    """
    kind = type(x)
    if (kind is Tensor or kind is Parameter) and x.is_cpu:  # type: ignore[union-attr]
        try:
            if (address := x.data_ptr()) > LOWEST:  # type: ignore[union-attr]
                return address
        except RuntimeError:  # it has no storage
            pass
    if x is None:
        return 0
    if not x.is_cpu:
        raise TypeError(f"ottava's C++ kernels read the memory of a CPU; got a tensor on {x.device}")
    # C++ that reads bits (checksums, copies) may read negated ones; who reads numbers has asked `refusal`
    if (reason := _closely(x)) is not None and not x.is_neg():
        raise TypeError(f"ottava's C++ kernels read plain tensors; {reason}")
    return x.data_ptr()


def launched(*tensors: Tensor | None) -> None:
    """Checks the tensors of a Triton launch, all on one device; None stands for a missing one.

    Raises:
        TypeError: `refusal` refuses a tensor, or they are on several devices.
    """
    given = [x for x in tensors if x is not None]
    if given and (reason := refusal(*given)):
        raise TypeError(f"ottava's Triton kernels read plain tensors; {reason}")
    if len(devices := {x.device for x in given}) > 1:
        raise TypeError(f"ottava's Triton kernels read one device; got tensors on {', '.join(map(str, devices))}")


def applied(function: type[torch.autograd.Function], *arguments: object) -> Any:
    """`function.apply(*arguments)`, and a sentence where torch has an internal one.

    Raises:
        NotImplementedError: inside torch.func (vmap, grad, jvp, ...) or torch.jit.trace.

    Example:
        >>> class Twice(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        >>> applied(Twice, torch.ones(2))
        tensor([2., 2.])
    """
    try:
        return function.apply(*arguments)
    except RuntimeError:
        refuse_transforms()
        raise


def mapped(there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """`there(x)`, whose gradient is `back(gradient)`: one operation for autograd. Raises as `applied`.

    Example:
        >>> mapped(torch.round, lambda dy: dy, torch.ones(2, requires_grad=True))
        tensor([1., 1.], grad_fn=<_MappedBackward>)
    """
    return applied(_Mapped, there, back, x)


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.back(grads[0])


def refuse_transforms() -> None:
    """For a Function that raised.

    Raises:
        NotImplementedError: inside torch.func or torch.jit.trace.
    """
    traces = torch._C._get_tracing_state() is not None
    if traces or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"ottava: got a call inside {'torch.jit.trace' if traces else 'torch.func (vmap, grad, jvp, ...)'}, which "
            "has no rule for casts; use torch.autograd.grad, a loop over the samples, torch.compile or torch.export, "
            "or run that forward under ottava.autocast(enabled=False)"
        ) from None


def dense(caller: str, x: Any) -> torch.Size:
    """The shape of an input.

    Raises:
        TypeError: it is no tensor, or a nested one.

    Example:
        >>> dense("Linear", [1.0])
        Traceback (most recent call last):
        TypeError: Linear: got a list; needs a dense torch.Tensor
    """
    if not isinstance(x, Tensor) or x.is_nested:
        got = "None" if x is None else "a nested tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise TypeError(f"{caller}: got {got}; needs a dense torch.Tensor")
    return x.shape


def aligned(x: Tensor, to: int) -> bool:
    """Whether the address of a tensor, on any device, is a multiple of `to` bytes."""
    return x.data_ptr() % to == 0


def _closely(x: Tensor) -> str | None:
    """As `refusal`, for a tensor that failed the quick check."""
    kind = type(x)
    if hasattr(x, "device_mesh"):
        raise TypeError(
            f"got a {kind.__name__}; this rank holds only a part of it. Split its layer with the styles of "
            "ottava.distributed, or with torch's before ottava.convert; or shard weights with "
            "torch.distributed.fsdp.fully_shard, which gathers them before they are read"
        )
    if x.is_nested or x.layout is not torch.strided:
        layout = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        raise TypeError(f"got {layout}; casts and GEMMs take dense matrices: make one of it, as x.to_dense() does")
    if kind is not Tensor and kind is not Parameter:
        return f"got a {kind.__name__}, a subclass of torch.Tensor"
    if x.is_meta:
        return "got a tensor on meta, which has no memory"
    if x.numel() == 0:
        return None
    try:
        # FSDP frees a parameter by resizing its storage to 0: the tensor keeps its shape, and its address would be read
        address, held = x.data_ptr(), x.untyped_storage().nbytes()
    except RuntimeError:
        address, held = 0, -1
    if held == 0:
        raise TypeError("got a tensor whose memory has been freed (its storage has 0 bytes), as FSDP does after use")
    if address == 0:
        return "got a tensor without memory, as torch.func (vmap, grad, functionalize) makes them"
    return "got a tensor that is negated when it is read" if x.is_neg() else None


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turns torch.autocast off for operations with explicit dtypes: it must not make fp32 accumulation BF16."""
    # under autocast torch would cast the fp32 operands of an emulated GEMM to BF16
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


# --- operators that a compiled graph does not look into, and its constants --------------------------------------------


Run = TypeVar("Run", bound=Callable[..., Any])


def constant_in_graph(function: Run) -> Run:
    """Decorates a function that runs while torch.compile traces; its result becomes a constant of the graph.

    `torch.compiler.assume_constant_result` sets the same mark, but imports Dynamo.

    Example:
        >>> @constant_in_graph
        ... def limit():
        ...     return 448
        >>> limit()
        448
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo's own name for the mark
    return function


def custom_operator(schema: str, fake: Callable[..., Any], *tags: torch.Tag) -> Callable[[Run], Run]:
    """Makes a function the implementation of `torch.ops.ottava.NAME` on any device, and returns it unchanged.

    Args:
        schema: "NAME(Tensor x, str spec) -> Tensor", as torch writes it. The function must not write to an argument or
            return one. It must not keep its result either: compiled code overwrites results after their last use.
        fake: takes the same arguments as fake tensors; returns tensors with the shapes, dtypes and strides to expect.
        tags: what torch should know of it: two equal calls of a `nondeterministic_seeded` one are two results.
    Edge cases: no gradient flows through the operator. torch refuses a second definition of a name.

    Example:
        >>> def fake(x):
        ...     return torch.empty_like(x)
        >>> @custom_operator("doubled_for_the_example(Tensor x) -> Tensor", fake)
        ... def doubled(x):
        ...     return 2 * x
        >>> torch.ops.ottava.doubled_for_the_example(torch.ones(2))
        tensor([2., 2.])
    """
    name, bracket, rest = schema.partition("(")
    qualified = f"ottava::{name}"
    # the pieces of `torch.library.custom_op`, without the wrappers that it puts around them: those are for operators
    # that mutate, alias or want a gradient
    torch.library.define(qualified, bracket + rest, tags=(torch.Tag.pt2_compliant_tag, *tags))
    torch.library.register_fake(qualified, fake)

    def register(run: Run) -> Run:
        torch.library.impl(qualified, "default", run)
        return run

    return register
