"""A layer that multiplies several weights at once: q, k and v, or gate and up, one below the other.

In one process they are one parameter. Ranks that split a layer by output features each hold their share of every one of
them, so there each is a parameter of its own, as in TransformerEngine (`parameters_split`): torch's sharded tensors,
checkpoints, optimizers and norms of gradients then see ordinary shards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava.weights.parameter import is_quantized_weight


class Piece(NamedTuple):
    """One of the weights that lie below each other in the weight of a layer."""

    name: str
    """Its parameters are NAME_weight and NAME_bias."""
    rows: int
    """Of the whole weight."""
    unit: int = 1
    """Rows that one rank keeps together: the entries of a head."""


def split_pieces(layer: Any, pieces: Sequence[Piece] = ()) -> None:
    """Makes each weight of a fused layer a parameter of its own; the layer then joins them in each forward.

    Args:
        layer: an ottava layer.
        pieces: from top to bottom; none: those that the layer knows (`nn.MultiheadAttention`, `nn.NormMLP`).
    Raises:
        ValueError: their rows do not add up to the weight's.
    Edge cases: optimizers have to be made after it. State dicts of either kind load into both.

    Example:
        >>> import ottava
        >>> mlp = ottava.nn.NormMLP(64, 96, activation="swiglu", bias=False)
        >>> split_pieces(mlp.fc1)
        >>> [name for name, _ in mlp.fc1.named_parameters()], mlp.fc1.weight.shape
        (['gate_weight', 'up_weight', 'norm.weight', 'norm.bias'], torch.Size([192, 64]))
    """
    pieces = tuple(pieces or layer.pieces)
    rows = [piece.rows for piece in pieces]
    if sum(rows) != layer.weight.shape[0]:
        raise ValueError(
            f"{layer.name or type(layer).__name__}: got pieces of {rows} rows; needs {layer.weight.shape[0]} in all, "
            "as the weight has them"
        )
    if is_quantized_weight(layer.weight):
        raise TypeError(
            f"{layer.name or type(layer).__name__}: its weight is stored only as codes, and its pieces would have "
            "scales of their own, where a GEMM takes one. Give it numbers, ottava.convert(model, recipe, "
            "weights='bf16'), or shard it with fully_shard"
        )
    layer.pieces = pieces
    own = {kind: layer._parameters.pop(kind) for kind in ("weight", "bias")}
    layer.__class__ = _split_class(layer.__class__)
    front = {}
    for kind, whole in own.items():
        parts = [None] * len(pieces) if whole is None else whole.detach().split(rows)
        for piece, part in zip(pieces, parts, strict=True):
            parameter = None if part is None else nn.Parameter(part.clone(), whole.requires_grad)
            front[f"{piece.name}_{kind}"] = parameter
    layer._parameters.update(front)


class SplitWeight:
    """The part of a layer's class that joins its pieces."""

    pieces: tuple[Piece, ...]
    _parameters: dict[str, Any]

    @property
    def weight(self) -> Tensor:
        """(N, K): the rows of all pieces; on a rank its own rows."""
        return torch.cat([local(self._parameters[f"{piece.name}_weight"]) for piece in self.pieces])

    @property
    def bias(self) -> Tensor | None:
        """(N,) or None; on a rank its own entries."""
        parts = [self._parameters[f"{piece.name}_bias"] for piece in self.pieces]
        return None if parts[0] is None else torch.cat([local(part) for part in parts])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for kind in ("weight", "bias"):
            if (whole := state_dict.pop(f"{prefix}{kind}", None)) is None:
                continue
            for piece, part in zip(self.pieces, whole.split([p.rows for p in self.pieces]), strict=True):
                name = f"{piece.name}_{kind}"
                state_dict[prefix + name] = _shared_as(self._parameters[name], part)
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]  # the layer's

    @property
    def parameter(self) -> Tensor:
        """The first piece's; an optimizer that steps it steps all."""
        first: Tensor = self._parameters[f"{self.pieces[0].name}_weight"]
        return first


@functools.lru_cache(maxsize=64)
def _split_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Split{kind.__name__}", (SplitWeight, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def local(tensor: Any) -> Any:
    """This rank's part of a tensor that ranks share; others as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _shared_as(own: Any, whole: Tensor) -> Tensor:
    """A whole tensor, split as a parameter is whose place it takes."""
    if not hasattr(own, "device_mesh") or hasattr(whole, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor  # it takes a second to import

    return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)


def joined_form(layer: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Gives a state dict with a tensor for each piece the one that a layer in one piece has."""
    for kind in ("weight", "bias"):
        names = [f"{prefix}{piece.name}_{kind}" for piece in layer.pieces]
        if kind in layer._parameters and names and all(name in state_dict for name in names):
            state_dict[f"{prefix}{kind}"] = torch.cat([_whole(state_dict.pop(name)) for name in names])


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
