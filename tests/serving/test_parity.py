"""A certificate names what differs, in the order of execution, with its cause first; and is silent on equal pairs.

Rules were tuned on the family "llama"; "qwen3" (tied, other sizes, BF16 weights) and "moe" were run afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.serving.conftest import plain
from torch import Tensor, nn

import ottava
from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, PER_ROW, PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import GemmRecipe, Recipe
from ottava.serving.causes import CAUSES, activation_cause, layer_set
from ottava.serving.engines import Decision
from ottava.serving.parity import Certificate, parity, place
from ottava.serving.sides import Side, made_up, spec_of, under
from ottava.serving.source import Source, Weight
from ottava.serving.trained import of_model
from ottava.weights.layouts import InputCast

BLOCKS = ("blockwise_fp32", "compressed-tensors-block")
FP32_SCALES: dict[str, Any] = {"env": {"VLLM_USE_DEEP_GEMM_E8M0": "0"}}
TENSOR = ("delayed", "modelopt")
CLEAN = (
    ("blockwise", "compressed-tensors-block", "vllm"),
    ("blockwise_fp32", "compressed-tensors-block", "sglang"),
    ("blockwise", "fp8-block", "vllm"),
    ("blockwise", "fp8-block-ue8m0", "vllm"),
    ("rowwise_fp32", "compressed-tensors-channel", "vllm"),
    ("mxfp8", "mxfp8", "transformers"),
    ("mxfp8", "mxfp8", "sglang"),
    ("mxfp8", "compressed-tensors-mxfp8", "vllm"),
    ("blockwise_fp32", "fp8-block", "transformers"),
    ("delayed", "modelopt", "vllm"),
    ("delayed", "modelopt", "trtllm"),
    ("delayed", "modelopt", "sglang"),
)


@pytest.mark.parametrize("family", ["llama", "qwen3", "moe"])
def test_equal_pairs_have_no_finding(family: str, pair: Callable[..., Any]) -> None:
    """12 pairs of a recipe, a layout and an engine, of each family; in fp32 masters and in BF16 weights."""
    for recipe, layout, engine in CLEAN:
        one = pair(family, recipe, layout, torch.bfloat16 if family == "qwen3" else torch.float32)
        certificate = parity(one.source, one.folder, engine, text=made_up(256, 16), device="cuda")
        assert certificate.equal, f"{recipe}, {layout}, {engine}: {certificate}"
        assert certificate.sha256_trained == certificate.sha256_served, (recipe, layout)
        assert set(certificate.files) >= {"config.json", "model.safetensors"}
        assert certificate.text.startswith("0: ")
        again = parity(one.source, one.folder, engine, text=made_up(256, 16), device="cuda")
        assert again.to_json() == certificate.to_json()


def linear(source: Source, name: str) -> Weight:
    return next(weight for weight in source.weights if weight.module == name)


def first_mlp(source: Source, part: str, layer: int = 0) -> str:
    either = "(gate_proj|gate_up_proj)" if part == "gate_proj" else part
    inside = re.compile(rf"model\.layers\.{layer}\.mlp\.(experts\.0\.)?{either}")
    return next(weight.module for weight in source.weights if inside.fullmatch(weight.module))


def codes(one: Any, name: str, tensor: Tensor, scale_format: str | None = None) -> dict[str, Tensor]:
    """The tensors of another cast of a linear, in the layout of the pair."""
    cast = linear(one.source, name).cast
    assert cast is not None
    spec = replace(cast.spec, scaling="current", scale_format=scale_format or cast.spec.scale_format)
    new = ottava.quantize(tensor, spec)
    key = next(key for key in one.tensors if key.startswith(f"{name}.weight_scale"))
    return {f"{name}.weight": new.data, key: new.scale_inv.reshape(one.tensors[key].shape)}


def first(one: Any) -> str:
    """The first linear that runs: q, or q, k and v in one."""
    return min((n for n in all_linears(one)), key=place)


def later(one: Any) -> str:
    """One that no engine joins."""
    return next(n for n in all_linears(one) if n.endswith("layers.1.self_attn.o_proj"))


def all_linears(one: Any) -> list[str]:
    return [weight.module for weight in one.source.weights if weight.cast is not None]


def ignored(one: Any, *more: str) -> dict[str, Any]:
    """The list of ignored layers of the pair's config, and more."""
    return {"ignore": [*json.loads((one.folder / "config.json").read_text())["quantization_config"]["ignore"], *more]}


