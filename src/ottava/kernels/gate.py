"""The one gate through which C++ and Triton get at the memory of a tensor; nothing else here asks for an address.

C++ believes an address. That of a DTensor, of what torch.func has wrapped, of a fake or sparse tensor is no address of
its numbers, and reading there ends the interpreter. So each is refused, with a sentence. A plain tensor pays for a look
at its exact type, its device and its address: some 0.1 us.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

LOWEST = 1 << 40
"""Addresses below are looked at closely: without memory a tensor's address is its offset into nothing."""


PLAIN = (Tensor, Parameter)
"""The exact types whose address may be asked for."""
CPU = torch.device("cpu")
"""Where the C++ kernels make their results, whatever torch's default device is. A string takes longer to read."""
address = Tensor.data_ptr
"""Of a tensor that `refusal` has let through, or that the caller has made a moment ago: nothing is looked at again."""


def refusal(x: Tensor, *others: Tensor) -> str | None:
    """Why what lies at the address of a tensor, or of others, is not its numbers, so that only torch's own operations
    read it; None if it is, on whatever device.

    Raises:
        TypeError: nothing here computes with such a tensor, torch's operations included: a DTensor, a sparse, nested or
            MKLDNN layout, memory that has been freed.

    Example:
        >>> refusal(torch.ones(2)), refusal(torch.ones(2, dtype=torch.complex64).conj().imag)
        (None, 'got a tensor that is negated when it is read')
    """
    for one in (x, *others):
        kind = type(one)
        if kind is Tensor or kind is Parameter:
            try:
                if one.data_ptr() > LOWEST and not one.is_neg() and not one.is_nested:
                    continue
            except RuntimeError:  # it has no storage
                pass
        if reason := _closely(one):
            return reason
    return None


def is_plain(x: Tensor) -> bool:
    """Whether what lies at the address of a tensor is its numbers; False too where `refusal` raises.

    Example:
        >>> is_plain(torch.ones(2)), is_plain(torch.ones(2).to_sparse())
        (True, False)
    """
    try:
        return refusal(x) is None
    except TypeError:
        return False


def pointer(x: Tensor | None) -> int:
    """The address of a plain tensor in the memory of the CPU, for C++; 0 for None and for a tensor without elements.

    Raises:
        TypeError: any other tensor, but for those whose bits are there: `refusal` tells negated and nested ones.

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
    if (reason := _closely(x)) is not None and not x.is_neg():
        raise TypeError(f"ottava's C++ kernels read plain tensors; {reason}")
    return x.data_ptr()


def launched(*tensors: Tensor | None) -> None:
    """Lets tensors through to a Triton kernel, which reads them all on one device; None stands for one that is not
    there.

    Raises:
        TypeError: as `refusal` has it, or they are on several devices.

    Example:
        >>> launched(torch.ones(2), torch.ones(2, device="meta"))
        Traceback (most recent call last):
        ...
        TypeError: ottava's Triton kernels read plain tensors; got a tensor on meta, which has no memory
    """
    there = [x for x in tensors if x is not None]
    for x in there:
        if reason := refusal(x):
            raise TypeError(f"ottava's Triton kernels read plain tensors; {reason}")
    if len(devices := {x.device for x in there}) > 1:
        raise TypeError(f"ottava's Triton kernels read one device; got tensors on {', '.join(map(str, devices))}")


def aligned(x: Tensor, to: int) -> bool:
    """Whether the address of a tensor, on any device, is a multiple of so many bytes.

    Example:
        >>> aligned(torch.ones(64), 4)
        True
    """
    return x.data_ptr() % to == 0


def _closely(x: Tensor) -> str | None:
    """As `refusal`, for a tensor that is not known to be plain."""
    kind = type(x)
    if hasattr(x, "device_mesh"):
        raise TypeError(
            f"got a {kind.__name__}: FP8 under tensor parallelism is not supported. Leave its layers in BF16, "
            'ottava.convert(model, recipe, filter=...) or recipe.override("NAME", "bf16"); or shard weights with '
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
        address, held = x.data_ptr(), x.untyped_storage().nbytes()
    except RuntimeError:
        address, held = 0, -1
    if held == 0:
        raise TypeError("got a tensor whose memory has been freed (its storage has 0 bytes), as FSDP does after use")
    if address == 0:
        return "got a tensor without memory of its own, as torch.func (vmap, grad, functionalize) makes them"
    return "got a tensor that is negated when it is read" if x.is_neg() else None
