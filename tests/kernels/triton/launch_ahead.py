"""Compares kept launches with Triton's own, in a process without the interpreter; prints what it compared, as JSON.

A fake driver (benchmarks/host_cost.py; its folder is on PYTHONPATH) notes what each launch hands over.
"""

from __future__ import annotations

import gc
import itertools
import json
import warnings
from typing import Any

import torch
import triton
from host_cost import calls_of, install
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from ottava.kernels import gate
from ottava.kernels.triton import launch as launches
from ottava.kernels.triton import quantize as triton_quantize
from ottava.kernels.triton import rows as triton_rows
from ottava.kernels.triton import step as triton_step
from ottava.kernels.triton.launch import Launch
from ottava.kernels.triton.quantize import UnmadeRows
from ottava.optim import AdamW
from ottava.recipe import RECIPES

warnings.simplefilter("error", UserWarning)  # Triton 3.9 has one for a launch that does not say what it fuses
fake = install()
own: list[str] = []
run = JITFunction.run


def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
    own.append(self.__name__)
    return run(self, *args, **kwargs)


JITFunction.run = noted


def addresses(launched: list[Any]) -> list[Any]:
    """Pointers as numbers: Triton's own launch hands over tensors."""
    return [
        (grid, kernel, [a.data_ptr() if isinstance(a, Tensor) else a for a in args]) for grid, kernel, args in launched
    ]


def compare(launch: Launch, *given: Any) -> bool:
    """Whether a second launch is a kept one; it must hand over what Triton's own does."""
    fake.launched.clear()
    launch(*given)
    before = len(own)
    launch(*given)
    kept = len(own) == before
    fresh = Launch(launch.kernel, launch.programs, launch.fixed, launch.floats, launch.constants)
    fresh(*given)
    first, second, third = addresses(fake.launched)
    assert first == second == third, (launch.kernel, first, second, third)
    return kept


def off(x: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16."""
    moved = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    assert moved.data_ptr() % 16
    return moved.copy_(x)


seen: list[tuple[Launch, tuple[Any, ...]]] = []
call = Launch.__call__
Launch.__call__ = lambda self, *given: seen.append((self, given)) or call(self, *given)
for name, dtype, shape in itertools.product(
    ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed", "guarded"),
    (torch.bfloat16, torch.float32),
    ((48, 64), (5, 1)),
):
    spec, spec_t = RECIPES[name].fprop.lhs, RECIPES[name].wgrad.rhs
    scale = torch.ones(()) if spec is not None and spec.predicted else None
    triton_quantize.quantize_both(torch.randn(shape).to(dtype), spec, spec_t, scale)
rows = UnmadeRows("rmsnorm", torch.randn(16, 32), torch.bfloat16, beside=torch.ones(2, 16), gamma=torch.ones(32))
triton_quantize.quantize_both(rows, RECIPES["tensorwise"].fprop.lhs, None)
Launch.__call__ = call
odd = [(launch, (tuple(map(off, tensors)), *rest)) for launch, (tensors, *rest) in seen]
kept = [compare(launch, *given) for launch, given in (*seen, *odd)]
triton_rows.filling = lambda _: 3
one = torch.ones(3, 1).bfloat16()
for name in ("rmsnorm", "layernorm"):  # a size of 1 is a constant of the kernel, which the interpreter has as a tensor
    triton_rows.make_rows(triton_rows.normed(name, one, one.dtype, one[0], None, eps=1e-5, zero_centered=False))
    _, statistics = triton_rows.norm(name, one, one[0], None, eps=1e-5, zero_centered=False)
    triton_rows.norm_gradient(name, one, one, statistics, one[0], beta=False, zero_centered=False)
triton_rows.make_rows(UnmadeRows("silu", torch.ones(3, 2), torch.float32, gated=True))

launch, (tensors, extra) = seen[0]
assert compare(launch, tensors, extra)
assert compare(launch, (off(tensors[0]), *tensors[1:]), extra)  # of an odd address another kernel is kept
assert compare(launch, tensors, extra)


def takes_own_way() -> bool:
    own.clear()
    launch(tensors, extra)
    return bool(own)


launch((tensors[0].half(), *tensors[1:]), extra)  # another dtype, which is kept, too
assert not takes_own_way()
unloaded: list[object] = []
fake.utils.unload_module = unloaded.append
launch.kernel.device_caches.clear()
gc.collect()
assert not unloaded  # Triton 3.9 unloads the function of a kernel that nobody holds
assert not takes_own_way()
fake.device = 3  # another current device
assert takes_own_way()
fake.device = -1
assert not takes_own_way()
for lowest in (1 << 62, gate.LOWEST):  # as if a driver handed out low addresses
    gate.LOWEST = launches.LOWEST = lowest
    assert not takes_own_way()


def hook(metadata: object) -> None:
    """A profiler's."""


triton.knobs.runtime.launch_enter_hook.add(hook)
assert takes_own_way()
triton.knobs.runtime.launch_enter_hook.remove(hook)
assert not takes_own_way()
runtime, chain = triton.knobs.runtime, triton.knobs.runtime.launch_enter_hook
for listens in (False, True):  # what a tool puts in the place of the chain: nothing, or one function
    runtime.launch_enter_hook = hook if listens else None
    assert takes_own_way() == listens
runtime.launch_enter_hook = chain
other = Launch(launch.kernel, launch.programs, launch.fixed, launch.floats, launch.constants)
other(tensors, extra, tuple(2 * x for x in launch.floats))
assert compare(launch, tensors, extra, tuple(2 * x for x in launch.floats))
for bad in (torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex64).conj().imag):
    try:
        launch((bad, *tensors[1:]), extra)
    except TypeError:
        continue
    raise AssertionError(bad)


class Operators(TorchDispatchMode):
    """Notes torch's own, which launch beside Triton."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":  # a profiler's marks are no launches
            own.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def step_of_64(capturable: bool) -> dict[str, Any]:
    """A warm step of AdamW: Python functions, launches of Triton and torch's operators. One size is odd."""
    triton_step.supports_adamw = lambda *_: None
    parameters = [nn.Parameter(torch.randn(64 + (one == 3)).bfloat16()) for one in range(64)]
    optimizer = AdamW(parameters, master="fp32", capturable=capturable)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    calls = calls_of(optimizer.step)
    own.clear()
    with Operators():
        optimizer.step()
    return {"calls": calls, "launches": own}


steps = [step_of_64(capturable) for capturable in (False, True)]
print(json.dumps({"launches": len(kept), "kept": sum(kept), "adamw": steps}))
