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

import ottava
from ottava.base.untrusted import UntrustedError
from ottava.numerics.formats import E4M3, E4M3FNUZ, E5M2
from ottava.numerics.rounding import code_values, encode
from ottava.ops.quantize import quantize
from ottava.serving.causes import CAUSES, activation_cause, layer_set, number_cause, weight_cause
from ottava.serving.engines import ENGINES, Arithmetic, decide
from ottava.serving.formula import formula_causes, quantization_causes, sampling_causes, settings_causes
from ottava.serving.parity import parity
from ottava.serving.sides import Model, Side, under
from ottava.serving.source import Source, Weight
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
        return min((cause[0] for cause in causes if cause), key=[*CAUSES].index, default="")


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


def scaled(one: Pair, factor: float = 1.0, bits: torch.dtype = torch.float32) -> Tensor:
    """The trained weight in units of its scales, perhaps in fewer bits."""
    cast = one.ours.cast
    assert cast is not None
    grid = cast.spec.granularity.expand((factor * cast.scale_inv).to(bits).double(), SHAPE)
    return one.ours.weight.bfloat16().double() / grid


def cut(x: Tensor, *, up: bool = False) -> Tensor:
    """Toward zero on E4M3's grid, by the definition: the largest magnitude that is not larger; or away from it."""
    grid, size = code_values(E4M3)[:127].double(), x.abs().clamp(max=448)
    index = torch.searchsorted(grid, size) if up else torch.searchsorted(grid, size, right=True) - 1
    return (grid[index.clamp(max=126)] * x.sign()).float()


def drawn(x: Tensor) -> Tensor:
    """Up with the probability of the distance."""
    low, high = cut(x).double(), cut(x, up=True).double()
    chance = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.where(chance * (high - low).abs() < (x - low).abs(), high, low).float()


def bits(fmt: Any, factor: float = 1.0) -> Callable[[Pair], Pair]:
    return lambda one: stored(one, encode(scaled(one, factor).float(), fmt).view(torch.uint8).view(torch.float8_e4m3fn))


def twice(quotient: torch.dtype, scale: torch.dtype = torch.float32, kept: torch.dtype = torch.float32) -> Any:
    """Codes of a quotient in few bits, by a scale in few bits, which is stored in few bits."""
    return lambda one: stored(one, scaled(one, bits=scale).to(quotient), one.ours.cast.scale_inv.to(kept).float())


def recast(weight: Callable[[Tensor], Tensor], **spec: Any) -> Callable[[Pair], Pair]:
    def change(one: Pair) -> Pair:
        assert one.ours.cast is not None
        new = quantize(weight(one.ours.weight), replace(one.ours.cast.spec, **spec))
        return stored(one, new.data, new.scale_inv)

    return change


def scales(change: Callable[[Tensor], Tensor]) -> Callable[[Pair], Pair]:
    return lambda one: stored(one, scale_inv=change(one.ours.cast.scale_inv))  # type: ignore[union-attr]


def flushed(codes: Tensor) -> Tensor:
    return torch.where(codes.abs() < 2**-6, 0, codes)


def negated(codes: Tensor) -> Tensor:
    """Magnitudes with a sign, as int8 holds them."""
    numbers = codes.view(torch.uint8).int()
    signed = torch.where(numbers > 127, 128 - numbers, numbers).to(torch.int8)
    return signed.view(torch.float8_e4m3fn)


def pooled(one: Pair) -> Pair:
    """One scale for a row of blocks, in the grid of the blocks."""
    scale = one.ours.cast.scale_inv  # type: ignore[union-attr]
    most = scale.amax(1, keepdim=True).expand_as(scale).contiguous()
    moved = replace(one, ours=replace(one.ours, cast=replace(one.ours.cast, scale_inv=most)))  # type: ignore[type-var]
    return stored(one, scaled(moved), most)


def engine(**how: Any) -> Callable[[Pair], Pair]:
    return lambda one: replace(one, theirs=replace(one.theirs, arithmetic=Arithmetic(**how)))


def inputs(**change: Any) -> Callable[[Pair], Pair]:
    return lambda one: replace(one, theirs=replace(one.theirs, activations=replace(one.theirs.activations, **change)))


