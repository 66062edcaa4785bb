"""TransformerEngine's functions that turn queries and keys by angles of positions, on `ottava.nn.rope.rotate`.

Angles are those of `RotaryPositionEmbedding`, fp32 (positions, 1, 1, dim). Each function has one formula here: products
and sums run in FP32 and are rounded once, as in TransformerEngine's fused kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ottava.nn.rope import RotaryTable, packed_positions, rotate


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Turns heads by the angles of their positions.

    Args:
        t: (s, b, h, d), (b, s, h, d) or packed (t, h, d), as tensor_format says; entries past the angles stay.
        freqs: angles, fp32 (positions, 1, 1, dim).
        start_positions: position of the first token of each sequence, (b,); None: 0.
        interleaved: pairs are neighbours; False: they are half a head apart.
        fused: changes nothing: both ways have one formula.
        cu_seqlens: starts of packed sequences, for "thd", those of all ranks.
        cp_size, cp_rank: ranks of context parallelism: each holds the piece of its number from the front and from the
            back of a sequence.
    Returns:
        A contiguous tensor of the shape and dtype of t.
    Raises:
        ValueError: the format is unknown, cu_seqlens are missing, or there are angles of too few positions.
    """
    if tensor_format not in ("sbhd", "bshd", "thd"):
        raise ValueError(f"apply_rotary_pos_emb: got tensor_format {tensor_format!r}; needs 'sbhd', 'bshd' or 'thd'")
    packed = tensor_format == "thd"
    if packed and cu_seqlens is None:
        raise ValueError("apply_rotary_pos_emb: got 'thd' without cu_seqlens; needs the starts of the sequences")
    if packed:
        assert cu_seqlens is not None
        positions, lengths = packed_on_rank(cu_seqlens, cp_size, cp_rank)
        if start_positions is not None:
            positions = positions + start_positions.to(positions.device).repeat_interleave(lengths)
    else:
        count = t.shape[0 if tensor_format == "sbhd" else 1]
        order = torch.arange(count, device=freqs.device)
        positions = on_rank(order, torch.full_like(order, count), cp_size, cp_rank)[:, None]
        if start_positions is not None:
            positions = positions + start_positions.to(positions.device)  # (s, b)
        positions = positions if tensor_format == "sbhd" else positions.t()
    needed = int(positions.max()) + 1 if positions.numel() else 0
    if needed > len(freqs):
        raise ValueError(f"apply_rotary_pos_emb: got angles of {len(freqs)} positions; needs {needed}")
    angles = freqs[positions].squeeze(-3)  # (t, 1, dim) or (s, b, 1, dim)
    # a result in FP32 is what makes its gradient one rounding, too
    return rotate(t, table_of(angles, interleaved), torch.float32).to(t.dtype).contiguous()


def table_of(angles: Tensor, interleaved: bool) -> RotaryTable:
    """ottava's table of TransformerEngine's angles (..., dim)."""
    sign = torch.ones(angles.shape[-1], device=angles.device)
    sign[:: 2 if interleaved else 1][: angles.shape[-1] // 2] = -1.0
    return RotaryTable(angles.cos(), angles.sin() * sign, interleaved)


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits (.., h, q + k + v entries) into heads of the size of k, and turns those of q and k.

    Returns:
        Queries (.., h * q / k, size), keys and values (.., h, size).
    """
    size = qkv_split_arg_list[1]
    q, k, v = qkv.split(list(qkv_split_arg_list), -1)
    q = q.reshape(*q.shape[:-2], -1, size)
    options = tensor_format, start_positions, interleaved, True, cu_seqlens, cp_size, cp_rank
    return apply_rotary_pos_emb(q, q_freqs, *options), apply_rotary_pos_emb(k, k_freqs, *options), v.contiguous()


def packed_on_rank(cu_seqlens: Tensor, size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Places in their whole sequences of a rank's tokens, and how many of each sequence it has."""
    here = cu_seqlens // size
    lengths = here.diff()
    return on_rank(packed_positions(here), lengths.repeat_interleave(lengths), size, rank), lengths


def on_rank(order: Tensor, length: Tensor, size: int, rank: int) -> Tensor:
    """Places in whole sequences of the tokens with these places on a rank that holds `length` of each."""
    half = length // 2
    front = order + rank * half
    back = order - half + size * length - (rank + 1) * half
    return order if size == 1 else torch.where(order < half, front, back)
