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
    """Computes the loss of this process's part of a batch, and the gradients."""

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Runs forward and backward. The gradients become those of the run's whole batch.

        Returns:
            The mean loss of this process's microbatches; 0 in a process without the last stage of the pipeline.
        """
        ...

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The same loss, without gradients."""
        ...


class Microbatches:
    """One microbatch after the other.

    Args:
        model: the model, or a wrapper around it.
        compute: makes the autocast context of a forward.
        count: number of microbatches.
    """

    def __init__(self, model: nn.Module, compute: Compute, count: int, ranks: Ranks) -> None:
        self.model, self.compute, self.count, self.ranks = model, compute, count, ranks

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Passes.train`."""
        losses = []
        for index, batch in enumerate(self._parts(inputs, targets), start=1):
            with self._last(index == self.count):
                value = self._loss(*batch)
                value.backward()
            losses.append(value.detach())
        finish_gradients(self.model, self.count, self.ranks)
        return _mean(losses)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Passes.loss`."""
        return _mean([self._loss(*batch) for batch in self._parts(inputs, targets)])

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.compute():
            return loss(self.model, inputs, targets)

    def _parts(self, inputs: Tensor, targets: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        return list(zip(inputs.chunk(self.count), targets.chunk(self.count), strict=True))

    def _last(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Replicas and shards sum their gradients after the last microbatch only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()


class Pipeline:
    """Runs stages under one of torch's pipeline schedules. Scales change after all microbatches of a step.

    Args:
        model: the layers of all stages of this process.
        compute: makes the autocast context of a forward.
        count: number of microbatches.
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
        stream_dtype = next(model.parameters()).dtype
        ids = torch.empty(rows, tokens, dtype=torch.int64, device=ranks.device)
        stream = torch.empty(rows, tokens // config.tp, model.width, dtype=stream_dtype, device=ranks.device)
        stream.requires_grad_()  # else torch sends no gradient back
        with compute() as context:
            dtype = context.fast_dtype if context._enabled else stream_dtype
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
        argument = stages if config.schedule == "interleaved" else stages[0]
        self.schedule = schedules[config.schedule](argument, count, loss_fn=self._loss, scale_grads=False)

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Passes.train`."""
        value = self._run(self.schedule.step, inputs, targets)
        finish_gradients(self.model, self.count, self.ranks)
        return value

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Passes.loss`."""
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
    """One pipeline stage: some layers of the model. Other stages of this process share the model."""

    def __init__(self, model: ByteTransformer, part: range, compute: Compute) -> None:
        super().__init__()
        self.model, self.part, self.compute = model, part, compute

    def forward(self, inputs: Tensor) -> Tensor:
        """ids or the stream -> the stream or logits; see `ByteTransformer.forward`."""
        with self.compute():
            y: Tensor = self.model(inputs, self.part)
        return y


def finish_gradients(model: nn.Module, count: int, ranks: Ranks) -> None:
    """Turns sums of gradients into means: over microbatches, and over replicas that no wrapper averages."""
    config = ranks.config
    wrapped = config.shard > 1 or (ranks.size == config.replicas and ranks.experts is None)
    replicas = 1 if wrapped else config.replicas
    if count == replicas == 1:
        return
    parts = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    gradients = [local(gradient) for gradient in parts]
    if replicas > 1 and ranks.mesh is not None:
        group = ranks.mesh.get_group("replicas")
        if ranks.experts is None:
            _add(gradients, group)
        else:  # a gradient of experts has the tokens of all processes that share these experts already
            _add([gradient for gradient in parts if not isinstance(gradient, DTensor)], group)
            _add([local(gradient) for gradient in parts if isinstance(gradient, DTensor)], ranks.copies)
    torch._foreach_div_(gradients, count * replicas)


def _add(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sums gradients over the processes of a group, in place."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        parts = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in parts])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _mean(losses: Sequence[Tensor]) -> Tensor:
    return losses[0] if len(losses) == 1 else torch.stack([value.double() for value in losses]).mean()
