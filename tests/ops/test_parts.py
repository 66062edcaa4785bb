"""Products of operands whose transforms have set parts aside: whole, in every combination, on every path of a GEMM."""

from __future__ import annotations

from typing import Any

import torch

import ottava
from ottava.numerics.accumulator import Accumulator
from ottava.numerics.tensor import QuantizationSpec
from ottava.numerics.transforms import Mean
from ottava.ops.gemm import gemm
from ottava.ops.parts import rests, whole
from ottava.ops.quantize import quantize

PLAIN = QuantizationSpec(ottava.E4M3)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"accumulator": Accumulator(name="wide", group=8)},
    {"backend": "reference"},
)


def test_a_product_is_that_of_the_whole_operands() -> None:
    """Of decoded rests plus parts; two means along K leave their products with the other's rest out, which are 0."""
    means = (PLAIN, *(QuantizationSpec(ottava.E4M3, transform=Mean(tokens)) for tokens in ("rows", "columns")))
    x, w, bias = torch.randn(24, 40) + 20, torch.randn(16, 40) - 5, torch.randn(16)
    for lhs in means:
        for rhs in means:
            a, b = quantize(x, lhs), quantize(w, rhs)
            if lhs is rhs is PLAIN:
                assert rests(a, b) is None
                continue
            plain = rests(a, b)
            assert plain is not None
            assert rests(*plain) is None
            wanted = whole(a).double() @ whole(b).double().t() + bias
            if lhs.transform == rhs.transform == Mean("columns"):
                product = a.dequantize().double() @ b.dequantize().double().t()
                assert a.aside is not None
                assert b.aside is not None
                wanted = product + 40 * a.aside.double() @ b.aside.double().t() + bias
            for settings in SETTINGS:
                y = gemm(a, b, out_dtype=torch.float32, bias=bias, **settings)
                torch.testing.assert_close(y.double(), wanted, rtol=2e-6, atol=2e-3)
                rounded = gemm(a, b, out_dtype=torch.bfloat16, bias=bias, **settings)
                assert torch.equal(rounded, y.bfloat16())  # one rounding
            near = gemm(a, b, out_dtype=torch.float32, compute="bf16")
            exact = x.double() @ w.double().t()
            assert float((near.double() - exact).norm() / exact.norm()) < 0.03
            torch.testing.assert_close(whole(a, a.transformed(x)), x, rtol=0, atol=1e-5)


def test_a_tensor_that_was_not_cast_has_no_part() -> None:
    x = torch.randn(4, 8)
    cast = quantize(x, QuantizationSpec(ottava.E4M3, transform="mean"))  # type: ignore[arg-type]
    assert rests(x, x) is None
    found = rests(x, cast)
    assert found is not None
    assert found[0] is x
    assert found[1].aside is None  # type: ignore[union-attr]


def test_empty_operands() -> None:
    spec = QuantizationSpec(ottava.E4M3, transform="mean")  # type: ignore[arg-type]
    a, b = quantize(torch.empty(0, 8), spec), quantize(torch.ones(4, 8), PLAIN)
    assert gemm(a, b, out_dtype=torch.bfloat16).shape == (0, 4)
    a, b = quantize(torch.empty(3, 0), spec), quantize(torch.empty(4, 0), PLAIN)
    assert torch.equal(gemm(a, b, out_dtype=torch.float32), torch.zeros(3, 4))
