"""TransformerEngine's rotary angles, and their conversion to the table of ottava's attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ottava.compat.transformer_engine.pytorch.inference import InferenceParams
from ottava.compat.transformer_engine.pytorch.module import device_for
from ottava.nn.rope import RotaryTable, packed_positions


class RotaryPositionEmbedding(nn.Module):
    """Angles of positions, fp32 (positions, 1, 1, dim), in the form that TransformerEngine's modules read.

    Example:
        >>> RotaryPositionEmbedding(64)(128).shape
        torch.Size([128, 1, 1, 64])
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10_000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        self.interleaved, self.rotary_base = interleaved, rotary_base
        self.factor, self.pretrained = seq_len_interpolation_factor, pretrained_max_position_embeddings

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles of the positions offset ... offset + max_seq_len - 1."""
        positions = torch.arange(max_seq_len, device=device_for(None), dtype=torch.float32) + offset
        if self.factor is not None and self.pretrained is not None:
            # positions beyond that length are squeezed into it
            longer = max_seq_len > self.pretrained * self.factor
            positions = positions * (self.pretrained / max_seq_len if longer else 1 / self.factor)
        powers = torch.arange(0, self.dim, 2, device=positions.device, dtype=torch.float32) / self.dim
        angles = positions[:, None] * (1.0 / self.rotary_base**powers)
        pairs = torch.stack((angles, angles), -1).flatten(-2) if self.interleaved else torch.cat((angles, angles), -1)
        return pairs[:, None, None, :]


def rotary_table(
    angles: Any,
    interleaved: bool,
    layout: str,
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    past: InferenceParams | None = None,
) -> RotaryTable | None:
    """Converts TransformerEngine's angles to ottava's table.

    Args:
        angles: one for each position of x, or more.
        x: the input, in the layout.
        cu_seqlens: starts of packed sequences ("thd"). The positions of each sequence begin at 0.
        past: the cache; the positions of x begin behind it.
    Raises:
        NotImplementedError: queries and keys have different angles.
        ValueError: there are angles of too few positions.
    """
    if angles is None:
        return None
    if isinstance(angles, tuple | list):
        raise NotImplementedError("rotary_pos_emb: different angles for queries and keys are not in ottava")
    sign = torch.ones(angles.shape[-1], device=angles.device)
    sign[:: 2 if interleaved else 1][: angles.shape[-1] // 2] = -1.0
    length = x.shape[1 if layout == "bshd" else 0]
    if past is not None:
        if len(angles) < (most := max(past.sequences.values(), default=0)):
            raise ValueError(f"rotary_pos_emb: got angles of {len(angles)} positions; this step needs {most}")
        angles = angles[past.positions(len(angles) - 1, angles.device)].squeeze(2)
        angles = angles if layout == "bshd" else angles.transpose(0, 1)
    elif layout == "thd" and cu_seqlens is not None:
        angles = angles[packed_positions(cu_seqlens)].squeeze(1)
    elif len(angles) < length:
        raise ValueError(f"rotary_pos_emb: got angles of {len(angles)} positions; needs {length}, as x has")
    else:
        angles = angles[:length].transpose(0, 1) if layout == "bshd" else angles[:length]
    return RotaryTable(angles.cos(), angles.sin() * sign, interleaved)