MANY = ("block", "channel", "ue8m0", "mxfp8")  # layouts with many scales
FP32 = ("block", "channel", "tensor", "modelopt")
FAULTS: tuple[tuple[str, str, tuple[str, ...], Callable[[Pair], Pair]], ...] = (
    ("rounding", "toward zero", (), lambda one: stored(one, cut(scaled(one)))),
    ("rounding", "away from zero", (), lambda one: stored(one, cut(scaled(one), up=True))),
    ("rounding", "by chance", (), lambda one: stored(one, drawn(scaled(one)))),
    ("rounding", "through BF16", FP32, twice(torch.bfloat16)),
    ("rounding", "through FP16", MANY[:2], twice(torch.float16)),
    ("rounding", "through E5M2", (), twice(torch.float8_e5m2)),
    ("clamp", "codes at 240", FP32, lambda one: stored(one, one.ours.cast.data.float().clamp(-240, 240))),  # type: ignore[union-attr]
    ("misread", "E5M2", (), bits(E5M2)),
    ("misread", "FNUZ", (), bits(E4M3FNUZ, 448 / 240)),
    ("reciprocal", "", (), scales(Tensor.reciprocal)),
    ("scale-layout", "transposed", ("fp8-block",), scales(lambda x: x.t().contiguous())),
    ("scale-layout", "reversed", MANY, scales(lambda x: x.flip(0))),
    ("scale-format", "BF16", FP32, scales(lambda x: x.bfloat16().float())),
    ("scale-format", "FP16", FP32, scales(lambda x: x.half().float())),
    ("scale-format", "amax in BF16", FP32, scales(lambda x: (x * 448).bfloat16().float() / 448)),
    ("scale-format", "inverse in BF16", FP32, scales(lambda x: 1 / (1 / x).bfloat16().float())),
    ("scale-format", "all in BF16", FP32, twice(*[torch.bfloat16] * 3)),
    ("scale-format", "powers of two", ("fp8-block",), recast(Tensor.bfloat16, scale_format="pow2")),
    ("scales", "doubled", (), scales(lambda x: 2 * x)),
    ("master", "", (), recast(Tensor.float)),
    ("transposed", "", (), lambda one: stored(one, one.ours.cast.data.t().contiguous())),  # type: ignore[union-attr]
    ("transposed", "cast from W.T", (), recast(lambda w: w.t().bfloat16())),
    ("rows", "interleaved", (), recast(lambda w: w.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).bfloat16())),
    ("rounding", "subnormals are zeros", (), lambda one: stored(one, flushed(one.ours.cast.data.float()))),  # type: ignore[union-attr]
    ("misread", "two's complement", (), lambda one: stored(one, negated(one.ours.cast.data))),  # type: ignore[union-attr]
    ("granularity", "rows of blocks", ("fp8-block",), pooled),
    ("scale-format", "rounded down", ("mxfp8",), recast(Tensor.bfloat16, scale_format="e8m0_floor")),
    ("rows", "", (), lambda one: stored(one, one.ours.cast.data.view(torch.uint8).flip(0).view(torch.float8_e4m3fn))),  # type: ignore[union-attr]
    ("swapped", "", (), lambda one: stored(one, other(one.ours).cast.data, other(one.ours).cast.scale_inv)),  # type: ignore[union-attr]
    ("stale", "another step", (), recast(lambda w: (w * 1.02 + 1e-3 * w.roll(1, 0)).bfloat16())),
    ("decoded", "", FP32, engine(weights="bf16-scales")),
    ("device", "", (), engine(inputs="none", device=True)),
    ("device", "decoded", FP32, engine(weights="bf16", inputs="none", device=True)),
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


W, NOISE = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(2)).bfloat16()


def test_a_step_in_high_precision_moves_all_a_little() -> None:
    for x in (W, W[:4], W[0]):  # a matrix, a router, a bias
        step, row = 0.03 * NOISE.reshape(-1)[: x.numel()].view_as(x), torch.cat([x[:1] + 1, x[1:]])
        factors = (x * 1.02, (x.mT * torch.linspace(1, 1.1, len(x))).mT if x.ndim > 1 else -x)
        for i, other in enumerate((x + step, x * (1 + step), *factors, x + 1, 0 * x, row, x.to(torch.float8_e4m3fn))):
            assert (number_cause("a", x, other.bfloat16(), []) or [""])[0] == ("stale" if i < 2 else "plain"), i
    for cause, other in (("swapped", NOISE), ("transposed", W.t()), ("rows", W.flip(0))):
        assert (number_cause("a", W, other, [("b", NOISE)]) or [""])[0] == cause


