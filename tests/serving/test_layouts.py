"""Layouts are data: their scales survive storage, and their settings are those of the libraries that read them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import ottava
from ottava.serving.layouts import DEFAULT, LAYOUTS, Facts


def test_scales_come_back_as_they_went() -> None:
    """Bit for bit in every layout; a scale that is no power of two is refused where only exponents fit."""
    torch.manual_seed(0)
    x = torch.randn(256, 384)
    for layout in LAYOUTS.values():
        if layout.spec is None:
            continue
        assert layout.fits((256, 384))
        cast = ottava.quantize(x, layout.spec)
        tensors = layout.tensors(cast)
        stored = tensors[layout.scale_key]
        back = stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored
        back = back.float() * tensors.get("weight_global_scale", torch.ones(1)).reciprocal()
        assert torch.equal(back.reshape(cast.scale_inv.shape), cast.scale_inv), layout.name
        if layout.scale_dtype == "e4m3":
            assert stored.dtype == torch.float8_e4m3fn
            with pytest.raises(ValueError, match="no E4M3 numbers times one number"):
                layout.tensors(replace(cast, scale_inv=torch.rand_like(cast.scale_inv)))
        elif layout.scale_dtype != "fp32":
            assert stored.element_size() == 1
            with pytest.raises(ValueError, match="powers of two"):
                layout.stored_scale(torch.full_like(cast.scale_inv, 0.3))
    assert DEFAULT in LAYOUTS


def test_blocks_that_would_be_cut_do_not_fit() -> None:
    for name, shape, fits in (
        ("fp8-block", (192, 256), False),
        ("fp8-block", (256, 200), False),
        ("fp8-block", (0, 128), True),
        ("mxfp8", (7, 64), True),
        ("mxfp8", (7, 60), False),
        ("modelopt", (3, 5), True),
        ("compressed-tensors-channel", (3, 5), True),
        ("compressed-tensors-nvfp4", (7, 40), False),
        ("compressed-tensors-mxfp4", (7, 64), True),
    ):
        assert LAYOUTS[name].fits(shape) is fits, (name, shape)


def test_settings_are_read_by_the_libraries() -> None:
    """compressed-tensors' own schema, which refuses unknown keys; Hugging Face's config class."""
    facts = Facts(ignored=["lm_head"], static=False, kv_cache=True)
    trees = {name: layout.config(facts) for name, layout in LAYOUTS.items() if layout.config is not None}
    json.dumps(trees)
    for name, tree in trees.items():
        assert "lm_head" in (tree.get("ignore") or tree.get("modules_to_not_convert")), name
    schema = pytest.importorskip("compressed_tensors.quantization").QuantizationConfig
    for name, tree in trees.items():
        if name.startswith("compressed-tensors"):
            read = schema.model_validate(tree)
            assert read.ignore == ["lm_head"]
            assert read.config_groups["group_0"].weights.num_bits == (4 if LAYOUTS[name].packed else 8)
