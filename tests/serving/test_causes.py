"""Faults made by parameters: each mechanism in each layout that has it, and as many equal pairs without an alarm.

The author of these faults knew the rules, so they show that causes are told apart, not that every fault is known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ottava.base.untrusted import UntrustedError
from ottava.numerics.formats import E4M3, E4M3FNUZ, E5M2
from ottava.numerics.rounding import code_values, encode
from ottava.ops.quantize import quantize
from ottava.serving.causes import activation_cause, weight_cause
from ottava.serving.engines import Arithmetic
from ottava.serving.formula import formula_causes, quantization_causes, sampling_causes, settings_causes
from ottava.serving.sides import Model, Side
from ottava.weights.layouts import LAYOUTS, InputCast, read_config
from sweep import sweep

CODED = tuple(form for form in LAYOUTS.values() if form.spec is not None and form.spec.format == E4M3)
NAME = "model.layers.0.self_attn.o_proj"
SHAPE = (256, 256)


@dataclass(frozen=True)
class Pair:
    """One linear on both sides; `theirs` has what the checkpoint stores."""

    ours: Side
    theirs: Side

    def first(self) -> str:
        """The cause that is named first; "" for none."""
        model = Model({NAME: self.ours, "other": other(self.ours)}, {}, {}, False)
        stored = replace(model, linears={**model.linears, NAME: self.theirs})
        causes = weight_cause(NAME, self.ours, self.theirs, model, stored), activation_cause(self.ours, self.theirs)
        return next((cause[0] for cause in causes if cause), "")


def other(side: Side) -> Side:
    """A linear of the same shape with other numbers."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(99))
    assert side.cast is not None
    return replace(side, weight=weight, cast=quantize(weight.bfloat16(), side.cast.spec))


def pair(form: Any, seed: int = 0) -> Pair:
    """An equal one: a weight that grows along rows and columns, so that scales differ from block to block."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(SHAPE, generator=generator) * torch.linspace(0, 4, SHAPE[0])[:, None].exp2()
    weight *= torch.linspace(0, 2, SHAPE[1]).exp2()
    cast = quantize(weight.bfloat16(), form.spec)
    inputs = InputCast(form.inputs, form.scale_dtype != "fp32", form.static, 0.01 if form.static else None)
    side = Side(weight, cast, inputs)
    return Pair(side, replace(side, weight=cast.dequantize(torch.float32), codes=True))


def stored(one: Pair, codes: Tensor | None = None, scale_inv: Tensor | None = None) -> Pair:
    """The pair with other codes (as they are, or as numbers of the format) or scales in the checkpoint."""
    cast = one.theirs.cast
    assert cast is not None
    if codes is not None and codes.dtype != cast.data.dtype:
        codes = encode(codes.float(), E4M3)
    kept = cast.data if codes is None else codes, cast.scale_inv if scale_inv is None else scale_inv
    new = replace(cast, data=kept[0], scale_inv=kept[1])
    return replace(one, theirs=replace(one.theirs, cast=new, weight=new.dequantize(torch.float32)))


def scaled(one: Pair, factor: float = 1.0) -> Tensor:
    """The trained weight in units of its scales."""
    cast = one.ours.cast
    assert cast is not None
    return one.ours.weight.bfloat16().double() / cast.spec.granularity.expand(factor * cast.scale_inv.double(), SHAPE)


def truncated(x: Tensor) -> Tensor:
    """Toward zero on E4M3's grid, by the definition: the largest magnitude that is not larger."""
    grid = code_values(E4M3)[:127].double()
    index = torch.searchsorted(grid, x.abs().clamp(max=448), right=True) - 1
    return (grid[index] * x.sign()).float()


def upward(x: Tensor) -> Tensor:
    grid = code_values(E4M3)[:127].double()
    index = torch.searchsorted(grid, x.abs().clamp(max=448)).clamp(max=126)
    return (grid[index] * x.sign()).float()


def drawn(x: Tensor) -> Tensor:
    """Up with the probability of the distance."""
    low, high = truncated(x).double(), upward(x).double()
    chance = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.where(chance * (high - low).abs() < (x - low).abs(), high, low).float()


def bits(fmt: Any, factor: float = 1.0) -> Callable[[Pair], Pair]:
    return lambda one: stored(one, encode(scaled(one, factor).float(), fmt).view(torch.uint8).view(torch.float8_e4m3fn))


def recast(weight: Callable[[Tensor], Tensor], **spec: Any) -> Callable[[Pair], Pair]:
    def change(one: Pair) -> Pair:
        assert one.ours.cast is not None
        new = quantize(weight(one.ours.weight), replace(one.ours.cast.spec, **spec))
        return stored(one, new.data, new.scale_inv)

    return change


