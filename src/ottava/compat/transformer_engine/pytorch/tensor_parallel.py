"""TransformerEngine's tensor parallelism: each rank builds its shard of a module, as plain parameters.

`nn.sharding` runs the shards: ranks exchange codes, and scales are those of the whole tensors. Each rank holds some
parameters whole, but computes their gradients from its own tokens only. As with TransformerEngine, the trainer must sum
these gradients; their parameters have the attribute `sequence_parallel`, True. Split weights have the attributes
`tensor_model_parallel` and `partition_dim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from ottava.compat.transformer_engine.pytorch.gradients import Extras, WeightGradients
from ottava.compat.transformer_engine.pytorch.state import TEState
from ottava.nn.layer import Layer
from ottava.nn.sharding import Sharding

MODES = (None, "column", "row")


class Shards(NamedTuple):
    """How the ranks of a group share a module."""

    where: str
    """The module's class, for errors."""
    group: dist.ProcessGroup | None = None
    """None: this rank holds the whole module, or `set_tensor_parallel_group` gives the group later."""
    size: int = 1
    """Number of ranks."""
    sequence: bool = False
    """Whether each rank holds a part of the tokens (the first dimension) between the split linears."""

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
    """Checks the arguments for tensor parallelism, and returns them as `Shards`.

    Args:
        split: whether a parallel mode is set.
    Raises:
        TypeError: tp_group is no group.  ValueError: tp_size is no number of ranks.
        NotImplementedError: there are several ranks, but no parallel mode is set.
    """
    if tp_group is not None and not isinstance(tp_group, dist.ProcessGroup):
        raise TypeError(f"{where}: tp_group={tp_group!r} is no process group; torch.distributed.new_group makes one")
    size = tp_size if tp_group is None else dist.get_world_size(tp_group)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{where}: got tp_size={size!r}; needs the number of ranks, 1 or more")
    if size > 1 and not split and where not in ("Linear", "LayerNormLinear", "DotProductAttention"):
        raise NotImplementedError(
            f"{where}: {size} ranks with set_parallel_mode=False are not in ottava; use set_parallel_mode=True"
        )
    if not split:
        return Shards(where)
    return Shards(where, tp_group if size > 1 else None, size, bool(sequence_parallel) and size > 1)


class Sharded(TEState, WeightGradients):
    """A TransformerEngine module. Each rank of a group may hold a shard of it."""

    def finish(self, extras: Extras, shards: Shards, *keys: Any, mode: Any = "column") -> None:
        """What a constructor does after it has built its layers: keys of TransformerEngine, as `uses_their_keys` takes
        them, names of the layers, initial values, this rank's share, and the settings of `extras`."""
        self.uses_their_keys(*keys)
        self.names_layers(extras.given.get("name"))
        with extras.initial():
            self.starts(extras.given["init_method"], extras.given.get("output_layer_init_method"))
        self.share(shards, mode)
        self.gives(extras)

    def share(self, shards: Shards, mode: str | None = "column") -> None:
        """Marks this module as a shard.

        Args:
            mode: the parallel mode of a module that is itself a linear.
        """
        self._shards, self._mode = shards, mode
        if shards.group is not None:
            self.set_tensor_parallel_group(shards.group)
        elif shards.size > 1:
            for layer in (module for module in self.modules() if isinstance(module, Layer)):
                layer.sharding = _NoGroup(shards)

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Sets the group of ranks that share the module. Does nothing if tp_size is 1.

        Raises:
            ValueError: the group's size is not tp_size.
        """
        if self._shards.size == 1 or tp_group is None:
            return
        size, sequence = dist.get_world_size(tp_group), self._shards.sequence
        if size != self._shards.size:
            raise ValueError(f"{self._shards.where}: got a group of {size} ranks; needs {self._shards.size} (tp_size)")
        tokens: Placement = Shard(0) if sequence else Replicate()
        for name, module in self.named_modules():
            parameters: Mapping[str, Any] = module._parameters
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):  # each rank norms a part of the tokens or of the heads
                for parameter in parameters.values():
                    mark(parameter, sequence_parallel=sequence or name.endswith(("q_norm", "k_norm")))
            if not isinstance(module, Layer):
                continue
            row = name.endswith(("out", "fc2")) or (name == "" and self._mode == "row")
            mesh = DeviceMesh.from_group(tp_group, "cuda" if module.weight.is_cuda else "cpu")
            places: tuple[Placement, Placement] = (Shard(-1), tokens) if row else (tokens, Shard(-1))
            module.sharding = Sharding(mesh, int(row), *places)
            mark(parameters["weight"], tensor_model_parallel=True, partition_dim=int(row), partition_stride=1)
            if row:
                mark(parameters["bias"], sequence_parallel=sequence)
            else:
                mark(parameters["bias"], tensor_model_parallel=True, partition_dim=0, partition_stride=1)


def mark(parameter: nn.Parameter | None, **attributes: Any) -> None:
    """Sets attributes that tell a trainer which parameters are split."""
    for name, value in attributes.items() if parameter is not None else ():
        setattr(parameter, name, value)


def one_of_modes(where: str, parallel_mode: str | None) -> str | None:
    """Checks the mode and returns it.

    Raises:
        ValueError: the mode is unknown.
    """
    if parallel_mode not in MODES:
        raise ValueError(f"{where}: parallel_mode is {parallel_mode!r}; needs None, 'column' or 'row'")
    return parallel_mode


class _NoGroup:
    """The sharding of a module that has no group yet: its forward raises an error."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def forward(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            f"{self.shards.where}: tp_size is {self.shards.size}, but the module has no group; give tp_group, or call "
            "set_tensor_parallel_group(group) before the first forward"
        )
