"""What a step needs on NVIDIA GPUs besides casts and GEMMs, in one launch each: AdamW, and predicted scales' boundary.

AdamW's kernel finds its parameters in a table on the device, and reads and writes each number once, with the bits of
torch's foreach operations on a GPU. Those read and write weights and moments several times, and decode 16-bit weights
and moments into new memory. In a CUDA graph it reads step and learning rate on the device, too.

In torch operations a boundary takes some 35 launches for each spec. This kernel has the bits of `state`, keeps no
state, never waits for the device, and works in a CUDA graph, because its buffers keep their addresses.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.kernels.gate import address, launched
from ottava.kernels.triton.launch import Launch
from ottava.kernels.triton.quantize import FUSED, NAME, refuse_device
from ottava.numerics.tensor import QuantizationSpec

LAUNCH = MappingProxyType({"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": False})
"""The compile-time parameters of each launch of AdamW."""
_WIDE = frozenset({torch.float32, torch.bfloat16})


def supports_adamw(
    weight: Tensor, extra: Tensor | None, gradient: Tensor, mean: Tensor, square: Tensor, *scalars: Any
) -> str | None:
    """Why `step_adamw` does not step such tensors, the first five of a `TableRow`; None if it does.

    scalars: step and lr, if it shall read them on the device.
    """
    if weight.device.type != "cuda":
        return f"{NAME}: runs on cuda; got {weight.device.type}"
    every = [tensor for tensor in (weight, extra, gradient, mean, square) if tensor is not None]
    kept = weight.dtype, None if extra is None else extra.dtype
    if kept not in ((torch.float32, None), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.int16)):
        return (
            f"{NAME}: takes float32 weights, or bfloat16 weights with a master in float32 or as a remainder; got "
            f"{kept[0]} " + ("without a master" if extra is None else f"with {kept[1]}")
        )
    if not {gradient.dtype, mean.dtype, square.dtype} <= _WIDE:
        return (
            f"{NAME}: takes gradients and moments in float32 or bfloat16; got a gradient in {gradient.dtype}, moments "
            f"in {mean.dtype} and {square.dtype}"
        )
    if not all(map(Tensor.is_contiguous, every)) or len({*map(Tensor.numel, every)}) > 1:
        return f"{NAME}: takes contiguous tensors; got strides {', '.join(str(tensor.stride()) for tensor in every)}"
    for one in scalars:
        if one.dtype != torch.float32 or one.device != weight.device or one.numel() != 1:
            return f"{NAME}: reads step and lr in float32 on {weight.device}; got {one.dtype} on {one.device}"
    # the compiler for AMD fuses other multiply-adds than torch's build does
    if torch.version.hip is not None:
        return f"{NAME}: steps on NVIDIA GPUs, where its fused multiply-adds are those of torch"
    return refuse_device(weight.device, *every, *scalars)


class Tables:
    """Whole numbers on a device, for kernels: a table is made when they change, and never read back or changed.

    The numbers travel as arguments of torch's foreach kernels. So nothing waits for the device, no memory of the host
    has to stay, and a CUDA graph that makes a table makes it at each replay.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[list[int], Tensor]] = {}
        self._held: list[Tensor] = []

    def get(self, name: tuple[Any, ...], numbers: list[int], device: torch.device) -> Tensor:
        """int64, flat; name: of its place, where the next numbers replace these."""
        known, table = self._known.get(name, ((), None))
        captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if table is None or known != numbers:
            table = torch.zeros(len(numbers), dtype=torch.int64, device=device)
            torch._foreach_add_(table.unbind(), numbers)
            if not captures:  # nothing is in the table before a replay
                self._known[name] = numbers, table
        elif captures:
            self._held.append(table)  # each replay reads it
        return table


class TableRow(NamedTuple):
    """A parameter: contiguous tensors of one size in fp32 or bf16, and its step; mean and square: of the last step."""

    weight: Tensor
    extra: Tensor | None
    """Of a bf16 weight: its fp32 master, or int16, the remainder that `ottava.optim.storage` describes."""
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: float | Tensor
    """The number of this step, from 1; a tensor is read on the device."""


_MOST_ROWS = 256  # each program looks for its row among all


