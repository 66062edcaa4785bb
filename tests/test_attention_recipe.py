"""What attention casts is data: as text, plain values, by override; pairs that no hardware multiplies are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X128
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import ATTENTION_TENSORS, AttentionRecipe, Recipe, get_recipe

ON = replace(get_recipe("tensorwise"), name="fp8_attention", attention=AttentionRecipe())


def test_plain_values_give_it_back() -> None:
    for one in (
        AttentionRecipe(),
        AttentionRecipe(o=None, dqkv=None),
        AttentionRecipe(s=QuantizationSpec(E4M3, margin=1)),
    ):
        assert AttentionRecipe.from_dict(one.to_dict()) == one
        assert tuple(one.to_dict()) == ATTENTION_TENSORS
    assert AttentionRecipe.from_dict({}) == AttentionRecipe()
    assert str(AttentionRecipe(o=None)).startswith("qkv E4M3[tensor], s E4M3[tensor], o high precision, do E5M2")


def test_a_recipe_says_where_it_is_on() -> None:
    assert Recipe.from_dict(ON.to_dict()) == ON
    off = ON.override("layers.0.*", "tensorwise")
    assert ON.override("layers.0.*", attention=None).for_layer("layers.0.x").attention is None
    assert off.for_layer("layers.0.x").attention is None
    assert off.for_layer("layers.1.x").attention == AttentionRecipe()
    for one in (off, ON.override("*", attention=None), get_recipe("bf16").override("*", attention=AttentionRecipe())):
        assert Recipe.from_dict(one.to_dict()) == one
    assert "attention  qkv E4M3[tensor]" in str(ON)
    assert get_recipe("delayed", margin=1).override("x", attention=AttentionRecipe()).for_layer("x").attention
    with pytest.raises(TypeError, match="attention is 1; needs a AttentionRecipe or None"):
        ON.override("x", attention=1)


def test_mistakes_are_named() -> None:
    for settings, error, words in (
        ({"qkv": QuantizationSpec(E4M3, BLOCK_1X128)}, ValueError, "needs one current scale for the tensor"),
        ({"s": QuantizationSpec(E4M3, scaling="delayed")}, ValueError, "needs one current scale for the tensor"),
        ({"qkv": QuantizationSpec(E5M2)}, ValueError, "qkv meets qkv: no tensor core multiplies E5M2 by E5M2"),
        ({"do": None}, TypeError, "AttentionRecipe: do is None"),
        ({"qvk": None}, TypeError, "did you mean 'qkv'?"),
    ):
        with pytest.raises(error, match="AttentionRecipe: ") as said:
            AttentionRecipe(**settings)
        assert words in str(said.value)
