"""Launches a Triton kernel with little Python: what its first launch has decided is kept, and checked before each use.

`JITFunction.run` binds and specialises thirty arguments at every launch. That costs the host more than a small kernel
costs the device. What it decides depends on constants and integers, which a `Launch` holds, and on the dtypes, the
devices and the alignment of the tensors: of each combination of these it keeps the kernel. A launch on the current
device takes the kept one. Every other launch is Triton's own, with the same result: so are launches that a profiler's
hook wants to hear of, and those of the interpreter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ottava.kernels.gate import LOWEST, PLAIN, address, launched, refusal

_past: Callable[[int], int] = (16).__rmod__
"""Bytes past a multiple of 16: where it is none, Triton compiles another kernel."""
_PLAIN = frozenset(PLAIN)
_EXTRA = ("beside_ptr", "gamma_ptr", "beta_ptr")
_device: Callable[[Any], int] = Tensor.get_device
_dtype: Callable[[Any], torch.dtype] = vars(torch._C.TensorBase)["dtype"].__get__
_negated: Callable[[Any], bool] = Tensor.is_neg
Named = tuple[tuple[str, Any], ...]


class Launch:
    """A kernel with all of its arguments but the tensors.

    Args:
        kernel: of Triton; its parameters are tensors, integers, floats and constants, in this order.
        programs: of the grid.
        constants: compile-time parameters and options of the compiler.
        named: further ones, which replace some of them, or integers by name.
    """

    __slots__ = ("_kept", "constants", "fixed", "floats", "kernel", "programs")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        integers: tuple[int, ...],
        floats: tuple[float, ...],
        constants: Mapping[str, Any],
        named: Named = (),
    ) -> None:
        self.kernel, self.programs, self.fixed, self.floats = kernel, programs, integers, floats
        self.constants = {**constants, **dict(named)} if named else constants
        self._kept: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # what Triton has compiled

    def __call__(
        self,
        tensors: tuple[Tensor, ...],
        extra: tuple[Tensor | None, ...] = (),
        floats: tuple[float, ...] | None = None,
    ) -> None:
        """Runs on the device of the first tensor.

        Args:
            extra: the tensors, or None, that the kernel calls beside_ptr, gamma_ptr and beta_ptr.
            floats: in place of those of the object; Triton compiles the same kernel for all.
        Raises:
            TypeError: `gate.launched`.
        """
        # this runs at every cast of a training: no function of ours is called, and nothing is built that is not needed
        given: tuple[Any, ...] = (*tensors, *[x for x in extra if x is not None]) if extra else tensors
        if self._kept and {*map(type, given)} <= _PLAIN:  # the memory of a subclass may mean something else
            pointers = [*map(address, given)]
            key = (*map(_dtype, given), *map(_device, given), *map(_past, pointers))
            kept = self._kept.get(key, (None,) * 10)
            device, current, stream, runtime, run, function, metadata, values, places, _ = kept
            if (
                device is not None
                # a tensor without memory has an address near 0; a driver may hand out low ones, too
                and (min(pointers) > LOWEST or (0 not in pointers and refusal(*given) is None))
                and current() == device  # a compiled function belongs to the context of one device
                and True not in map(_negated, given)  # a lazy minus is not in the memory
                # no profiler listens: a chain holds its listeners, and in its place may stand None or one function
                and not getattr(entry := runtime.launch_enter_hook, "calls", entry)
                and not getattr(leave := runtime.launch_exit_hook, "calls", leave)
            ):
                values = [*values]
                values[: len(tensors)] = pointers[: len(tensors)]
                if floats is not None:
                    first = len(tensors) + len(self.fixed)
                    values[first : first + len(floats)] = floats
                for place, pointer in zip(places, pointers[len(tensors) :], strict=True):
                    values[place] = pointer
                # the three None: no metadata for hooks, and no hook at entry or exit
                run(self.programs, 1, 1, stream(device), function, metadata, None, None, None, *values)
                return
        self._normally(tensors, extra, self.floats if floats is None else floats)

    def _normally(
        self, tensors: tuple[Tensor, ...], extra: tuple[Tensor | None, ...], floats: tuple[float, ...]
    ) -> None:
        """By Triton's own launch; keeps what that has compiled."""
        given = (*tensors, *[x for x in extra if x is not None])
        launched(*given)
        named = dict(zip(_EXTRA, extra, strict=False))
        positional = (*tensors, *self.fixed, *floats)
        with torch.cuda.device_of(given[0]):  # Triton launches on the current device
            compiled = self.kernel[(self.programs,)](*positional, **self.constants, **named)
        if compiled is None:  # by the interpreter
            return
        triton = importlib.import_module("triton")
        driver, runtime = triton.runtime.driver.active, triton.knobs.runtime
        if not hasattr(runtime.launch_enter_hook, "calls"):
            return  # a Triton that tells of its hooks in another way
        parameters = self.kernel.signature.parameters  # the other constants are options of the compiler
        known = {name: value for name, value in self.constants.items() if name in parameters}
        bound = self.kernel.signature.bind(*positional, **known, **named)
        bound.apply_defaults()
        order = {name: place for place, name in enumerate(bound.arguments)}
        # of an optional tensor that is not given, the kernel was compiled with None as a constant
        places = tuple(order[name] for name, x in named.items() if x is not None)
        key = (*map(_dtype, given), *map(_device, given), *map(_past, map(address, given)))
        ask = driver.get_current_device, driver.get_current_stream, runtime
        does = compiled.run, compiled.function, compiled.packed_metadata
        # the kernel last: Triton 3.9 unloads the function of one that nobody holds
        self._kept[key] = (_device(given[0]), *ask, *does, [*bound.arguments.values()], places, compiled)
