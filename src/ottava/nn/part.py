"""A quantized layer whose weight is a piece of another module's parameter.

An expert's matrix in a stack, or the `in_proj` of an attention: optimizers, FSDP and checkpoints see the parameter and
its name, while state, receipt, calibration, plan and watch see a layer with its own doors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ottava.engine.groups import ddp_around
from ottava.engine.state import ScalingState
from ottava.kernels.custom_operator import constant_in_graph
from ottava.nn.layer import Layer
from ottava.nn.pieces import local


class Part(Layer):
    """One matrix of a parameter of `owner`, as a layer.

    Args:
        owner: the module that holds the parameters, under the names below.
        weight: name of the parameter.
        bias: name of the bias, or None.
        piece: its part of the first dimension of both: a number (one matrix), a slice (some rows), or None: all.
        turned: whether the owner keeps the matrix as (K, N).
        of_bias: its third of the bias, if three weights share a bias; None: the same piece as of the weight.

    The owner calls `run` with views of a whole stack that it makes at once: the backward of separate views would make a
    gradient of the size of the stack for each.

    Example:
        >>> attention = nn.MultiheadAttention(64, 2)
        >>> part = Part(attention, "in_proj_weight", "in_proj_bias", slice(64, None))
        >>> part.out_features, part.in_features, part.bias.shape, list(part.parameters())
        (128, 64, torch.Size([128]), [])
    """

    def __init__(
        self,
        owner: nn.Module,
        weight: str,
        bias: str | None,
        piece: int | slice | None,
        *,
        turned: bool = False,
        of_bias: int | None = None,
    ) -> None:
        super().__init__()
        # the owner's dict: a copy, a pickle or a new parameter in its place keeps the two together
        self.held, self.names, self.piece, self.turned = owner._parameters, (weight, bias), piece, turned
        self.of_bias = of_bias
        self.first: int | None = None
        """The first piece of a stack that this rank holds; None: this process holds all."""
        self.share = 1.0
        """The number of the model's rows that this layer expects."""

    @property
    def parameter(self) -> Tensor:
        """The parameter that holds the weight."""
        held: Tensor | None = self.held[self.names[0]]
        assert held is not None
        return held

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a layer's own is an attribute
        """(N, K)."""
        whole, piece = self.parameter, self.piece
        if isinstance(piece, int) and self.first is not None:  # each rank holds some of the stack
            whole, piece = local(whole), piece - self.first
            if not 0 <= piece < len(whole):  # another rank's: its shape, without memory
                whole, piece = whole.new_zeros(()).expand(1, *whole.shape[1:]), 0
        matrix = whole if piece is None else whole[piece]
        return matrix.t() if self.turned else matrix

    @property
    def bias(self) -> Tensor | None:
        """(N,) or None."""
        whole = None if self.names[1] is None or self.first is not None else self.held[self.names[1]]
        if whole is None or (self.piece is None and self.of_bias is None):
            return whole
        return whole[self.piece] if self.of_bias is None else whole.chunk(3)[self.of_bias]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """N."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """K."""
        return self.weight.shape[1]

    def extra_repr(self) -> str:
        """Shape and recipe."""
        return f"{self.in_features} -> {self.out_features} of {self.names[0]}, recipe={self.recipe.name}"


class PartOwner(nn.Module):
    """A module whose parameters have parts that are layers."""

    def bind(self, parts: Iterable[Part]) -> None:
        """Gives parts without a state (made by hand, or unpickled) one state, for their owner."""
        if torch.compiler.is_compiling() or any(not part.scaling_state.bound for part in parts):
            self._bind()

    @constant_in_graph  # a method without arguments: Dynamo of torch 2.11 takes no module as an argument of a constant
    def _bind(self) -> None:
        if any(not part.scaling_state.bound for part in self.modules() if isinstance(part, Part)):
            wrapper = ddp_around([self])
            ScalingState(self if wrapper is None else wrapper.module)


def unstacked(whole: Tensor | None, count: int) -> Sequence[Tensor | None]:
    """The matrices of a stack, with one gradient for all of them."""
    return [None] * count if whole is None else torch.unbind(whole)


def rows_of(layer: nn.Module, tokens: int) -> int:
    """The number of a forward's tokens that a layer expects; for predictions of speed."""
    return max(1, round(tokens * layer.share)) if isinstance(layer, Part) else tokens
