"""TransformerEngine's tensor parallelism: each rank makes its shard of a module, as plain parameters.

`nn.sharding` runs the shards, so codes travel and scales are those of the whole tensors. The trainer sums what
TransformerEngine leaves to it: gradients of parameters that are whole on each rank while ranks hold other tokens. Their
attribute `sequence_parallel` is True. Weights that are split have the attributes `tensor_model_parallel` and
`partition_dim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from ottava.compat.transformer_engine.pytorch.state import TEState
from ottava.nn.layer import Layer
from ottava.nn.sharding import Sharding

MODES = (None, "column", "row")


class Shards(NamedTuple):
    """How the ranks of a group share a module."""

    where: str
    """The module's class, for errors."""
    group: dist.ProcessGroup | None = None
    """None: the whole module is here, or `set_tensor_parallel_group` comes later."""
    size: int = 1
    """Ranks."""
    sequence: bool = False
    """Whether ranks hold a part of the tokens each, of the first dimension, between the linears that are split."""

    def of(self, what: str, count: int) -> int:
        """This rank's share of heads or features.

        Raises:
            ValueError: the ranks cannot share them evenly.

        Example:
            >>> Shards("MultiheadAttention", size=2).of("heads", 12)
            6
        """
        if count % self.size:
            raise ValueError(f"{self.where}: got {what}={count} for {self.size} ranks; needs a multiple")
        return count // self.size


def shards_for(
    where: str, tp_group: dist.ProcessGroup | None, tp_size: int, sequence_parallel: bool, *, split: bool
) -> Shards:
    """What the arguments say; split: whether a parallel mode is set.

    Raises:
        TypeError: tp_group is no group.  ValueError: no such size.  NotImplementedError: ranks, but nothing is split.
    """
    if tp_group is not None and not isinstance(tp_group, dist.ProcessGroup):
        raise TypeError(f"{where}: tp_group={tp_group!r} is no process group; torch.distributed.new_group makes one")
    size = tp_size if tp_group is None else dist.get_world_size(tp_group)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{where}: got tp_size={size!r}; needs a count of ranks")
    if size > 1 and not split and where not in ("Linear", "LayerNormLinear", "DotProductAttention"):
        raise NotImplementedError(
            f"{where}: {size} ranks and set_parallel_mode=False are not in ottava: give set_parallel_mode=True"
        )
    if not split:
        return Shards(where)
    return Shards(where, tp_group if size > 1 else None, size, bool(sequence_parallel) and size > 1)


class Sharded(TEState):
    """A module of TransformerEngine's; each rank of a group may hold a shard of it."""

    def share(self, shards: Shards, mode: str | None = "column") -> None:
        """Called by a constructor that has made this rank's shard; mode: of a module that is itself a linear."""
        self._shards, self._mode = shards, mode
        if shards.group is not None:
            self.set_tensor_parallel_group(shards.group)
        elif shards.size > 1:
            for layer in (one for one in self.modules() if isinstance(one, Layer)):
                layer.sharding = _NoGroup(shards)

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Says which ranks share the module; nothing to do where tp_size is 1 or tp_group came with the constructor.

        Raises:
            ValueError: a group of another size than tp_size.
        """
        if self._shards.size == 1 or tp_group is None:
            return
        size, sequence = dist.get_world_size(tp_group), self._shards.sequence
        if size != self._shards.size:
            raise ValueError(f"{self._shards.where}: got a group of {size} ranks; tp_size is {self._shards.size}")
        tokens: Placement = Shard(0) if sequence else Replicate()
        for name, module in self.named_modules():
            own: Mapping[str, Any] = module._parameters
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):  # ranks norm some of the tokens, or some of the heads
                for parameter in own.values():
                    mark(parameter, sequence_parallel=sequence or name.endswith(("q_norm", "k_norm")))
            if not isinstance(module, Layer):
                continue
            row = name.endswith(("out", "fc2")) or (name == "" and self._mode == "row")
            mesh = DeviceMesh.from_group(tp_group, "cuda" if module.weight.is_cuda else "cpu")
            places: tuple[Placement, Placement] = (Shard(-1), tokens) if row else (tokens, Shard(-1))
            module.sharding = Sharding(mesh, int(row), *places)
            mark(own["weight"], tensor_model_parallel=True, partition_dim=int(row), partition_stride=1)
            if row:
                mark(own["bias"], sequence_parallel=sequence)
            else:
                mark(own["bias"], tensor_model_parallel=True, partition_dim=0, partition_stride=1)


def mark(parameter: nn.Parameter | None, **attributes: Any) -> None:
    """Sets attributes by which trainers know what ranks share."""
    for name, value in attributes.items() if parameter is not None else ():
        setattr(parameter, name, value)


def one_of_modes(where: str, parallel_mode: str | None) -> str | None:
    """The mode itself.

    Raises:
        ValueError: no such mode.
    """
    if parallel_mode not in MODES:
        raise ValueError(f"{where}: parallel_mode is {parallel_mode!r}; needs None, 'column' or 'row'")
    return parallel_mode


class _NoGroup:
    """Stands for the sharding of a module whose ranks are not known yet."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def forward(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            f"{self.shards.where}: tp_size is {self.shards.size}, and no group is known; give tp_group, or call "
            "set_tensor_parallel_group(group) before the first forward"
        )
