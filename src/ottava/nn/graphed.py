"""A training step as one CUDA graph: the host launches once a step instead of launching each kernel.

Eager FP8 costs some 150 us of the host for every Linear, more than its GPU time below 2048 x 2048 x 2048. A graph costs
one launch. Other rooms make a step capturable: casts and scaling state never wait for the device, and the addresses of
predicted scales stay. This file has the warm-up and the static inputs, and counts each replay as a step in the Python
part of the scaling state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from ottava.engine.autocast import ambient
from ottava.engine.quantizer import Quantizer
from ottava.engine.state import Boundaries, ScalingState, living_states, roll_windows

Work = Callable[[], Any]
_REASONS = (
    "What a step must not do: read a number back (loss.item(), print, `if loss > x`, gradient clipping with "
    "error_if_nonfinite), make tensors from host data, move data from the CPU, step an optimizer that is not "
    "capturable (AdamW(capturable=True)), or choose its kernels by measuring inside the capture (warm up longer)."
)


class CudaGraph:
    """Records a step and runs it again: torch's CUDA graph, captured on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, work: Work) -> Any:
        """Runs the step eagerly, on the stream of the capture, because libraries keep one workspace a stream."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def capture(self, work: Work) -> Any:
        """Records the step without running it; returns its result, which each replay fills. Before that torch waits
        for the device and frees unused memory."""
        with torch.cuda.graph(self._graph, stream=self._stream):
            return work()

    def replay(self) -> None:
        """Runs the recorded step on the current stream."""
        self._graph.replay()


class GraphedStep:
    """The result of `graphed_step`: a call with arguments like the samples is one training step.

    Example: see `graphed_step`.
    """

    def __init__(self, step: Callable[..., Any], sample: Sequence[Any], capture: CudaGraph | None, warmup: int) -> None:
        self._step, self._capture, self._warmup = step, capture, warmup
        self._static = tuple(arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in sample)
        self._work = partial(step, *self._static)
        self._outputs: Any = None
        self._moved: list[tuple[ScalingState, Boundaries]] = []
        self._owners: list[tuple[Quantizer, object]] = []
        self.calls = 0
        """Steps so far."""
        self.captured = False
        """Whether steps are replays by now."""

    def __call__(self, *args: Any) -> Any:
        """One step; tensors in its result are detached, and later steps do not change them."""
        self._check(args)
        self.calls += 1
        if self._capture is None:
            return _detached(self._step(*args), clone=False)
        for own, given in zip(self._static, args, strict=True):
            if isinstance(own, Tensor):
                own.copy_(given, non_blocking=True)
        if self.calls == self._warmup:
            # Triton compiles a kernel for each alignment: the scales lie now where the capture will find them
            for state in living_states():
                _pack(state)
        if self.calls <= self._warmup:
            return _detached(self._capture.warm_up(self._work), clone=False)
        if not self.captured:
            self._record(self._capture)
        if any(door.pack is not owner for door, owner in self._owners):
            raise RuntimeError(
                "graphed step: buffers of predicted scales were replaced since the capture (the model was moved, "
                "converted again or loaded with assign=True), and the graph writes to the old ones; make another "
                "graphed_step"
            )
        ambient()  # for an autocast around it: its layers did hear one, in the capture
        self._capture.replay()
        for state, moved in self._moved:
            state.repeat(moved)
        return _detached(self._outputs, clone=True)  # the next replay overwrites them

    def _record(self, capture: CudaGraph) -> None:
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            raise RuntimeError(
                "graphed_step: forward hooks for all modules are registered, as ottava.watch does, and a replay runs "
                "no hooks: they would see nothing more. Capture after the watch has ended, or watch with eager=True"
            )
        states = living_states()
        before = [(state.boundaries, state.last_calls(), _pack(state)) for state in states]
        doors = [door for state in states for door in state.weight_doors()]
        for door in doors:
            door.cached, door.graph = None, self  # each replay casts anew, its own micro-batches once
        try:
            self._outputs = capture.capture(self._work)
        except RuntimeError as error:
            raise RuntimeError(f"graphed_step: the step could not be captured: {error}\n{_REASONS}") from error
        finally:
            for door in doors:
                door.cached = door.graph = None
        for state, (count, calls, owners) in zip(states, before, strict=True):
            known = {id(call) for call in calls}
            ran = any(id(call) not in known for call in state.last_calls())
            if ran or state.boundaries != count:  # compiled models show only boundaries
                # a capture runs the Python of a step and none of its kernels: its boundaries are still to come
                self._moved.append((state, state.take_back(count)))
                self._owners += owners
        self.captured = True

    def _check(self, args: tuple[Any, ...]) -> None:
        if len(args) != len(self._static):
            raise ValueError(f"graphed step: got {len(args)} arguments; needs {len(self._static)}, as the samples were")
        for index, (own, given) in enumerate(zip(self._static, args, strict=True)):
            if isinstance(own, Tensor):
                got = (given.dtype, tuple(given.shape)) if isinstance(given, Tensor) else (type(given).__name__, "")
                if got != (own.dtype, tuple(own.shape)):
                    raise ValueError(
                        f"graphed step: argument {index} is {got[0]} {got[1]}; needs {own.dtype} {tuple(own.shape)}, "
                        "as the sample was. For another shape make another graphed_step"
                    )
            elif given is not own and given != own:
                raise ValueError(
                    f"graphed step: argument {index} is {given!r}, and {own!r} would be frozen into the graph; give "
                    "what changes from step to step as a CUDA tensor"
                )


def graphed_step(
    step_fn: Callable[..., Any],
    *sample_args: Any,
    warmup: int = 3,
    eager: bool = False,
) -> GraphedStep:
    """Makes a CUDA graph of a whole training step: forward, backward and, if it is in there, the optimizer.

    The first `warmup` calls run the step eagerly; the next call captures it, and from then on each call copies its
    arguments in and replays. Every call is exactly one step of training, with the bits of eager code.

    Args:
        step_fn: makes one step and returns a tensor (the loss), a structure of tensors, or None. Its Python code runs
            `warmup` times and once for the capture; a replay repeats only its kernels.
        sample_args: arguments like those of the calls. Tensors lie on one CUDA device; only their shapes and dtypes
            matter. Other arguments are frozen.
        warmup: 1 or more: optimizers, Triton and cuBLAS prepare themselves in it.
        eager: run the step without a graph, with the same checks of arguments: for a CPU, and to debug.
    Raises:
        ValueError: a sample that is not on a CUDA device or wants a gradient, or no warm-up; later, an argument that is
            not like its sample.
        RuntimeError: there is no GPU, or the step cannot be captured; the text says what such a step must not do.
    Edge cases: a learning rate that a scheduler changes must be a tensor on the device, with AdamW(capturable=True): a
        number is frozen in. Delayed and guarded scales move at each replay, `ScalingState.boundaries` and `take_amax`
        too. With several micro-batches in the step, weights are cast once a replay.

    Example:
        >>> import ottava
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
        >>> report = ottava.convert(model, "delayed")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def train_step(x):
        ...     optimizer.zero_grad()
        ...     loss = model(x).float().square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> x = torch.ones(4, 64, dtype=torch.bfloat16)
        >>> step = graphed_step(train_step, x, eager=not torch.cuda.is_available())
        >>> bool(step(x) > step(x))
        True
    """
    if warmup < 1:
        raise ValueError(
            f"graphed_step: warmup is {warmup}; needs 1 or more, so that nothing is prepared in the capture"
        )
    tensors = [(i, arg) for i, arg in enumerate(sample_args) if isinstance(arg, Tensor)]
    for index, arg in tensors:
        if arg.requires_grad:
            raise ValueError(
                f"graphed_step: argument {index} requires a gradient, which would land in a copy of it; make it "
                "require one inside the step, and return the gradient"
            )
    if eager:
        return GraphedStep(step_fn, sample_args, None, warmup)
    if not torch.cuda.is_available():
        raise RuntimeError(
            "graphed_step: CUDA graphs need a GPU, and torch finds none here; graphed_step(..., eager=True) runs the "
            "step as it is"
        )
    wrong = [(index, arg.device) for index, arg in tensors if arg.device.type != "cuda"]
    devices = {arg.device for _, arg in tensors}
    if wrong:
        raise ValueError(f"graphed_step: argument {wrong[0][0]} is on {wrong[0][1]}; needs to be on a CUDA device")
    if len(devices) > 1:
        raise ValueError(f"graphed_step: arguments are on {', '.join(sorted(map(str, devices)))}; needs one device")
    device = devices.pop() if devices else torch.device("cuda", torch.cuda.current_device())
    return GraphedStep(step_fn, sample_args, CudaGraph(device), warmup)


def _detached(result: Any, *, clone: bool) -> Any:
    def detach(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone() if clone else leaf.detach()

    return pytree.tree_map(detach, result)


def _pack(state: ScalingState) -> list[tuple[Quantizer, object]]:
    """Gives the doors of predicted scales their common memory now, as the first boundary does; each with its owner.

    Addresses stay from then on, as a CUDA graph needs, until a door's buffers are replaced: then its owner changes.
    """
    doors = state.doors()
    live = [door for door in doors if door.spec is not None]
    if live:
        with torch.no_grad():  # nothing is due: no number changes
            roll_windows(doors, torch.zeros(4, len(doors), dtype=torch.float32, device=live[0].scale.device))
    return [(door, door.pack) for door in live]