PATTERNS = (
    *(r"vllm compressed-tensors gate re:.*mlp\.gate substring", "vllm compressed-tensors up re:.*mlp.gate.* substring"),
    *("vllm compressed-tensors gate re:.*up_proj substring", "vllm compressed-tensors up re:.*up_proj ignored"),
    *("vllm modelopt gate *mlp.gate* substring", "vllm modelopt up *.10.* ignored", "sglang modelopt up g* substring"),
    *("transformers fp8 down proj substring", "trtllm fp8 down a.1* substring", "trtllm fp8 down a.10* ignored"),
)


def test_a_pattern_that_ends_in_the_middle_of_a_word() -> None:
    names, side = [f"a.10.mlp.{part}_proj" for part in ("gate", "up", "down")], pair(CODED[0]).ours
    for engine, method, part, pattern, cause in map(str.split, PATTERNS):
        rule, name = ENGINES[engine].rules[method], f"a.10.mlp.{part}_proj"
        decision = decide(rule, {rule.keys[0]: [pattern]}, names)[name]
        assert (layer_set(name, side, side, decision) or [""])[0] == cause, pattern


def test_all_that_a_receipt_says_counts(tmp_path: Path) -> None:
    plain = Source((Weight("up.weight", W, True), Weight("down.weight", NOISE, True)), {"model_type": "own"})
    source, cast = under(plain, ottava.RECIPES["blockwise"]), "E4M3[1x128, pow2] x E4M3[128x128, pow2]"
    row = {"gemm": "fprop", "fp8": True, "kernel": "native_gemm", "operands": cast}
    left = {"fp8": False, "kernel": "bf16_mm", "operands": "bfloat16 x bfloat16"}
    for keep in ((), ("up",)):
        ottava.export(source, tmp_path / str(len(keep)), layout="compressed-tensors-block", keep=keep, recast=True)
    for folder, change, cause in (
        *(("0", {"operands": f"{cast} under hopper"}, ""), ("0", left | {"kernel": "-"}, ""), ("1", left, "")),
        *(("0", left, "not-fp8"), ("0", left | {"gemm": "all", "layer": "_orig_mod.up"}, "not-fp8")),
        *(("0", left | {"kernel": "unknown"}, "unknown"), ("0", {"layer": "x"}, "unknown")),
        *(("0", {"operands": "E4M3[row, pow2] x E4M3[row, pow2]"}, "granularity"), ("0", {"operands": "?"}, "unknown")),
    ):  # fmt: skip
        rows = [row | {"layer": "module.down"}, row | {"layer": "up"} | change]
        assert getattr(parity(source, tmp_path / folder, ran={"rows": rows}).first, "cause", "") == cause, change


TRAINED = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "num_key_value_heads": 2, "head_dim": 64}
TRAINED |= {"rope_theta": 1e4, "dtype": "bfloat16", "vocab_size": 8, "sliding_window": None, "use_cache": True}
FORMULA: tuple[tuple[str, tuple[dict[str, Any], ...]], ...] = (  # libraries take rope_theta of either place
    ("formula", ({"rms_norm_eps": 1e-5}, {"hidden_act": "gelu"}, {"num_key_value_heads": 1}, {"head_dim": 32})),
    ("formula", ({"rope_theta": 5e5}, {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"sliding_window": 128})),
    ("formula", ({"dtype": "float16"}, {"dtype": "float32"})),
    ("unknown", ({"rope_parameters": {"rope_theta": 5e5}}, {"logit_softcap": 30.0}, {"attn_implementation": "sage"})),
)
NEUTRAL: tuple[dict[str, Any], ...] = (  # ties are compared as tensors
    *({"use_cache": False}, {"transformers_version": "4.0"}, {"_name_or_path": "x", "initializer_range": 1.0}, {}),
    *({"rope_theta": 10_000}, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
    {"tie_word_embeddings": True},
)


def test_a_field_of_the_formula_is_equal_neutral_or_named() -> None:
    for cause, change in ((cause, change) for cause, changes in FORMULA for change in changes):
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
    more = ({"sparsity_config": {"format": "24"}}, {"quantization_status": "initialized"}, {"rotation": "hadamard"})
    for change in ({"transform_config": {"u": 1}}, {"format": "pack-quantized"}, *more):
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