def of_all(change: Callable[[Tensor], Tensor], scale_format: str | None = None) -> Callable[[Any, str], Any]:
    """Codes of another tensor for each linear."""
    return lambda one, at: {
        k: v
        for n in all_linears(one)
        for k, v in codes(one, n, change(linear(one.source, n).tensor), scale_format).items()
    }


def all_scales(change: Callable[[Tensor], Tensor]) -> Callable[[Any, str], Any]:
    return lambda one, at: {k: change(v) for k, v in one.tensors.items() if k.endswith("weight_scale")}


def uncast(one: Any, at: str) -> dict[str, Tensor | None]:
    return {f"{at}.weight": linear(one.source, at).tensor.bfloat16(), f"{at}.weight_scale": None}


def cast_too(one: Any, at: str) -> dict[str, Tensor]:
    """A linear that training kept in BF16. A router is too small for a block, so it grows first."""
    tensor = linear(one.source, at).tensor
    if at.endswith("mlp.gate"):
        tensor = torch.randn(128, 256)
        weights = (replace(w, values=tensor) if w.module == at else w for w in one.source.weights)
        one.source = replace(one.source, weights=tuple(weights))
    new = ottava.quantize(tensor, linear(one.source, first(one)).cast.spec)  # type: ignore[union-attr]
    return {f"{at}.weight": new.data, f"{at}.weight_scale": new.scale_inv}


def per_tensor(one: Any, at: str) -> dict[str, Tensor]:
    new = ottava.quantize(linear(one.source, at).tensor, ottava.QuantizationSpec(ottava.E4M3))
    return {f"{at}.weight": new.data, f"{at}.weight_scale": new.scale_inv}


def token_activations(one: Any) -> dict[str, Any]:
    tree = json.loads((one.folder / "config.json").read_text())["quantization_config"]["config_groups"]
    tree["group_0"]["input_activations"]["strategy"] = "token"
    return {"config_groups": tree}


def own_scales(one: Any, at: str) -> dict[str, Tensor]:
    """Training had a scale for each of q, k and v, and the checkpoint has them so; the engine joins them."""

    def own(weight: Weight) -> Weight:
        if weight.cast is None:
            return weight
        return replace(weight, codes=ottava.quantize(weight.tensor, replace(weight.cast.spec, scaling="current")))

    one.source = replace(one.source, weights=tuple(own(weight) for weight in one.source.weights))
    made: dict[str, Tensor] = {}
    for weight in one.source.weights:
        if weight.cast is not None:
            made |= {weight.name: weight.cast.data, f"{weight.module}.weight_scale": weight.cast.scale_inv.reshape(1)}
    return made


def shared_scales(one: Any, at: str) -> dict[str, Tensor]:
    """The same training, and a checkpoint in which they share a scale."""
    top = own_scales(one, at)
    for i in range(2):
        group = [linear(one.source, f"model.layers.{i}.self_attn.{n}_proj") for n in "qkv"]
        amax = torch.stack([w.tensor.bfloat16().float().abs().max() for w in group]).max()
        for weight in group:
            new = ottava.quantize(weight.tensor.bfloat16(), ottava.QuantizationSpec(ottava.E4M3), scale=448 / amax)
            top |= {weight.name: new.data, f"{weight.module}.weight_scale": new.scale_inv.reshape(1)}
    return top


def untied(one: Any, at: str) -> dict[str, Tensor]:
    if "lm_head.weight" in one.tensors:
        return {}
    return {"lm_head.weight": torch.randn(one.tensors["model.embed_tokens.weight"].shape).bfloat16()}


