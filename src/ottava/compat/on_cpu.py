"""Runs a script that asks for CUDA on the CPU: devices, `.cuda()` and the questions of `torch.cuda` are redirected.

Redirected: the device "cuda" wherever torch takes one, `.cuda()`, `.to(0)`, `.pin_memory()`, `torch.load`,
`torch.autocast`, GradScaler, the backend "nccl" (to gloo), and the names of `_ANSWERS` in torch.cuda. Tensors say that
they are on the CPU: a script that insists on `x.is_cuda` stops there. A move to "cuda" copies nothing, so both names
share memory. CUDA graphs, `torch.Generator("cuda")` and CUDA extensions have no counterpart and raise an error.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

SENTENCE = (
    "--cpu: 'cuda' devices, .cuda() and the questions of torch.cuda go to the CPU. Casts have the bits of a GPU, sums "
    "and speed do not"
)


class _Moment:
    """In place of torch.cuda.Event: the CPU's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def record(self, *_: Any) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: _Moment) -> float:
        return 1000 * (end.seconds - self.seconds)

    def query(self) -> bool:
        return True

    def synchronize(self, *_: Any) -> None: ...

    wait = synchronize


class _InOrder:
    """In place of torch.cuda.Stream, and of the context that makes it current: the CPU runs all in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def synchronize(self, *_: Any) -> None: ...

    wait_stream = wait_event = synchronize

    def record_event(self, event: _Moment | None = None) -> _Moment:
        moment = event or _Moment()
        moment.record()
        return moment


def _always(answer: Any = None) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"torch.cuda.{name} needs a CUDA device; --cpu has nothing in its place: leave it out")

    return refuse


_NOTHING = ("synchronize", "empty_cache", "set_device", "init", "reset_peak_memory_stats")
_ZERO = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_ANSWERS: Mapping[str, Any] = MappingProxyType(  # an object for each name: Dynamo refuses one under two names
    {name: _always() for name in _NOTHING}
    | {name: _always(0) for name in _ZERO}
    | {"is_bf16_supported": _always(True), "device_count": _always(1), "get_device_capability": _always((9, 0))}
    | {"get_device_name": _always("CPU")}
    | {n: lambda seed: torch.default_generator.manual_seed(seed) for n in ("manual_seed", "manual_seed_all")}
    | {"get_rng_state": lambda *_, **__: torch.get_rng_state(), "get_rng_state_all": lambda: [torch.get_rng_state()]}
    | {"set_rng_state": lambda state, *_, **__: torch.set_rng_state(state)}
    | {"set_rng_state_all": lambda states: torch.set_rng_state(states[0])}
    | {"default_generators": (torch.default_generator,), "_lazy_call": lambda call, **_: call()}
    | {"Event": _Moment, "Stream": _InOrder}
    | {name: lambda *_, **__: _InOrder() for name in ("stream", "device", "current_stream", "default_stream")}
    | {name: _refused(name) for name in ("CUDAGraph", "graph", "make_graphed_callables")}
)
"""Name in torch.cuda -> what stands in its place."""


def _moved(device: Any, *, numbers: bool = False) -> Any:
    """The CPU in place of a CUDA device; with numbers, in place of its number, too. Other values stay."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "cuda" else device
    return "cpu" if numbers and isinstance(device, int) and not isinstance(device, bool) else device


class _ToCPU(TorchFunctionMode):
    """Changes the devices in the arguments of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:  # "torch.cuda.FloatTensor", for which scripts ask
            return func(*args).replace("torch.", "torch.cuda.", 1)
        to = getattr(func, "__name__", "") in ("to", "_parse_to")  # of a tensor, and what nn.Module.to asks
        args = tuple(_moved(one, numbers=to) for one in args)
        kwargs = {key: _moved(one, numbers=key == "device") for key, one in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _engine(real: Callable[..., Any]) -> Callable[..., Any]:
    """The engine of backward, inside which torch has taken the mode away; functions ask for devices there, too."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _ToCPU():
            return real(*args, **kwargs)

    return run


def _takes(real: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """The function with devices moved in all positional arguments and in those with these names."""

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        moved = {key: _moved(one, numbers=True) if key in names else one for key, one in kwargs.items()}
        return real(*map(_moved, args), **moved)

    return call


def _is_available() -> bool:
    """What the script hears; torch and ottava hear that there is none."""
    asking = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
    return asking not in ("torch", "ottava")


def _autocast(real: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and dtype is None:
            dtype = torch.get_autocast_dtype("cuda")
        real(self, _moved(device_type), dtype, *args, **kwargs)

    return start


def _scaler(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, device="cuda", *args, **kwargs: real(self, _moved(device), *args, **kwargs)


def _gloo(real: Callable[..., Any], default: str | None = None) -> Callable[..., Any]:
    def start(*args: Any, device_id: Any = None, **kwargs: Any) -> Any:
        kwargs |= {} if args or default is None or kwargs.get("backend") else {"backend": default}
        own = [
            ["gloo" if str(one).rpartition(":")[2] == "nccl" else one for one in of] for of in (args, kwargs.values())
        ]
        return real(*own[0], **dict(zip(kwargs, own[1], strict=True)))

    return start


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Redirects CUDA to the CPU in this thread, and puts everything back at the end.

    Example:
        >>> with on_cpu():
        ...     layer = torch.nn.Linear(4, 2, device="cuda").to("cuda:0").cuda()
        ...     torch.cuda.synchronize()
        >>> layer.weight.device, torch.cuda.is_initialized()
        (device(type='cpu'), False)
    """
    scaler = torch.amp.GradScaler
    homes = (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams, torch.cuda.graphs)
    changes: list[tuple[Any, str, Any]]
    changes = [(home, name, answer) for name, answer in _ANSWERS.items() for home in homes if hasattr(home, name)]
    changes += [(torch.cuda.nvtx, name, _always()) for name in ("range_push", "range_pop", "mark")]
    changes += [
        (torch.cuda, "is_available", _is_available),
        (torch, "set_default_device", _takes(torch.set_default_device, "device")),
        (torch, "load", _takes(torch.load, "map_location")),
        (torch.autocast, "__init__", _autocast(torch.autocast.__init__)),
        (scaler, "__init__", _scaler(scaler.__init__)),
        (torch.autograd, "_engine_run_backward", _engine(torch.autograd.graph._engine_run_backward)),
        (dist, "init_process_group", _gloo(dist.init_process_group, "gloo")),
        (dist, "new_group", _gloo(dist.new_group)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, answer)
        stack.enter_context(_ToCPU())
        yield


def missing(trace: TracebackType | None) -> str:
    """The function of torch.cuda in which a script failed; "" if it failed elsewhere."""
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_globals.get("__name__", "").startswith("torch.cuda"):
            return f"torch.cuda.{frame.f_code.co_name}"
        trace = trace.tb_next
    return ""
