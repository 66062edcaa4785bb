"""One GEMM's row of a recipe: what it refuses, and how it is written down. tests/test_recipe.py has whole tables."""

from __future__ import annotations

import pytest

from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import HIGH_PRECISION, GemmRecipe

E4, E5 = QuantizationSpec(E4M3), QuantizationSpec(E5M2)


def test_a_row_survives_plain_values_and_says_what_it_is() -> None:
    rows = {
        "high precision x high precision": HIGH_PRECISION,
        "E5M2[tensor] x E4M3[tensor]": GemmRecipe(E5, E4, fast_accum=True),
        "E4M3[tensor] x E4M3[tensor] in BF16": GemmRecipe(E4, E4, compute="bf16"),
        "E5M2[tensor] x E5M2[tensor] under hopper": GemmRecipe(E5, E5, accumulator="hopper"),  # type: ignore[arg-type]
    }
    for text, row in rows.items():
        assert str(row) == text
        assert GemmRecipe.from_dict(row.to_dict()) == row
        assert row.quantized == (row is not HIGH_PRECISION)


def test_rows_without_a_meaning_are_refused() -> None:
    for fields, message in (
        ({"lhs": E4}, "one operand is quantized and the other is not"),
        ({"lhs": E5, "rhs": E5}, "no tensor core multiplies E5M2 by E5M2"),
        ({"compute": "fp16"}, "compute"),
        ({"lhs": E4, "rhs": E4, "compute": "bf16", "accumulator": "hopper"}, "multiplies no codes"),
    ):
        with pytest.raises(ValueError, match=message):
            GemmRecipe(**fields)  # type: ignore[arg-type]