def swapped(one: Any, at: str) -> dict[str, Tensor]:
    up, old = first_mlp(one.source, "up_proj"), one.tensors
    return {f"{a}.{key}": old[f"{b}.{key}"] for a, b in ((at, up), (up, at)) for key in ("weight", "weight_scale")}


def other_rows(one: Any, at: str) -> dict[str, Tensor]:
    """Pairs of rotary positions in the other order."""
    order = torch.arange(one.tensors[f"{at}.weight"].shape[0]).view(2, -1).t().reshape(-1)
    return {f"{at}.{key}": one.tensors[f"{at}.{key}"][order] for key in ("weight", "weight_scale")}


def kept_in_training(one: Any, at: str) -> dict[str, Tensor]:
    """Training kept it in BF16, and the exporter did not know."""
    plain = tuple(replace(w, codes=None, input_spec=None) if w.module == at else w for w in one.source.weights)
    one.source = replace(one.source, weights=plain)
    return {}


def gate(one: Any) -> str:
    return first_mlp(one.source, "gate_proj")


CHANNEL = ("rowwise_fp32", "compressed-tensors-channel")
MXFP8 = ("mxfp8", "compressed-tensors-mxfp8")
DENSE = ("llama", "qwen3")


@dataclass(frozen=True)
class Fault:
    """A way to spoil a checkpoint, and what parity must name first."""

    cause: str
    at: Callable[[Any], str] | str = ""
    """The layer; "" for any."""
    tensors: Callable[[Any, str], dict[str, Any]] = lambda one, at: {}
    config: Callable[[Any], dict[str, Any]] = lambda one: {}
    pair: tuple[str, str] = BLOCKS
    engine: str = "vllm"
    families: tuple[str, ...] = ("llama", "qwen3", "moe")
    settings: Mapping[str, Any] | None = None
    ran: bool = True
    """False: the receipt says that the layer ran in high precision."""

    def certificate(self, one: Any) -> tuple[str, Certificate]:
        """The layer, and the certificate of the spoiled pair."""
        at = self.at if isinstance(self.at, str) else self.at(one)
        config = self.config(one)
        one.change(self.tensors(one, at), **config)
        row = {"layer": at, "gemm": "fprop", "fp8": False, "kernel": "torch", "note": "autocast(enabled=False)"}
        ran = None if self.ran else {"rows": [row]}
        older = self.engine == "vllm" and self.settings != {}  # a GPU whose GEMMs take scales in FP32
        settings = {**(FP32_SCALES if older else {}), **(self.settings or {})}
        return at, parity(one.source, one.folder, self.engine, settings=settings, ran=ran, run=False)


def dotted_gate(one: Any) -> dict[str, Any]:
    inside = r"\.experts\.0" if any(".experts." in name for name in all_linears(one)) else ""
    return ignored(one, rf"re:.*\.mlp{inside}.gate.")