def scales(change: Callable[[Tensor], Tensor]) -> Callable[[Pair], Pair]:
    return lambda one: stored(one, scale_inv=change(one.ours.cast.scale_inv))  # type: ignore[union-attr]


def engine(**how: Any) -> Callable[[Pair], Pair]:
    return lambda one: replace(one, theirs=replace(one.theirs, arithmetic=Arithmetic(**how)))


def inputs(**change: Any) -> Callable[[Pair], Pair]:
    return lambda one: replace(one, theirs=replace(one.theirs, activations=replace(one.theirs.activations, **change)))


MANY = ("block", "channel", "ue8m0", "mxfp8")  # layouts with many scales
FP32 = ("block", "channel", "tensor", "modelopt")
FAULTS: tuple[tuple[str, str, tuple[str, ...], Callable[[Pair], Pair]], ...] = (
    ("rounding", "toward zero", (), lambda one: stored(one, truncated(scaled(one)))),
    ("rounding", "away from zero", (), lambda one: stored(one, upward(scaled(one)))),
    ("rounding", "by chance", (), lambda one: stored(one, drawn(scaled(one)))),
    ("clamp", "codes at 240", FP32, lambda one: stored(one, one.ours.cast.data.float().clamp(-240, 240))),  # type: ignore[union-attr]
    ("misread", "E5M2", (), bits(E5M2)),
    ("misread", "FNUZ", (), bits(E4M3FNUZ, 448 / 240)),
    ("reciprocal", "", (), scales(Tensor.reciprocal)),
    ("scale-layout", "transposed", ("fp8-block",), scales(lambda x: x.t().contiguous())),
    ("scale-layout", "reversed", MANY, scales(lambda x: x.flip(0))),
    ("scale-format", "BF16", FP32, scales(lambda x: x.bfloat16().float())),
    ("scale-format", "powers of two", ("fp8-block",), recast(Tensor.bfloat16, scale_format="pow2")),
    ("scales", "doubled", (), scales(lambda x: 2 * x)),
    ("master", "", (), recast(Tensor.float)),
    ("transposed", "", (), lambda one: stored(one, one.ours.cast.data.t().contiguous())),  # type: ignore[union-attr]
    ("rows", "", (), lambda one: stored(one, one.ours.cast.data.view(torch.uint8).flip(0).view(torch.float8_e4m3fn))),  # type: ignore[union-attr]
    ("swapped", "", (), lambda one: stored(one, other(one.ours).cast.data, other(one.ours).cast.scale_inv)),  # type: ignore[union-attr]
    ("stale", "another step", (), recast(lambda w: (w * 1.02 + 1e-3 * w.roll(1, 0)).bfloat16())),
    ("decoded", "", FP32, engine(weights="bf16-scales")),
    ("device", "", (), engine(inputs="none", device=True)),
    ("activation-arithmetic", "", ("block", "channel", "compressed-tensors-tensor"), engine(inputs="bf16")),
    ("activation-format", "", FP32, inputs(powers=True)),
    ("activation-rounding", "", (), inputs(rounded=False)),
)  # fmt: skip


def seeded() -> Iterator[tuple[str, str, Any, Callable[[Pair], Pair]]]:
    """Every fault in every layout that it fits."""
    for cause, said, fits, change in FAULTS:
        for form in CODED:
            if not fits or any(form.name.endswith(word) for word in fits):
                yield cause, f"{cause} {said} {form.name}", form, change


def test_each_fault_has_its_cause_first() -> None:
    """All of them; the list of misses is empty."""
    found = [(name, cause, change(pair(form)).first()) for cause, name, form, change in seeded()]
    assert len(found) >= 100
    assert not (wrong := [one for one in found if one[1] != one[2]]), wrong


def test_equal_pairs_have_no_alarm() -> None:
    """Of every layout and six seeds; also with zeros of the other sign, and beside an engine that decodes exactly."""
    count = 0
    for form in CODED:
        for seed in range(6):
            one = pair(form, seed)
            data = one.ours.cast.data.clone()  # type: ignore[union-attr]
            flipped = data.view(torch.uint8)
            flipped[(flipped == 0) | (flipped == 128)] ^= 128
            exact = one.theirs if form.scale_dtype == "fp32" else replace(one.theirs, arithmetic=Arithmetic("bf16"))
            for equal in (one, stored(one, data), replace(one, theirs=exact)):
                count += 1
                assert equal.first() == "", (form.name, seed)
    assert count >= 40


