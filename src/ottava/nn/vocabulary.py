"""Cross-entropy whose classes are split over ranks: no rank holds the logits of all of them, not even of one token.

    lse = log sum over ranks of exp lse_r        the target's logit and the mean: sums over ranks

Ranks exchange three numbers a token, and sum dx. Where the tokens are split too, their codes are gathered chunk by
chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from ottava.nn.cross_entropy import _BLOCK, Vocabulary
from ottava.nn.pieces import local
from ottava.nn.sharding import Replicated, Sharding, Tokens, all_gather
from ottava.numerics.tensor import Operand


class SharedVocabulary(Vocabulary):
    """This rank's classes; an `Exchange` of its layer, too.

    Args:
        group: the ranks, in the order of their classes.
        first, every: this rank's first class, and the number of all.
        split: whether each rank has tokens of its own; False: all have all.
    """

    def __init__(self, group: dist.ProcessGroup, first: int, every: int, split: bool) -> None:
        self.group, self.first, self.every, self.split = group, first, every, split
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, tensor: str, operand: Operand, dim: int) -> Operand:
        """The tokens of all ranks, as codes."""
        if not self.split or tensor != "input":
            return operand
        return Tokens(self.group, (operand.shape[dim],), 0).gather(operand, dim)

    def sum(self, tensor: str, partial: Tensor) -> Tensor:
        """Over the classes of all ranks; where tokens are split, of those of this rank."""
        if tensor != "dx":
            return partial
        held = Tokens(self.group, (partial.shape[0] // self.ranks,), 0) if self.split else Replicated(self.group)
        return held.sum(partial)

    def everybody(self, of_tokens: Tensor) -> Tensor:
        """(m,) -> (ranks * m,), or itself."""
        if not self.split:
            return of_tokens
        every = of_tokens.new_empty(self.ranks * of_tokens.shape[0])
        all_gather(every, of_tokens.contiguous(), group=self.group)
        return every

    def own(self, of_tokens: Tensor) -> Tensor:
        """This rank's."""
        return of_tokens.chunk(self.ranks)[self.rank] if self.split and of_tokens.numel() else of_tokens

    def total(self, count: Tensor) -> Tensor:
        """Summed where tokens are split."""
        if self.split:
            dist.all_reduce(count, group=self.group)
        return count

    def classes(self, here: int) -> int:
        """All."""
        return self.every

    def at_once(self, tokens: int) -> int:
        """Whole blocks, so that a chunk of all ranks has about as many tokens."""
        return max(_BLOCK, tokens // self.ranks // _BLOCK * _BLOCK) if self.split else tokens

    def places(self, target: Tensor, counts: Tensor, here: int) -> tuple[Tensor, Tensor]:
        """In this rank's logits."""
        at = target - self.first
        inside = counts & (at >= 0) & (at < here)
        return torch.where(inside, at, 0), inside

    def reduced(self, logits: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One gather of three numbers a token."""
        mine = torch.stack((logits.logsumexp(-1), own, logits.sum(-1)))
        every = mine.new_empty(self.ranks * 3, mine.shape[1])
        all_gather(every, mine, group=self.group)
        lse, target, total = every.view(self.ranks, 3, -1).unbind(1)
        return lse.logsumexp(0), target.sum(0), total.sum(0) / self.every

    def __str__(self) -> str:
        return f"classes split over {self.ranks} ranks"


class VocabularySharding(Sharding):
    """Splits the classes of a `LinearCrossEntropy`. Every rank gets the loss of all tokens.

    Where the input's tokens are split, each rank gives the targets of its own.
    """

    def apply(self, layer: Any, src_data_rank: int | None = 0) -> None:
        """As of other layers.

        Raises:
            ValueError: a rank would have no class.
        """
        share = -(-layer.weight.shape[0] // self.mesh.size())
        if share * (self.mesh.size() - 1) >= layer.weight.shape[0]:
            raise ValueError(
                f"ColwiseParallel: {layer.weight.shape[0]} classes leave a rank of {self.mesh.size()} without one; "
                "take fewer ranks, or pad the vocabulary"
            )
        self.first = share * self.mesh.get_local_rank()
        super().apply(layer, src_data_rank)

    def forward(self, layer: Any, input: Tensor, *more: Any) -> Tensor:
        """(..., K) and targets (...) -> the loss."""
        x, place = self._enter(input)
        (target,) = map(local, more)
        if self._settled != (layer.quantizers, place):
            self._settle(layer, place)
            self._settled = layer.quantizers, place
        split = isinstance(place, Shard)
        layer.exchange = SharedVocabulary(self.group, self.first, layer.weight.shape[0], split)
        rows = x.reshape(-1, x.shape[-1])
        loss: Tensor = layer.run(rows, local(layer.weight), local(layer.bias), target.flatten())
        if layer.last_call is not None:
            layer.last_call.remark = str(layer.exchange)
        return loss.view(target.shape) if loss.dim() else loss