FUSED = {"compilation_config": {"pass_config": {"fuse_act_quant": True}}}
FAULTS = {
    "substring": Fault(
        "substring",
        lambda one: first_mlp(one.source, "gate_proj", 1),
        config=lambda one: {"ignore": ["lm_head", "model.layers.1.mlp.gat"]},
        pair=TENSOR,
        families=DENSE,
    ),
    "regex-dot": Fault("regex-dot", gate, config=dotted_gate, pair=MXFP8, families=DENSE),
    "router": Fault("router", "model.layers.0.mlp.gate", cast_too, families=("moe",)),
    "head": Fault("head", "lm_head", cast_too, lambda one: {"ignore": []}, families=("llama", "moe")),
    "master": Fault("master", first, of_all(Tensor.bfloat16)),
    "scale-format": Fault("scale-format", first, of_all(Tensor.float, "pow2")),
    "bf16-scales": Fault("scale-format", first, all_scales(lambda scale: scale.bfloat16().float())),
    "deep-gemm": Fault("scale-format", first, settings={}),
    "scale-layout": Fault(
        "scale-layout",
        gate,
        lambda one, at: {
            f"{at}.weight_scale": (grid := one.tensors[f"{at}.weight_scale"]).t().contiguous().reshape(grid.shape)
        },
    ),
    "reciprocal": Fault("reciprocal", first, all_scales(Tensor.reciprocal)),
    "activation-rounding": Fault("activation-rounding", lambda one: first_mlp(one.source, "down_proj"), settings=FUSED),
    "activation-granularity": Fault("activation-granularity", first, config=token_activations),
    "activation-scale": Fault(
        "activation-scale", later, lambda one, at: {f"{at}.input_scale": torch.tensor([0.5])}, pair=TENSOR
    ),
    "granularity": Fault("granularity", later, per_tensor),
    "joined-scale": Fault("joined-scale", "", own_scales, pair=TENSOR),
    "shared-scale": Fault("joined-scale", "", shared_scales, pair=TENSOR),
    "stale": Fault("stale", later, lambda one, at: codes(one, at, linear(one.source, at).tensor * 1.02 + 1e-3)),
    "tied": Fault("tied", "lm_head", untied, lambda one: {"tie_word_embeddings": "lm_head.weight" in one.tensors}),
    "parts": Fault("parts", first, config=lambda one: ignored(one, first(one))),
    "ignored": Fault("ignored", later, uncast, lambda one: ignored(one, later(one)), engine="sglang"),
    "unscaled": Fault("unscaled", later, uncast),
    "plain": Fault("plain", "model.norm.weight", lambda one, at: {at: one.tensors[at] + 1}),
    "kv-cache": Fault("kv-cache", first, settings={"kv_cache_dtype": "fp8_e4m3"}),
    "scales": Fault("scales", later, lambda one, at: {f"{at}.weight_scale": one.tensors[f"{at}.weight_scale"] * 2}),
    "swapped": Fault("swapped", gate, swapped),
    "rows": Fault("rows", first, other_rows, pair=CHANNEL),
    "not-fp8": Fault("not-fp8", later, ran=False),
    "format": Fault(
        "format", later, lambda one, at: {f"{at}.weight": one.tensors[f"{at}.weight"].float().to(torch.float8_e5m2)}
    ),
    "unread": Fault("unread", "config.json", config=lambda one: {"quant_method": "bitsandbytes"}),
    "missing": Fault("missing", later, lambda one, at: {f"{at}.weight": None, f"{at}.weight_scale": None}),
    "extra": Fault("extra", later, kept_in_training),
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "moe"])
def test_each_fault_is_named_first(family: str, pair: Callable[..., Any]) -> None:
    wrong = []
    for name, fault in FAULTS.items():
        if family not in fault.families:
            continue
        at, certificate = fault.certificate(pair(family, *fault.pair))
        got = certificate.first
        if got is None or got.cause != fault.cause or at not in ("", got.layer):
            wrong.append((name, got, at))
        elif fault.cause == "unread":  # of which nothing else can be said
            assert len(certificate.findings) == 1
            assert {row.served for row in certificate.rows} == {"not read"}
        elif fault.cause not in ("kv-cache", "not-fp8", "parts"):
            assert certificate.sha256_trained != certificate.sha256_served, name
    assert not wrong, wrong


@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "Phi3", "Qwen3Moe"])
def test_models_of_transformers(family: str, pair_of: Callable[..., Any], tmp_path: Path) -> None:
    """Families that no rule was tuned on, with their own names: equal pairs, and the faults that fit them."""
    transformers = pytest.importorskip("transformers")
    base = {"vocab_size": 384, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    base |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
    more = {"Gemma2": {"head_dim": 64}, "Qwen3Moe": {"moe_intermediate_size": 256, "num_experts": 4, "head_dim": 64}}
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, f"{family}Config")(**base, **more.get(family, {}))
    )
    spec = QuantizationSpec(ottava.E4M3, PER_ROW)
    rows = Recipe("rowwise_fp32", fprop=GemmRecipe(spec, spec))
    wrong = []
    for number, (name, fault) in enumerate({"": Fault(""), **FAULTS}.items()):
        recipe, layout = fault.pair
        if layout == "modelopt" or name in ("router", "head") or (family == "Phi3" and name in ("parts", "swapped")):
            continue
        if family == "Qwen3Moe" and name == "regex-dot":
            continue
        ottava.convert(model, rows if recipe == "rowwise_fp32" else recipe)
        source = of_model(model)
        ottava.export(source, tmp_path / str(number), layout=layout, engine="vllm")
        at, certificate = fault.certificate(pair_of(source, tmp_path / str(number)))
        got = certificate.first
        if (got.cause if got else "") != fault.cause or (got and at not in ("", got.layer)):
            wrong.append((name, got, at))
    assert not wrong, wrong


