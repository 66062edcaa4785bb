"""Hints, each once: predicted scales do not change, or start without a history; biased sums run in short accumulators.

None is an error, and nothing else would show it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ottava.base.text import listed
from ottava.kernels.reference import block_columns
from ottava.numerics.accumulator import ACCUMULATORS, Accumulator, lost_share
from ottava.numerics.rounding import decode
from ottava.numerics.tensor import QuantizedTensor

_FORWARDS = 256
"""Forwards without a step before the hint: more than micro-batches and evaluations need."""
_STEPS = 16
"""Steps of one optimizer before the hint names idle layers: other optimizers may step less often."""

_LONG_SUM = 1024
"""Products in a sum: below, no accumulator loses 2 %."""
_SAMPLE = 64
"""Rows of each operand whose cosines tell how much a GEMM's sums are biased."""
_LOST = 0.01
"""The share of a sum that is worth a hint."""


def short_sums(a: QuantizedTensor, b: QuantizedTensor, accumulator: Accumulator | None, fast: bool) -> None:
    """Warns of a GEMM whose biased sums lose a percent or more in a short accumulator; once for each K and share.

    Args:
        accumulator: the profile that is emulated; None: the device's own sums.
        fast: whether those are a Hopper's fast ones.
    """
    k = a.shape[1]
    chain = block_columns(a.spec.granularity, b.spec.granularity, k)
    if chain < _LONG_SUM or (accumulator is None and not _is_short(a, fast)):
        return
    profile = ACCUMULATORS["hopper"] if accumulator is None else accumulator
    if profile.kept_bits >= 23 or (a.data.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    share = lost_share(chain, _alignment(a, b), profile)
    if share >= _LOST:
        warnings.warn(
            f"a GEMM over K = {k:,} keeps its sums in a short accumulator ({profile.name}), and its operands are "
            f"biased: sums lose about {float(f'{share:.0e}'):.0%} of their magnitude. Give this GEMM fast_accum=False, "
            "or a recipe with blocks along K; docs/accumulation.md tells more",
            stacklevel=2,
        )


def _is_short(a: QuantizedTensor, fast: bool) -> bool:
    """Whether the device's sums are those of a short accumulator: FP8 on Ada and Hopper."""
    return fast and a.data.is_cuda and torch.cuda.get_device_capability(a.device) in ((8, 9), (9, 0))


@torch.no_grad()
def _alignment(a: QuantizedTensor, b: QuantizedTensor) -> float:
    """The mean magnitude of the cosines between some rows of two operands, larger ones weigh more."""
    sides = []
    for side in (a, b):
        rows = slice(None, None, -(-side.shape[0] // _SAMPLE))
        numbers = side.spec.granularity.expand(side.scale_inv, (side.shape[0], side.shape[1]))
        numbers = numbers.expand(*side.shape)[rows]
        numbers = numbers * decode(side.data[rows], side.spec.format)
        sides.append(torch.nn.functional.normalize(numbers, dim=1))
    cosines = (sides[0] @ sides[1].t()).abs().nan_to_num(0.0)
    return float(cosines.square().sum() / cosines.sum().clamp_min(1e-30))


class Advice:
    """The memory of one `ScalingState`: the events that it counted, and the hints that it gave."""

    def __init__(self) -> None:
        self._forwards = 0
        self._weight_version: tuple[int, int] | None = None
        self._steps: dict[int, int] = {}
        self._stepped: set[int] = set()
        self.began = self._asked_idle = False

    def copy(self) -> Advice:
        """A copy for a replay, which must leave no trace."""
        twin = Advice()
        vars(twin).update(vars(self), _steps=self._steps.copy(), _stepped=self._stepped.copy())
        return twin

    def saw_forward(self, weight: Tensor) -> None:
        """Counts training forwards before the first boundary; warns if the weights change and no boundary comes."""
        if self.began or weight.is_meta:
            return
        version = (id(weight), weight._version)
        if self._weight_version is None:
            self._weight_version = version
        if self._weight_version[0] != version[0]:
            return  # count the forwards of one layer only
        self._forwards += 1
        stepped = self._weight_version[1] != version[1] and not dist.is_initialized()
        if stepped or self._forwards > _FORWARDS:
            self._weight_version = version
            # Python shows a warning of one text and place once
            warnings.warn(
                "delayed scaling: the weights have changed, or many forwards have passed, and ottava saw no step "
                "boundary, so the scales do not move. ottava sees the step() of torch optimizers; in another loop call "
                "ottava.ScalingState(model).update() after each weight update",
                stacklevel=4,
            )

    def first_step(self, model: nn.Module, layers: Iterable[Any], *, boundaries: int) -> None:
        """Runs before the first step of an optimizer of the model: warns of a start without a history.

        It warns only if the model looks trained: the elements of some norm's weight differ.
        """
        self.began = True
        if not _readable(model):
            return
        doors = [door for layer in layers for door in layer.quantizers.doors if door.spec is not None]
        if not doors or boundaries or not _looks_trained(model) or any(bool(door.amax_history.any()) for door in doors):
            return
        start = "the current scale of each tensor" if doors[0].spec.bootstrap else "scale 1, whatever the tensor"
        warnings.warn(
            "delayed scaling starts on weights that look trained, and has no history: the first step casts with "
            f"{start}, the next ones with scales predicted from the few amaxes since then. To fill the histories from "
            "some batches before the first step: ottava.calibrate(model, batches, loss=loss)",
            stacklevel=2,
        )

    def after_step(self, optimizer: object, stepped: Collection[int], layers: Iterable[Any]) -> None:
        """Runs after the boundary of an optimizer's step: names trainable layers that no optimizer steps.

        stepped: ids of the optimizer's parameters. Another rank's step (ZeroRedundancyOptimizer) counts too: its
            boundary has cleared the layer's staged amaxes.
        """
        if self._asked_idle:
            return
        layers = list(layers)
        self._stepped.update(id(layer.parameter) for layer in layers if id(layer.parameter) in stepped)
        count = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if count < _STEPS or not all(_readable(layer) for layer in layers):
            return
        self._asked_idle = True
        idle = [m for m in layers if m.parameter.requires_grad and id(m.parameter) not in self._stepped and _waits(m)]
        if idle:
            names = listed((layer.name or type(layer).__name__ for layer in idle), most=3)
            warnings.warn(
                f"delayed scaling: in {_STEPS} steps no optimizer has stepped the trainable weights of {names}, so "
                "their scales do not move. Give these weights to the optimizer, or freeze them with "
                "requires_grad_(False), or call ottava.ScalingState(model).update() after each step",
                stacklevel=2,
            )


def _waits(layer: Any) -> bool:
    """Whether a door has staged an amax that no boundary has taken."""
    return any(door.spec is not None and bool(door.staged[0] > 0) for door in layer.quantizers.doors)


def _readable(module: nn.Module) -> bool:
    """Whether Python may read parameters now: not on meta, in the capture of a CUDA graph, or while compiling."""
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return False
    return not any(p.is_meta for p in module.parameters())


def _looks_trained(model: nn.Module) -> bool:
    """Whether the elements of a norm's weight differ. All parameters of a norm are vectors, and its weight starts with
    equal elements."""
    for module in model.modules():
        parameters = dict(module.named_parameters(recurse=False))
        weight = parameters.get("weight")
        flat = "_fsdp_flattened"  # torch's mark of a part of a matrix that FSDP1 keeps as a vector
        if weight is None or any(p.dim() != 1 or hasattr(p, flat) for p in parameters.values()):
            continue
        shard: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
        if shard.numel() and bool((shard != shard[0]).any()):
            return True
    return False
