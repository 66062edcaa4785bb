"""Weights that lie below each other in one: a layer in pieces computes what a layer in one piece does, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.nn.pieces import Piece, split_pieces


def results(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer(x).float().square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def test_pieces_have_the_bits_of_the_whole() -> None:
    """Three steps of every layer that knows its pieces, cached casts and predicted scales included; and of a copy."""
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for recipe in ("tensorwise", "delayed", "blockwise", "bf16"):
        attention = ottava.nn.MultiheadAttention(64, 4, kv_heads=2, dtype=torch.bfloat16, recipe=recipe)
        mlp = ottava.nn.NormMLP(64, 96, activation="swiglu", norm=None, dtype=torch.bfloat16, recipe=recipe)
        for whole in (attention.qkv, mlp.fc1):
            ottava.convert(whole, recipe, filter=lambda name, layer: True)
            split = copy.deepcopy(whole)
            split_pieces(split)
            names = [piece.name for piece in whole.pieces]
            assert [n for n, _ in split.named_parameters()] == [
                f"{n}_{kind}" for kind in ("weight", "bias") for n in names
            ]
            for one in (split, copy.deepcopy(split)):
                reference = copy.deepcopy(whole)
                optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, one)]
                for _ in range(3):
                    wanted, got = results(reference, x), results(one, x)
                    assert torch.equal(got[0], wanted[0])
                    assert torch.equal(torch.cat(got[1 : 1 + len(names)]), wanted[1])
                    assert torch.equal(torch.cat(got[1 + len(names) :]), wanted[2])
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                assert one.quantizers.state_dict().keys() == reference.quantizers.state_dict().keys()
                for other, buffer in zip(one.quantizers.buffers(), reference.quantizers.buffers(), strict=True):
                    assert torch.equal(other, buffer)


def test_state_dicts_of_either_form_load_into_both() -> None:
    whole = ottava.nn.NormMLP(64, 96, activation="swiglu").fc1
    split = ottava.nn.NormMLP(64, 96, activation="swiglu").fc1
    split_pieces(split)
    assert split.load_state_dict(whole.state_dict()).missing_keys == []
    assert torch.equal(split.weight, whole.weight)
    assert torch.equal(split.bias, whole.bias)
    other = ottava.nn.NormMLP(64, 96, activation="swiglu").fc1
    assert other.load_state_dict(split.state_dict()).unexpected_keys == []
    assert torch.equal(other.weight, whole.weight)


def test_refusals() -> None:
    layer = ottava.nn.Linear(64, 64)
    with pytest.raises(ValueError, match=r"got pieces of \[32, 16\] rows; needs 64 in all"):
        split_pieces(layer, [Piece("a", 32), Piece("b", 16)])
    ottava.convert(layer, "tensorwise", weights="fp8")
    with pytest.raises(TypeError, match="weights='bf16'"):
        split_pieces(layer, [Piece("a", 32), Piece("b", 32)])
    assert list(layer.state_dict()) == ["weight", "bias", "weight_scale_inv"]