def test_activation_format_has_a_name(pair: Callable[..., Any]) -> None:
    """Powers of two in training, a layout without them: the codes agree, and the casts of activations do not."""
    one = pair("llama", "blockwise", "compressed-tensors-block")
    assert parity(one.source, one.folder, "vllm").equal  # DeepGEMM's casts have powers of two, whatever the config says
    certificate = parity(one.source, one.folder, "vllm", settings=FP32_SCALES)
    assert {finding.cause for finding in certificate.findings} == {"activation-format"}
    tensor = pair("llama", "tensorwise", "compressed-tensors-tensor")
    found = parity(tensor.source, tensor.folder, "vllm").first
    assert found is not None
    assert found.cause == "activation-granularity"  # vLLM scales by token where the config says tensor


def test_every_cause_is_seeded() -> None:
    """Each cause of the list has a fault that it is named for, here or in test_causes.py."""
    elsewhere = ("activation-format", "formula", "unknown", "misread", "clamp", "rounding", "transposed", "decoded")
    elsewhere += ("device", "activation-arithmetic", "executed")
    assert {fault.cause for fault in FAULTS.values()} | {*elsewhere} == set(CAUSES)


def test_the_kl_finds_the_linear_that_hurts(pair: Callable[..., Any]) -> None:
    """Codes of another step hurt more than other scales of activations; a linear that agrees has none."""
    pytest.importorskip("transformers")  # its model is the twin that is measured
    one = pair("llama", *BLOCKS)
    one.change(codes(one, later(one), torch.randn(256, 256)))
    certificate = parity(one.source, one.folder, "vllm", settings=FP32_SCALES, text=made_up(256, 32))
    kls = {row.layer: row.kl for row in certificate.rows if row.kl is not None}
    assert set(kls) == {later(one)}
    assert kls[later(one)] > 1e-3  # type: ignore[operator]
    assert "on 32 tokens" in certificate.text
    moe = pair("moe", *BLOCKS)
    FAULTS["stale"].certificate(moe)
    found = parity(moe.source, moe.folder, "vllm", settings=FP32_SCALES, text=made_up(256))
    assert "experts.2.gate_proj" in found.text  # it has 2 of 32


def test_a_bias_of_a_linear_counts(tmp_path: Path) -> None:
    weights = [Weight("q.weight", torch.randn(128, 128).bfloat16(), True), Weight("q.bias", torch.ones(128).bfloat16())]
    source = under(Source(tuple(weights), {}), ottava.RECIPES["blockwise"])
    ottava.export(source, tmp_path / "a", layout="fp8-block")
    assert parity(source, tmp_path / "a", "vllm").equal
    tensors = load_file(tmp_path / "a/model.safetensors")
    save_file({**tensors, "q.bias": tensors["q.bias"] * 2}, tmp_path / "a/model.safetensors")
    found = parity(source, tmp_path / "a", "vllm").first
    assert found is not None
    assert (found.layer, found.cause) == ("q.bias", "plain")


