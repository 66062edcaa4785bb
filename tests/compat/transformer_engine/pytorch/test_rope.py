"""TransformerEngine's angles: heads turned as complex numbers are, in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.pytorch.rope import rotary_table
from ottava.nn.rope import rotate

SEQUENCE, BATCH, HEADS, DIM = 6, 2, 4, 8


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Pairs as complex numbers, (S, B, H, D)."""
    half = angles.shape[-1] // 2
    radians = (angles[..., ::2] if interleaved else angles[..., :half]).double()
    pairs = x.double().unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    real, imaginary = a * radians.cos() - b * radians.sin(), a * radians.sin() + b * radians.cos()
    return torch.stack((real, imaginary), -1 if interleaved else -2).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_turn_heads_as_complex_numbers(interleaved: bool) -> None:
    """In every layout, and squeezed for long contexts."""
    angles = te.RotaryPositionEmbedding(DIM, interleaved=interleaved)(SEQUENCE)
    assert angles.shape == (SEQUENCE, 1, 1, DIM)
    x = torch.randn(SEQUENCE, BATCH, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    expected, longer = turned(x, angles, interleaved), te.RotaryPositionEmbedding(DIM, interleaved=interleaved)(9)
    for layout, forth, back in (("sbhd", x, lambda y: y), ("bshd", x.transpose(0, 1), lambda y: y.transpose(0, 1))):
        table = rotary_table(longer, interleaved, layout, forth)
        assert table is not None
        assert (back(rotate(forth, table)).double() - expected).abs().max() <= 1e-5
    table = rotary_table(longer, interleaved, "thd", x[:, 0], torch.tensor([0, 4, SEQUENCE]))
    assert table is not None
    packed = torch.cat((turned(x[:4, :1], angles[:4], interleaved), turned(x[4:, :1], angles[:2], interleaved)))
    assert (rotate(x[:, 0], table).double() - packed[:, 0]).abs().max() <= 1e-5
    with pytest.raises(ValueError, match="got angles of 2 positions; needs 6"):
        rotary_table(angles[:2], interleaved, "sbhd", x)
    plain = te.RotaryPositionEmbedding(DIM, interleaved=interleaved)
    squeezed = te.RotaryPositionEmbedding(DIM, 1.0, 4, 64, interleaved=interleaved)
    assert torch.allclose(squeezed(64), plain(64) / 4)
    assert torch.allclose(squeezed(512), plain(512) / 8)
    assert torch.allclose(plain(3, offset=2), plain(5)[2:])
    assert te.RotaryPositionEmbedding(DIM, 0.5)(2).shape[-1] == DIM // 2
    with pytest.raises(NotImplementedError, match="different angles for queries and keys"):
        rotary_table((angles, angles), interleaved, "sbhd", x)