TRAINED = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "num_key_value_heads": 2, "head_dim": 64}
TRAINED |= {"rope_theta": 1e4, "dtype": "bfloat16", "vocab_size": 8, "sliding_window": None, "use_cache": True}
FORMULA: tuple[tuple[str, dict[str, Any]], ...] = (
    ("formula", {"rms_norm_eps": 1e-5}),
    ("formula", {"hidden_act": "gelu"}),
    ("formula", {"num_key_value_heads": 1}),
    ("formula", {"head_dim": 32}),
    ("formula", {"rope_theta": 5e5}),
    ("formula", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("formula", {"sliding_window": 128}),
    ("formula", {"dtype": "float16"}),
    ("formula", {"dtype": "float32"}),
    ("unknown", {"rope_parameters": {"rope_theta": 5e5}}),  # beside rope_theta: libraries take either
    ("unknown", {"logit_softcap": 30.0}),
    ("unknown", {"attn_implementation": "sage"}),
)
NEUTRAL: tuple[dict[str, Any], ...] = (
    {},
    {"use_cache": False},
    {"transformers_version": "4.0"},
    {"_name_or_path": "x", "initializer_range": 1.0},
    {"rope_theta": 10_000},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    {"tie_word_embeddings": True},  # compared as tensors
)


def test_a_field_of_the_formula_is_equal_neutral_or_named() -> None:
    for cause, change in FORMULA:
        found = formula_causes(TRAINED, TRAINED | change)
        assert [one[0] for one in found][:1] == [cause], (change, found)
        assert next(iter(change)).split("_")[0] in found[0][1]
    for change in NEUTRAL:
        assert formula_causes(TRAINED, TRAINED | change) == [], change
    torch_dtype = {key: value for key, value in TRAINED.items() if key != "dtype"} | {"torch_dtype": "bfloat16"}
    assert formula_causes(TRAINED, torch_dtype) == []
    assert formula_causes(TRAINED, {"dtype": "bfloat16"})[0][0] == "unknown"


def test_what_no_rule_reads_is_unknown() -> None:
    """In a quantization_config and in the settings of an engine; what export writes has nothing of it."""
    for form in LAYOUTS.values():
        if form.spec is not None:
            assert list(quantization_causes(form.config(ignored=["a"], static=form.static, kv_cache=True))) == []
    tree = LAYOUTS["compressed-tensors-block"].config()
    for change in (
        {"transform_config": {"u": 1}},
        {"sparsity_config": {"format": "24"}},
        {"format": "pack-quantized"},
        {"quantization_status": "initialized"},
        {"rotation": "hadamard"},
    ):
        assert [cause for cause, _ in quantization_causes(tree | change)] == ["unknown"], change
    for key, value in (("symmetric", False), ("actorder", "group"), ("zp_dtype", "torch.int8"), ("clip", 0.9)):
        changed = LAYOUTS["compressed-tensors-block"].config()
        changed["config_groups"]["group_0"]["weights"][key] = value
        assert [cause for cause, _ in quantization_causes(changed)] == ["unknown"], key
    known = {"kv_cache_dtype": "kv_cache_dtype"}
    assert list(settings_causes({"kv_cache_dtype": "fp8", "dtype": "bfloat16", "host": "x"}, known)) == []
    for setting in (
        {"dtype": "float16"},
        {"env": {"X": "1"}},
        {"attention_backend": "NEW"},
        {"hf_overrides": {"a": 1}},
    ):
        assert [cause for cause, _ in settings_causes(setting, known)] == ["unknown"], setting


def test_what_generation_config_asks_of_the_sampler(tmp_path: Path) -> None:
    """Tokens' numbers ask nothing; a temperature or a penalty that training does not know is not certified."""
    (tmp_path / "out").mkdir()
    path, ours = tmp_path / "out/generation_config.json", tmp_path / "generation_config.json"
    assert sampling_causes(None, tmp_path / "out") == []
    path.write_text('{"eos_token_id": 2, "transformers_version": "5"}')
    assert sampling_causes(None, tmp_path / "out") == []
    path.write_text('{"eos_token_id": 2, "temperature": 0.7}')
    said = "temperature is 0.7 in generation_config.json, and nothing in training"
    assert sampling_causes(None, tmp_path / "out") == [("unknown", said)]
    ours.write_text('{"temperature": 0.7}')
    assert sampling_causes(ours, tmp_path / "out") == []
    ours.write_text('{"temperature": 1.0}')
    assert sampling_causes(ours, tmp_path / "out") == [("formula", said.replace("nothing", "1.0"))]
    path.write_text("[]")
    with pytest.raises(UntrustedError, match="is no object"):
        sampling_causes(ours, tmp_path / "out")


@sweep(
    key=("rope_parameters", "rope_scaling", "quantization_config", "vocab_size", "num_hidden_layers"),
    value=(0.5, "x", [1]),
)
def test_a_field_of_another_type_never_reaches_a_rule(key: str, value: Any, tmp_path: Path) -> None:
    """One door refuses it, for every reader behind."""
    (tmp_path / "config.json").write_text(json.dumps(TRAINED | {key: value}))
    with pytest.raises(UntrustedError, match=f"config.json.{key} is .*; needs "):
        read_config(tmp_path)
