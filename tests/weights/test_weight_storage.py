"""Scales of stored weights: E8M0's bytes hold the fp32 scales exactly, and states of other versions are read."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from torch import nn

import ottava
from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import BLOCK_1X32
from ottava.numerics.tensor import QuantizationSpec
from ottava.weights.parameter import (
    QuantizedWeight,
    adopt_scales,
    check_storage,
    fit_bytes,
    powers_only,
    quantized_weight,
    read_scales,
    scale_dtype,
    store_scales,
    stored_spec,
)

MX = QuantizationSpec(E4M3, BLOCK_1X32, scale_format="e8m0")


def test_a_byte_holds_every_scale_of_e8m0() -> None:
    """All 255 powers of two, there and back; torch's own conversion of E8M0 is the witness."""
    codes = torch.arange(255, dtype=torch.uint8)
    powers = read_scales(codes)
    assert torch.equal(powers, codes.view(torch.float8_e8m0fnu).to(torch.float32))
    assert torch.equal(store_scales(powers, MX), codes)
    assert fit_bytes(powers)
    assert powers_only(powers)
    for wrong in (0.3, 2.0**-128, float("inf"), 0.0, -1.0):
        assert not fit_bytes(torch.tensor([[wrong]])), wrong
    tensorwise = stored_spec(QuantizationSpec(E4M3, scaling="delayed"))
    assert scale_dtype(tensorwise) == torch.float32
    assert store_scales(powers, tensorwise) is powers
    assert read_scales(powers) is powers


def test_mx_weights_take_little_more_than_their_codes() -> None:
    """At most 0.52 of BF16's bytes, counted; state dicts hold bytes, and scales in fp32 load as well, bit for bit."""
    for recipe in ("mxfp8", "mxfp8_floor"):
        made = [nn.Sequential(nn.Linear(256, 96, bias=False, dtype=torch.bfloat16)) for _ in range(3)]
        for model in made:
            ottava.convert(model, recipe, weights="fp8")
        model, other, third = made
        weight = model[0].weight
        assert ottava.memory(model).weights == weight.nbytes == weight.codes.nbytes + weight.scales.nbytes
        assert weight.nbytes <= 0.52 * 2 * weight.numel()
        state = model.state_dict()
        assert state["0.weight_scale_inv"].dtype == torch.uint8
        scales = state["0.weight_scale_inv"]
        for kind in (scales, scales.view(torch.float8_e8m0fnu), read_scales(scales)):
            nn.init.zeros_(other[0].weight)
            other.load_state_dict({**state, "0.weight_scale_inv": kind})
            assert torch.equal(other[0].weight.dequantize(), weight.dequantize())
            plain = ottava.nn.dequantize_state_dict({**state, "0.weight_scale_inv": kind})
            assert torch.equal(plain["0.weight"], weight.dequantize())
        with pytest.raises(RuntimeError, match="no powers of two"):
            third.load_state_dict({**state, "0.weight_scale_inv": torch.full(scales.shape, 0.3)})


def test_pickles_with_fp32_scales_are_read() -> None:
    """What an earlier version has pickled: codes, fp32 scales and the rest."""
    weight = quantized_weight(torch.randn(8, 64), MX)
    make, (codes, _, *rest) = weight.__reduce_ex__(2)
    old = make(codes, weight.scale_inv, *rest)
    for one in (old, pickle.loads(pickle.dumps(weight))):
        assert torch.equal(one.scales, weight.scales)
        assert torch.equal(one.dequantize(), weight.dequantize())


def test_what_is_no_weight_is_refused() -> None:
    weight = quantized_weight(torch.randn(8, 64), MX)
    with pytest.raises(TypeError, match=re.escape("has torch.float8_e4m3fn codes and torch.uint8 scales")):
        QuantizedWeight(weight.codes, weight.scale_inv, MX, torch.float32)
    with pytest.raises(ValueError, match=re.escape("needs (N, K) or (G, N, K)")):
        check_storage(weight.codes.view(-1), weight.scales, MX, torch.float32, (512,))
    with pytest.raises(ValueError, match="no powers of two"):
        adopt_scales(torch.tensor([[2.0**-128]]), MX)
