"""A model that several processes share: how it is split over them, and how a batch goes through it.

`split` gives each process its stages, heads, sequences, shards or replica. `Microbatches` and `Pipeline` run forward
and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ottava.base.settings import ConfigError
from ottava.distributed import (
    ColwiseParallel,
    ContextParallel,
    ExpertParallel,
    RowwiseParallel,
    each_gradient_hook,
    fully_shard,
)
from ottava.nn.moe import MoE
from ottava.optim.engine import summed
from ottava.train.config import ModelConfig, ParallelConfig
from ottava.train.model import VOCABULARY, ByteTransformer, entropy, loss
from ottava.train.ranks import Orders, Ranks
from ottava.weights.parameter import local


def parts_of(config: ParallelConfig, layers: int, place: int) -> list[tuple[int, range]]:
    """The number and the layers of each stage that the process at `place` of the pipeline runs.

    Example:
        >>> parts_of(ParallelConfig(pp=2, schedule="interleaved"), 6, 1)
        [(1, range(2, 4)), (3, range(5, 6))]
    """
    size, more = divmod(layers, config.stages)
    starts = [stage * size + min(stage, more) for stage in range(config.stages + 1)]
    return [(stage, range(*starts[stage : stage + 2])) for stage in range(place, config.stages, config.pp)]


def split(model: ByteTransformer, sizes: ModelConfig, ranks: Ranks) -> tuple[nn.Module, Orders]:
    """Reduces the model, in place, to the part that this process holds.

    Returns:
        The module to call (the model, or a wrapper around it), and the orders of fused weights.
    """
    config, mesh, orders = ranks.config, ranks.mesh, {}
    if mesh is None:
        return model, {}
    if config.pp > 1:
        model.keep([part for _, part in parts_of(config, sizes.layers, ranks.place("pp"))])
    if config.tp > 1:
        orders = _split_layers(model, sizes, mesh["tp"])
    if ranks.context is not None:
        model.first = ranks.part_of_sequences * (len(model.cos) // config.cp)
        parallelize_module(model, ranks.context, {"": ContextParallel(gather_keys=True)})
    if ranks.experts is not None:
        layers = [name for name, module in model.named_modules() if isinstance(module, MoE)]
        parallelize_module(model, ranks.experts, dict.fromkeys(layers, ExpertParallel()))
    if config.shard > 1:
        data_mesh = mesh["replicas", "shard"] if config.replicas > 1 else mesh["shard"]
        try:
            for module in (*model.layers, model):
                fully_shard(module, mesh=data_mesh)
        except NotImplementedError as error:  # a shard would cut a block of FP8 weights
            raise ConfigError(f"parallel.shard is {config.shard}: {error}") from error
    elif ranks.size == config.replicas and ranks.experts is None:  # DistributedDataParallel refuses split weights
        index = ranks.device.index if ranks.device.type == "cuda" else None
        wrapper = DistributedDataParallel(model, device_ids=None if index is None else [index])
        wrapper.register_comm_hook(None, each_gradient_hook)  # a resumed run has the bits of a whole one
        return wrapper, orders
    return model, orders


def _split_layers(model: ByteTransformer, sizes: ModelConfig, mesh: DeviceMesh) -> dict[str, Tensor]:
    tokens, orders = Shard(1), {}
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "norm": _NormOfTokens(),
        "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),
    }
    width = sizes.d_model // sizes.heads
    fused = {
        "attention.qkv_proj": [sizes.heads * width, sizes.kv_heads * width, sizes.kv_heads * width],
        "mlp.gate_up_proj": [sizes.ffn, sizes.ffn],
    }
    layers: Any = model.layers.named_children()
    for name, layer in layers:
        layer.attention.sizes = tuple(size // mesh.size() for size in layer.attention.sizes)
        for inner, rows in fused.items():
            weight = layer.get_submodule(inner).weight
            order = orders[f"layers.{name}.{inner}.weight"] = _shared_out(rows, mesh.size()).to(weight.device)
            weight.data = weight.data[order]
            plan[f"layers.{name}.{inner}"] = ColwiseParallel(input_layouts=tokens)
        for inner in ("attention.o_proj", "mlp.down_proj"):
            plan[f"layers.{name}.{inner}"] = RowwiseParallel(output_layouts=tokens)
    model.token_ranks = mesh.size()
    present = {name for name, _ in model.named_modules()}
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if name in present})
    return orders


def _shared_out(sizes: list[int], ranks: int) -> Tensor:
    """An order of the rows of fused matrices: process 0's share of each matrix, then process 1's, and so on.

    Example:
        >>> _shared_out([4, 2], 2).tolist()
        [0, 1, 4, 2, 3, 5]
    """
    parts = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([part.chunk(ranks)[rank] for rank in range(ranks) for part in parts])


class _NormOfTokens(ParallelStyle):
    """A norm with its input split by tokens: each process sums the weight's gradient over its own tokens only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        norm: Any = module
        norm.weight = nn.Parameter(distribute_tensor(norm.weight, device_mesh, [Replicate()]))
        norm.producer_parameters = lambda: (norm.weight.to_local(grad_placements=[Partial()]),)
        return module


# --- forward and backward --------------------------------------------------------------------------------------------

Compute = Callable[[], torch.autocast]


class Microbatches:
    """Computes the loss of this process's part of a batch, and the gradients: one microbatch after the other.

    Args:
        model: the model, or a wrapper around it.
        compute: makes the autocast context of a forward.
        count: number of microbatches.
    """

    def __init__(self, model: nn.Module, compute: Compute, count: int, ranks: Ranks) -> None:
        self.model, self.compute, self.count, self.ranks = model, compute, count, ranks

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Runs forward and backward. The gradients become those of the run's whole batch.

        Returns:
            The mean loss of this process's microbatches; 0 in a process without the last stage of the pipeline.
        """
        losses = []
        for index, batch in enumerate(self._parts(inputs, targets), start=1):
            with self._last(index == self.count):
                value = self._loss(*batch)
                value.backward()
            losses.append(value.detach())
        finish_gradients(self.model, self.count, self.ranks)
        return _mean(losses)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The same loss, without gradients."""
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
        """As `Microbatches.train`."""
        value = self._run(self.schedule.step, inputs, targets)
        finish_gradients(self.model, self.count, self.ranks)
        return value

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """As `Microbatches.loss`."""
        return self._run(self.schedule.eval, inputs, targets)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        with self.compute():
            return entropy(logits, targets)

    def _run(self, through: Callable[..., Any], inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        first = (inputs.contiguous(),) if self.first else ()  # torch 2.11 compares strides
        through(*first, target=targets if self.last else None, losses=losses if self.last else None)
        return _mean(losses) if self.last else torch.zeros((), dtype=torch.float32, device=self.ranks.device)


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
    """Adds what ranks with other tokens have of a gradient; then sums become means: over microbatches, and over
    replicas that no wrapper averages."""
    config = ranks.config
    for parameter in model.parameters() if config.tp > 1 else ():
        parameter.grad = summed(parameter, parameter.grad)
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
