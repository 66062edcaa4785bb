"""Rotation by TransformerEngine's functions: complex numbers in fp64 as witness, formats, offsets, ranks."""

from __future__ import annotations

import pytest
import torch
from tests.sweep import sweep
from torch import Tensor

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.pytorch.rope import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb

EPS = torch.finfo(torch.float32).eps


def witness(x: Tensor, positions: Tensor, dim: int, interleaved: bool) -> Tensor:
    """Heads (s, h, d) at positions (s,), as complex numbers in fp64."""
    angles = positions.double()[:, None, None] / 10_000 ** (torch.arange(0, dim, 2).double() / dim)
    turned, rest = x[..., :dim].double(), x[..., dim:].double()
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    numbers = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_real(numbers)
    flat = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat((flat, rest), -1)


@sweep(interleaved=(False, True), layout=("sbhd", "bshd", "thd"), offsets=(False, True), ranks=(1, 2))
def test_heads_turn_by_their_positions(interleaved: bool, layout: str, offsets: bool, ranks: int) -> None:
    """On each rank its tokens are the piece of its number from the front, and from the back."""
    length, batch, dim = 8, 2, 6
    freqs = te.RotaryPositionEmbedding(dim, interleaved=interleaved)(40)
    starts = torch.tensor([3, 11], dtype=torch.int32) if offsets else None
    x = torch.randn(length * ranks, batch, 3, 8)
    for rank in range(ranks):
        half = length // 2
        first, last = rank * half, ranks * length - (rank + 1) * half
        here = torch.cat((torch.arange(first, first + half), torch.arange(last, last + half)))
        mine = x[here]
        expected = [
            witness(mine[:, b], here + (0 if starts is None else int(starts[b])), dim, interleaved)
            for b in range(batch)
        ]
        given = {"sbhd": mine, "bshd": mine.transpose(0, 1), "thd": mine.transpose(0, 1).flatten(0, 1)}[layout]
        ends = torch.tensor([0, length, 2 * length]) * ranks if layout == "thd" else None
        got = apply_rotary_pos_emb(
            given, freqs, layout, starts, interleaved, cu_seqlens=ends, cp_size=ranks, cp_rank=rank
        )
        whole = torch.stack(expected, 1 if layout == "sbhd" else 0)
        whole = whole.flatten(0, 1) if layout == "thd" else whole
        # an angle of 40 is off by 40 eps / 2 where it is made, and its cosine by as much
        assert (got - whole).abs().max() <= 64 * EPS * x.abs().max()
        assert got.is_contiguous()


def test_fused_projections_are_split_and_turned() -> None:
    freqs, qkv = te.RotaryPositionEmbedding(8)(5), torch.randn(5, 2, 3, 4 * 8 + 8 + 8)
    q, k, v = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [32, 8, 8])
    assert torch.equal(q, apply_rotary_pos_emb(qkv[..., :32].reshape(5, 2, 12, 8), freqs))
    assert torch.equal(k, apply_rotary_pos_emb(qkv[..., 32:40], freqs))
    assert torch.equal(v, qkv[..., 40:])
    with pytest.raises(ValueError, match="got angles of 5 positions; needs 6"):
        apply_rotary_pos_emb(torch.randn(6, 1, 1, 8), freqs)
    with pytest.raises(ValueError, match="needs the starts of the sequences"):
        apply_rotary_pos_emb(torch.randn(6, 1, 8), freqs, "thd")
