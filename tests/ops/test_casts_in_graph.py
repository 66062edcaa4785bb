"""The operators that compiled code calls for a cast behind a transform: what fakes promise, what they return."""

from __future__ import annotations

from dataclasses import replace

import torch

import ottava
from ottava.numerics.scaling import BLOCK_1X16
from ottava.numerics.tensor import QuantizationSpec
from ottava.numerics.transforms import Hadamard, Mean, Smooth
from ottava.ops.quantize import _draws, quantize

SPEC = QuantizationSpec(ottava.E2M1, BLOCK_1X16, "e4m3")


def test_operators_are_the_casts_of_eager_code() -> None:
    """Columns that need zeros, x.T, and numbers of the other operand; the fake agrees, and nothing aliases."""
    x = torch.randn(24, 40).bfloat16()
    for transform in (Hadamard(), Hadamard(32, 5, rounded=False), Mean(), Mean("columns"), Smooth()):
        spec = replace(SPEC, transform=transform)
        for matrix in (x, x.t()):
            torch.library.opcheck(torch.ops.ottava.quantize_behind.default, (matrix, spec.key, None))
            data, scale_inv, aside = torch.ops.ottava.quantize_behind(matrix, spec.key, None)
            alone = quantize(matrix, spec)
            assert torch.equal(data, alone.data)
            assert torch.equal(scale_inv, alone.scale_inv)
            assert aside.dim() == 1 if alone.aside is None else torch.equal(aside, alone.aside)
            if transform.paired and alone.aside is not None:
                met = torch.ops.ottava.quantize_behind(matrix, spec.key, aside)
                other = quantize(matrix, spec, beside=alone)
                assert torch.equal(met[0], other.data)
                assert torch.equal(met[2], other.aside)
    fresh = replace(SPEC, transform=Hadamard(16, "fresh"))
    aside = torch.ops.ottava.quantize_drawn(x, fresh.key, None)[2]
    again = torch.ops.ottava.quantize_drawn(x, fresh.key, aside)[2]
    assert torch.equal(aside, again)
    assert aside.data_ptr() != again.data_ptr()


def test_what_draws_is_two_nodes_of_a_graph() -> None:
    drawn = (replace(SPEC, rounding="stochastic"), replace(SPEC, transform=Hadamard(16, "fresh")))
    assert [_draws(spec.key) for spec in (SPEC, replace(SPEC, transform="mean"), *drawn)] == [False, False, True, True]
    assert torch.Tag.nondeterministic_seeded in torch.ops.ottava.quantize_drawn.default.tags
    assert torch.Tag.nondeterministic_seeded not in torch.ops.ottava.quantize_behind.default.tags