def test_nvfp4_gets_one_scale_for_what_an_engine_joins(tmp_path: Path) -> None:
    """Finer blocks of the same scales are no cause: o_proj, which nobody joins, has none."""
    source = under(plain("llama"), ottava.RECIPES["nvfp4"])
    ottava.export(source, tmp_path / "out", layout="compressed-tensors-nvfp4", recast=True)
    found = {(one.layer.rpartition(".")[2], one.cause) for one in parity(source, tmp_path / "out", "vllm").findings}
    joined = {(name, "joined-scale") for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
    assert {one for one in found if one[1] != "activation-granularity"} == joined


def test_a_model_brings_its_own_receipt(tmp_path: Path) -> None:
    """One that ran in high precision under autocast(enabled=False) did not train in FP8, whatever its recipe says."""
    model = nn.Sequential(nn.Linear(256, 128, bias=False), nn.Linear(128, 256, bias=False)).bfloat16()
    spec = QuantizationSpec(ottava.E4M3, PER_ROW)
    ottava.convert(model, Recipe("rowwise_fp32", fprop=GemmRecipe(spec, spec)))
    x = torch.randn(8, 256).bfloat16()
    model(x).sum().backward()
    ottava.export(model, tmp_path / "out", layout="compressed-tensors-channel", config={"model_type": "own"})
    source = of_model(model, {"model_type": "own"})
    assert parity(source, tmp_path / "out", ran=ottava.receipt(model)).equal
    with ottava.autocast(enabled=False):
        model(x).sum().backward()
    certificate = parity(source, tmp_path / "out", ran=ottava.receipt(model))
    assert {finding.cause for finding in certificate.findings} == {"not-fp8"}


def test_the_order_of_execution() -> None:
    names = ["lm_head", "model.norm", "model.layers.10.mlp.up_proj", "model.layers.2.mlp.down_proj"]
    names += [f"model.layers.2.{n}" for n in ("mlp.gate", "mlp.experts.3.up_proj", "mlp.experts.10.up_proj")]
    names += [f"model.layers.2.self_attn.{n}_proj" for n in "ovkq"] + ["model.embed_tokens"]
    got = [name.removeprefix("model.") for name in sorted(names, key=place)]
    attention = [f"layers.2.self_attn.{n}_proj" for n in "qkvo"]
    mlp = ["layers.2.mlp.gate", "layers.2.mlp.experts.3.up_proj", "layers.2.mlp.experts.10.up_proj"]
    assert got == [
        "embed_tokens",
        *attention,
        *mlp,
        "layers.2.mlp.down_proj",
        "layers.10.mlp.up_proj",
        "norm",
        "lm_head",
    ]


TOKEN = InputCast(PER_ROW, powers=False, static=False)


def test_casts_of_activations() -> None:
    for other, cause in (
        (TOKEN, None),
        (None, "activation-granularity"),
        (InputCast(PER_TENSOR, False, False), "activation-granularity"),
        (InputCast(PER_ROW, False, True, 0.5), "activation-scale"),
        (InputCast(PER_ROW, True, False), "activation-format"),
        (InputCast(PER_ROW, False, False, rounded=False), "activation-rounding"),
    ):
        got = activation_cause(*(Side(torch.zeros(2, 128), activations=cast) for cast in (TOKEN, other)))
        assert (got and got[0]) == cause, other
    assert activation_cause(Side(torch.zeros(2, 2)), Side(torch.zeros(2, 2))) is None
    assert spec_of(TOKEN, QuantizationSpec(E4M3)) == QuantizationSpec(E4M3, PER_ROW)
    powers = spec_of(InputCast(BLOCK_1X32, True, False), QuantizationSpec(E4M3, BLOCK_1X32, "e8m0"))
    assert powers == QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")
    assert spec_of(InputCast(BLOCK_1X128, True, False), QuantizationSpec(E4M3)).scale_format == "pow2"


def test_what_a_linear_in_high_precision_is_called() -> None:
    """A router, a head, another linear; in a list of names the pattern decides."""
    plain = Side(torch.zeros(4, 4))
    there = Side(torch.zeros(4, 4), codes=True)
    for name, cause in (("l.0.mlp.gate", "router"), ("lm_head", "head"), ("l.0.mlp.up_proj", "extra")):
        got = layer_set(name, plain, there, Decision(False))
        assert got is not None
        assert got[0] == cause
    assert layer_set("up", plain, plain, Decision(False)) is None
    assert layer_set("up", plain, plain, Decision(True)) is None  # a config without a cast of activations
    got = layer_set("up", plain, there, Decision(False, refused="why"))
    assert got == ("parts", "why")
