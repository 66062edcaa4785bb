"""Forward and backward of a batch: in microbatches, over replicas and shards, or through the stages of a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ottava.train.model import VOCABULARY, ByteTransformer, entropy, loss
from ottava.train.parallel import parts_of
from ottava.train.ranks import Ranks, local

Compute = Callable[[], torch.autocast]


class Passes(Protocol):
    """How the loss of this process's part of a batch comes about, and its gradients."""

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of its microbatches; gradients are those of the whole batch of the run. 0 in a process without
        the last stage of the pipeline."""
        ...

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The same loss, without gradients."""
        ...


class Microbatches:
    """One microbatch after the other.

    Args:
        model: what runs: the model, in a wrapper or not.
        compute: the context of a forward.
        count: microbatches.
    """

    def __init__(self, model: nn.Module, compute: Compute, count: int, ranks: Ranks) -> None:
        self.model, self.compute, self.count, self.ranks = model, compute, count, ranks

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """As `Passes` says."""
        losses = []
        for index, batch in enumerate(self._parts(inputs, targets), start=1):
            with self._last(index == self.count):
                value = self._loss(*batch)
                value.backward()
            losses.append(value.detach())
        finish_gradients(self.model, self.count, self.ranks)
        return _mean(losses)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """As `Passes` says."""
        return _mean([self._loss(*batch) for batch in self._parts(inputs, targets)])

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.compute():
            return loss(self.model, inputs, targets)

    def _parts(self, inputs: Tensor, targets: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        return list(zip(inputs.chunk(self.count), targets.chunk(self.count), strict=True))

    def _last(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients of the replicas and shards are summed after the last microbatch only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()


class Pipeline:
    """torch's schedules. Microbatches of a step are calls of one step: scales move at its end.

    Args:
        model: the layers of all stages of this process.
        compute: the context of a forward.
        count: microbatches.
        shape: (sequences, tokens) of a microbatch.
    """

    def __init__(
        self,
        model: ByteTransformer,
        compute: Compute,
        count: int,
        ranks: Ranks,
        shape: tuple[int, int],
    ) -> None:
        assert ranks.mesh is not None
        config, place, group = ranks.config, ranks.place("pp"), ranks.mesh.get_group("pp")
        self.model, self.compute, self.count, self.ranks = model, compute, count, ranks
        self.first, self.last = place == 0, place == config.pp - 1
        rows, tokens = shape
        own = next(model.parameters())
        ids = torch.empty(rows, tokens, dtype=torch.int64, device=ranks.device)
        stream = torch.empty(rows, tokens // config.tp, model.width, dtype=own.dtype, device=ranks.device)
        stream.requires_grad_()  # else no gradient would be sent back
        with compute() as context:
            dtype = context.fast_dtype if context._enabled else own.dtype
        logits = torch.empty(rows, tokens, VOCABULARY, dtype=dtype, device=ranks.device, requires_grad=True)
        stages = [
            PipelineStage(
                Stage(model, part, compute),
                number,
                config.stages,
                ranks.device,
                input_args=ids if number == 0 else stream,
                output_args=stream if number < config.stages - 1 else logits,
                group=group,
            )
            for number, part in parts_of(config, model.depth, place)
        ]
        schedules: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
        schedules["interleaved"] = ScheduleInterleaved1F1B
        given = stages if config.schedule == "interleaved" else stages[0]
        self.schedule = schedules[config.schedule](given, count, loss_fn=self._loss, scale_grads=False)

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """As `Passes` says."""
        value = self._run(self.schedule.step, inputs, targets)
        finish_gradients(self.model, self.count, self.ranks)
        return value

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """As `Passes` says."""
        return self._run(self.schedule.eval, inputs, targets)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        with self.compute():
            return entropy(logits, targets)

    def _run(self, through: Callable[..., Any], inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        first = (inputs.contiguous(),) if self.first else ()  # torch 2.11 compares strides
        through(*first, target=targets if self.last else None, losses=losses if self.last else None)
        return _mean(losses) if self.last else torch.zeros((), device=self.ranks.device)


class Stage(nn.Module):
    """Some layers of a model that other stages of this process share."""

    def __init__(self, model: ByteTransformer, part: range, compute: Compute) -> None:
        super().__init__()
        self.model, self.part, self.compute = model, part, compute

    def forward(self, given: Tensor) -> Tensor:
        """ids or the stream -> the stream or logits."""
        with self.compute():
            y: Tensor = self.model(given, self.part)
        return y


def finish_gradients(model: nn.Module, count: int, ranks: Ranks) -> None:
    """Divides the sum over microbatches, and takes the mean over replicas that no wrapper has taken."""
    config = ranks.config
    wrapped = config.shard > 1 or (ranks.size == config.replicas and ranks.experts is None)
    replicas = 1 if wrapped else config.replicas
    if count == replicas == 1:
        return
    owned = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    gradients = [local(gradient) for gradient in owned]
    if replicas > 1 and ranks.mesh is not None:
        group = ranks.mesh.get_group("replicas")
        if ranks.experts is None:
            _add(gradients, group)
        else:  # gradients of experts are of the tokens of all processes that share them
            _add([gradient for gradient in owned if not isinstance(gradient, DTensor)], group)
            _add([local(gradient) for gradient in owned if isinstance(gradient, DTensor)], ranks.copies)
    torch._foreach_div_(gradients, count * replicas)


def _add(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sums over the processes of a group, in place."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        own = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in own])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(own, flat.split([one.numel() for one in own]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _mean(losses: Sequence[Tensor]) -> Tensor:
    return losses[0] if len(losses) == 1 else torch.stack([one.double() for one in losses]).mean()
