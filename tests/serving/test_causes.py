"""Causes alone; in whole certificates `test_parity` seeds each of them."""

from __future__ import annotations

import torch

from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, PER_ROW, PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec
from ottava.serving.causes import activation_cause, layer_set, spec_of
from ottava.serving.engines import Decision
from ottava.serving.sides import Cast, Side

TOKEN = Cast(PER_ROW, powers=False, static=False)


def test_casts_of_activations() -> None:
    for other, cause in (
        (TOKEN, None),
        (None, "activation-granularity"),
        (Cast(PER_TENSOR, False, False), "activation-granularity"),
        (Cast(PER_ROW, False, True, 0.5), "activation-scale"),
        (Cast(PER_ROW, True, False), "activation-format"),
        (Cast(PER_ROW, False, False, rounded=False), "activation-rounding"),
    ):
        got = activation_cause(TOKEN, other)
        assert (got and got[0]) == cause, other
    assert activation_cause(None, None) is None
    assert spec_of(TOKEN, QuantizationSpec(E4M3)) == QuantizationSpec(E4M3, PER_ROW)
    powers = spec_of(Cast(BLOCK_1X32, True, False), QuantizationSpec(E4M3, BLOCK_1X32, "e8m0"))
    assert powers == QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")
    assert spec_of(Cast(BLOCK_1X128, True, False), QuantizationSpec(E4M3)).scale_format == "pow2"


def test_what_a_linear_in_high_precision_is_called() -> None:
    """A router, a head, another linear; in a list of names the pattern decides."""
    plain = Side(torch.zeros(4, 4))
    there = Side(torch.zeros(4, 4), codes=True)
    for name, cause in (("l.0.mlp.gate", "router"), ("lm_head", "head"), ("l.0.mlp.up_proj", "extra")):
        got = layer_set(name, plain, there, Decision(False), [name])
        assert got is not None
        assert got[0] == cause
    assert layer_set("up", plain, plain, Decision(False), []) is None
    assert layer_set("up", plain, plain, Decision(True), []) is None  # a config without a cast of activations
    got = layer_set("up", plain, there, Decision(False, refused="why"), [])
    assert got == ("parts", "why")
