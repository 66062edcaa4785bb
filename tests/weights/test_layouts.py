"""Layouts are data: their scales survive storage, and their settings are those of the libraries that read them."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ottava
from ottava.base.untrusted import UntrustedError
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR, Granularity
from ottava.weights.layouts import DEFAULT, LAYOUTS, SCALE_KEYS, is_codes, open_tensors, read_quantization


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
        back = back * tensors.get("weight_scale_2", 1)
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
        ("modelopt-nvfp4", (7, 48), True),
        ("compressed-tensors-mxfp4", (7, 64), True),
    ):
        assert LAYOUTS[name].fits(shape) is fits, (name, shape)


def test_settings_are_read_by_the_libraries() -> None:
    """compressed-tensors' own schema, which refuses unknown keys; Hugging Face's config class."""
    trees = {name: layout.config(ignored=["lm_head"], kv_cache=True) for name, layout in LAYOUTS.items() if layout.spec}
    json.dumps(trees)
    for name, tree in trees.items():
        assert "lm_head" in (tree.get("ignore") or tree.get("modules_to_not_convert")), name
    schema = pytest.importorskip("compressed_tensors.quantization").QuantizationConfig
    for name, tree in trees.items():
        if name.startswith("compressed-tensors"):
            read = schema.model_validate(tree)
            assert read.ignore == ["lm_head"]
            assert read.config_groups["group_0"].weights.num_bits == (4 if LAYOUTS[name].packed else 8)


def test_a_config_is_read_as_it_was_written() -> None:
    """Of every layout: its method, bits, blocks, and the cast of activations, static or not."""
    for layout in LAYOUTS.values():
        if layout.spec is None:
            continue
        assert layout.scale_key in SCALE_KEYS
        for static in {layout.static, True} if layout.method in ("compressed-tensors", "modelopt") else {False}:
            read = read_quantization(layout.config(ignored=["lm_head"], static=static, kv_cache=True))
            (group,) = read.groups
            assert (read.method, read.blocks) == (layout.method, (layout.spec.granularity,)), layout.name
            assert group.bits == layout.spec.format.bits
            assert group.has("any.linear")
            assert read.group_of("any.linear") is group
            assert read.kv_cache is (layout.method in ("compressed-tensors", "modelopt"))
            assert (group.inputs and group.inputs.granularity) == layout.inputs, layout.name
            if group.inputs is not None:
                assert group.inputs.static is static
                powers = layout.scale_dtype in ("e8m0", "uint8") and layout.inputs in (BLOCK_1X32, BLOCK_1X128)
                assert group.inputs.powers is powers, layout.name


def compressed(weights: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", **weights} if isinstance(weights, dict) else weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group | more}}


def test_what_others_write_is_read_or_refused() -> None:
    """Blocks by compressed-tensors' and ModelOpt's own rules; what is not known is no scale of a tensor."""
    fp4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    local = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    channel = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    for config, blocks, inputs in (
        (compressed({}), PER_TENSOR, None),
        (compressed({"group_size": 64}), Granularity(1, 64), None),
        (compressed({"strategy": "block", "block_structure": [64, 32]}), Granularity(64, 32), None),
        (compressed(fp4, local), BLOCK_1X16, BLOCK_1X16),
        (compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True}), PER_ROW, PER_ROW),
        ({"quant_method": "fp8"}, PER_TENSOR, PER_TENSOR),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, BLOCK_128X128, BLOCK_1X128),
        ({"quant_method": "modelopt"}, PER_TENSOR, PER_TENSOR),
        (channel, PER_ROW, PER_ROW),
    ):
        (group,) = read_quantization(config).groups
        assert (group.blocks, group.inputs and group.inputs.granularity) == (blocks, inputs), config
    for config, message in (
        ({"quant_method": "fp9"}, "unknown quant_method 'fp9'; did you mean 'fp8'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "unknown quant_algo 'NVFP4'"),
        ({"quant_method": "fp8", "activation_scheme": "statik"}, "needs 'dynamic' or 'static'"),
        (compressed({}, {"strategy": {}}), "input_activations.strategy is {}; needs a text"),
        (compressed({"strategy": "chanel"}), "unknown strategy 'chanel'; did you mean 'channel'"),
        (compressed({"strategy": "token"}), "unknown strategy 'token'"),
        (compressed({}, {"strategy": "channel"}), "unknown strategy 'channel'"),
        (compressed({}, "token"), "input_activations is 'token'"),
        (compressed({"strategy": "group"}), "needs two numbers"),
        (compressed({"type": "int"}), "weights of 8 bits, type 'int'"),
        (compressed({}, targets="Linear"), "targets"),
    ):
        with pytest.raises(UntrustedError, match=re.escape(message)):
            read_quantization(config)
    with pytest.raises(UntrustedError, match="pattern '\\(' of targets is no regular expression"):
        read_quantization(compressed({}, targets=["re:("])).group_of("up")


def test_every_layout_is_found_in_a_file(tmp_path: Path) -> None:
    """As codes of a matrix, whatever names and pairs the file has."""
    x = torch.randn(128, 256)
    for layout in LAYOUTS.values():
        if layout.spec is None:
            continue
        (folder := tmp_path / layout.name).mkdir()
        named = layout.tensors(ottava.quantize(x, layout.spec)).items()
        save_file({f"up.{key}": value.contiguous() for key, value in named}, folder / "model.safetensors")
        with ExitStack() as files:
            tensors = open_tensors(folder, files)
            assert is_codes("up.weight", tensors), layout.name
            assert tuple(tensors["up.weight"].get_slice("up.weight").get_shape()) == (128, 256)