def step_adamw(
    rows: Iterable[TableRow],
    tables: Tables,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of parameters, in place, by the rule of `ottava.optim.rules.update_adamw`.

    One launch takes up to 256 of one device, of the same dtypes and step; steps on the device are the same for this.
    Those whose size or address is no multiple of 16 have a launch of their own.

    Args:
        tables: of their optimizer.
        lr: a tensor is read on the device; steps are tensors then.
        betas, eps, weight_decay: as in `AdamW`.
    Edge cases: 1 - beta**t is computed in float64. On the device the power is a product, with a relative error below
        t * 2**-53, so what is made of it in fp32 is, rarely, the neighbour of the host's number.
    """
    alike: dict[Any, list[TableRow]] = {}
    for row in rows:
        weight, extra, gradient, mean, square, when = row
        if weight.numel() == 0:
            continue
        bits = address(weight) | address(gradient) | address(mean) | address(square) | weight.numel()
        bits |= 0 if extra is None else address(extra)
        kinds = weight.dtype, None if extra is None else extra.dtype, gradient.dtype, mean.dtype, square.dtype
        key = weight.device, kinds, bits % 16 == 0, None if isinstance(when, Tensor) else when
        alike.setdefault(key, []).append(row)
    (beta1, beta2), rate = betas, lr if isinstance(lr, Tensor) else None
    for (_, kinds, even, step), every in alike.items():
        launched(rate, *[x for row in every for x in row if isinstance(x, Tensor)])
        # as an operation in place does: autograd and caches ask for it
        torch.autograd.graph.increment_version([row.weight for row in every])
        made = (None, None) if step is None else ((1 - beta2**step) ** 0.5, -(lr / (1 - beta1**step)))
        numbers = (rate, *made, eps, lr if rate is None else 0.0, weight_decay, beta1, beta2)
        for start in range(0, len(every), _MOST_ROWS):
            some = every[start : start + _MOST_ROWS]
            launch = adamw_launch(kinds, 1 << (len(some) - 1).bit_length(), even)
            programs, addresses = _addresses(some, launch, tables)
            with torch.cuda.device_of(some[0].weight):  # Triton launches on the current device
                importlib.import_module("ottava.kernels.triton.device_code").adamw_kernel[(programs,)](
                    *addresses, *numbers, **launch
                )


def _addresses(rows: list[TableRow], launch: Mapping[str, Any], tables: Tables) -> tuple[int, tuple[Tensor, Tensor]]:
    """The number of programs; then the table (7, ROWS): first program and size of a row, addresses of its tensors.

    Gradients, which a training may allocate anew at each step, have a table of their own.
    """
    device, programs = rows[0].weight.device, 0
    found, gradients = [], [address(row.gradient) for row in rows]
    for weight, extra, _, mean, square, step in rows:
        tensors = (weight, mean, square, extra, step)
        found.append((programs, weight.numel(), *[address(x) if isinstance(x, Tensor) else 0 for x in tensors]))
        programs += -(-weight.numel() // launch["BLOCK"])
    found += [(programs, 0, 0, 0, 0, 0, 0)] * (launch["ROWS"] - len(rows))  # of no program
    name = address(rows[0].weight)
    table = tables.get((name,), list(itertools.chain(*zip(*found, strict=True))), device)
    return programs, (table, tables.get((name, "gradients"), gradients, device))


@functools.lru_cache(maxsize=256)
def adamw_launch(kinds: tuple[torch.dtype | None, ...], rows: int, even: bool) -> Mapping[str, Any]:
    """The compile-time parameters of a launch for so many rows, a power of two; the others are keys of `step_adamw`."""
    language = importlib.import_module("triton.language")
    types = [None if kind is None else getattr(language, str(kind).removeprefix("torch.")) for kind in kinds]
    if kinds[1] == torch.int16:
        types[0] = language.int16  # a remainder is added to the bits of the weight
    names = ("WEIGHT", "EXTRA", "GRADIENT", "MEAN", "SQUARE")
    return MappingProxyType({**LAUNCH, **dict(zip(names, types, strict=True)), "ROWS": rows, "EVEN": even})


_LONGEST = 4096


def supports_roll(spec: QuantizationSpec, history: Tensor, lanes: Tensor) -> str | None:
    """Why this kernel does not roll these windows; None if it does."""
    if history.device.type != "cuda":
        return f"{NAME}: runs on cuda; got {history.device.type}"
    if callable(spec.amax_compute_algo):
        return f"{NAME}: takes the largest amax or the last one; got a function of the window"
    if history.shape[1] > _LONGEST:
        return f"{NAME}: takes windows of up to {_LONGEST} steps; got {history.shape[1]}"
    if lanes.device != history.device:
        return f"{NAME}: the amaxes are on {lanes.device} and the windows on {history.device}"
    return refuse_device(history.device, history, lanes)


def roll(
    spec: QuantizationSpec,
    lanes: Tensor,
    index: Tensor,
    history: Tensor,
    scale: Tensor,
    nonfinite_count: Tensor,
    guard_count: Tensor,
    staged: Tensor,
) -> None:
    """Moves the windows of T tensors of one spec on, in place; the rule is that of `windows.roll_windows`.

    Args:
        lanes: fp32 (4, doors): amax, non-finite, guard, and 1 for a door that is due; where that is 0 all are.
        index: int64 (T,): the column of each tensor in lanes.
        history: fp32 (T, L), newest first.
        scale: fp32 (T,).
        nonfinite_count, guard_count: int64 (T,).
        staged: fp32 (T, 3); cleared where due.
    """
    tensors, length = history.shape
    launch = _bound(spec, tensors, (lanes.shape[1], length))
    launch((lanes.contiguous(), index, history, scale, nonfinite_count, guard_count, staged))


@functools.lru_cache(maxsize=256)
def _bound(spec: QuantizationSpec, tensors: int, sizes: tuple[int, int]) -> Launch:
    kernel = importlib.import_module("ottava.kernels.triton.device_code").roll_kernel
    return Launch(kernel, tensors, sizes, (float(spec.format.max * 2.0**-spec.margin),), roll_launch(spec))


@functools.lru_cache(maxsize=256)
def roll_launch(spec: QuantizationSpec) -> Mapping[str, Any]:
    """The compile-time parameters with which `roll_kernel` is launched."""
    # Triton's ranges have lengths of powers of two; the kernel masks the rest
    window = 1 << (spec.amax_history_len - 1).bit_length()
    constants = {"NEWEST": spec.amax_compute_algo == "most_recent", "SCALE_FORMAT": spec.scale_format, "WINDOW": window}
    return MappingProxyType(constants | FUSED | {"num_warps": max(1, min(4, window // 256))})
