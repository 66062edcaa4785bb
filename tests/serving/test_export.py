"""Exported checkpoints hold the numbers of the trained forward, in every layout, read by others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ottava
from ottava.serving.export import ExportError, export
from ottava.serving.source import Source, Weight
from ottava.serving.trained import of_model
from ottava.weights.layouts import LAYOUTS

RECIPE_OF = {
    "compressed-tensors-block": "blockwise_fp32",
    "compressed-tensors-channel": "rowwise",
    "compressed-tensors-tensor": "tensorwise",
    "compressed-tensors-mxfp8": "mxfp8",
    "compressed-tensors-mxfp4": "mxfp4",
    "compressed-tensors-nvfp4": "nvfp4",
    "fp8-block": "blockwise_fp32",
    "fp8-block-ue8m0": "blockwise",
    "mxfp8": "mxfp8",
    "modelopt": "delayed",
    "modelopt-nvfp4": "nvfp4",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(256, 256, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o_proj(torch.tanh(self.q_proj(x)) * self.k_proj(x) + self.v_proj(x))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 256)
        self.attn = Attention()
        self.lm_head = nn.Linear(256, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.lm_head(self.attn(self.embed(ids)))
        return y


def trained(recipe: str | None, weights: str | None = None) -> Model:
    torch.manual_seed(0)
    model = Model().bfloat16()
    if recipe is not None:
        ottava.convert(model, recipe, weights=weights)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.dtype == torch.bfloat16], lr=0.5)
    for _ in range(3 if weights is None else 0):
        model(torch.randint(0, 16, (2, 8))).float().square().mean().backward()
        optimizer.step()
    return model


def decoded(tensors: dict[str, Tensor], name: str) -> Tensor:
    """A witness: the codes times their scales, block by block, in fp32."""
    packed = tensors.get(f"{name}.weight_packed", tensors.get(f"{name}.weight"))
    if packed is not None and packed.dtype == torch.uint8:
        e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        values = torch.cat([e2m1, -e2m1])
        codes = torch.stack([values[(packed % 16).long()], values[(packed // 16).long()]], -1).flatten(1)
    else:
        codes = tensors[f"{name}.weight"].float()
    scale = next(tensors[f"{name}.{key}"] for key in ("weight_scale", "weight_scale_inv") if f"{name}.{key}" in tensors)
    scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    scale = scale.float() if scale.ndim == 2 else scale.float().reshape(1, 1)
    if (whole := tensors.get(f"{name}.weight_global_scale")) is not None:
        scale = scale * whole.reciprocal()
    scale = scale * tensors.get(f"{name}.weight_scale_2", 1)
    rows, cols = codes.shape[0] // scale.shape[0], codes.shape[1] // scale.shape[1]
    return codes * scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "bf16"])
def test_codes_are_those_of_the_trained_forward(layout: str, tmp_path: Path) -> None:
    """Where a recipe casts as the layout stores; per tensor q, k and v share a scale, as engines would make them. Our
    own reader takes the codes into a model in BF16."""
    model = trained(RECIPE_OF[layout])
    if LAYOUTS[layout].shares_scale:  # other codes need the flag, and each weight is named before anything is written
        with pytest.raises(ExportError, match=r"3 weights.*--recast.*\n.*attn.q_proj, attn.k_proj, attn.v_proj$"):
            export(model, tmp_path / "out", layout=layout, config={"model_type": "own"})
        assert not (tmp_path / "out").exists()
    recast = LAYOUTS[layout].shares_scale
    report = export(model, tmp_path / "out", layout=layout, config={"model_type": "own"}, recast=recast)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    linears = {one.name: one for one in report.linears}
    assert linears["lm_head"].cast == "bf16"
    joined = LAYOUTS[layout].shares_scale
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer, one = getattr(model.attn, name), linears[f"attn.{name}"]
        row, col = layer.resolved.cells("weight")
        used = layer.quantizers.weight(layer.weight, row, col, record=False)[0]
        wanted = used.dequantize(torch.float32)
        equal = torch.equal(decoded(tensors, f"attn.{name}"), wanted)
        assert one.as_trained is equal
        assert equal or joined, (layout, name)
        assert equal or "engines join q_proj, k_proj, v_proj" in one.why
    back = Model().bfloat16()
    assert len(ottava.load_fp8(back, tmp_path / "out").stored) == 4
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert torch.equal(getattr(back.attn, name).weight.dequantize(), decoded(tensors, f"attn.{name}").bfloat16())
    assert torch.equal(back.lm_head.weight, tensors["lm_head.weight"])
    if LAYOUTS[layout].packed and joined:
        key = "weight_scale_2" if layout == "modelopt-nvfp4" else "weight_global_scale"
        assert len({float(tensors[f"attn.{name}_proj.{key}"]) for name in "qkv"}) == 1
    elif joined:
        scales = {float(tensors[f"attn.{name}_proj.weight_scale"]) for name in "qkv"}
        top = max(getattr(model.attn, f"{n}_proj").weight.detach().float().abs().max() for n in "qkv")
        scale = torch.full_like(top, 448.0).div(top)  # torch computes 448 / top as 448 * (1 / top), rounded twice
        assert scales == {float(scale.reciprocal())}
        for name in "qkv":  # a witness of the cast under the shared scale
            x = getattr(model.attn, f"{name}_proj").weight.detach().float() * scale
            assert torch.equal(tensors[f"attn.{name}_proj.weight"].float(), x.to(torch.float8_e4m3fn).float())
    if layout == "modelopt":
        assert {f"attn.{n}_proj.input_scale" for n in "qkvo"} <= tensors.keys()
        assert len({float(tensors[f"attn.{n}_proj.input_scale"]) for n in "qkv"}) == 1
        about = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
        assert about["quantization"]["exclude_modules"] == ["lm_head"]
    assert json.loads((tmp_path / "out" / "export.json").read_text())["layout"] == layout


def test_weights_that_exist_only_in_fp8_are_written_as_they_are(tmp_path: Path) -> None:
    model = trained("tensorwise", weights="fp8")
    codes = model.attn.o_proj.weight.codes.clone()  # type: ignore[union-attr]
    report = export(model, tmp_path / "out", layout="compressed-tensors-tensor", config={"model_type": "own"})
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["attn.o_proj.weight"].view(torch.uint8), codes.view(torch.uint8))
    assert next(one.as_trained for one in report.linears if one.name == "attn.o_proj")


def test_an_unconverted_model_another_recipe_and_bf16(tmp_path: Path) -> None:
    """Codes of bf16(weight) by the layout's own cast; the report says that training had others."""
    model = trained(None)
    export(model, tmp_path / "a", layout="fp8-block", config={"model_type": "own"})
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    cast = ottava.quantize(model.attn.o_proj.weight.detach(), LAYOUTS["fp8-block"].spec)  # type: ignore[arg-type]
    wanted = decoded({"w.weight": cast.data, "w.weight_scale": cast.scale_inv}, "w")
    assert torch.equal(decoded(tensors, "attn.o_proj"), wanted)
    report = export(trained("tensorwise"), tmp_path / "b", layout="fp8-block", config={}, recast=True)
    assert len(report.changed) == 4
    assert "trained as E4M3[tensor]; the layout holds E4M3[128x128]" in str(report)
    export(model, tmp_path / "c", layout="bf16", config={"model_type": "own"}, shard_bytes=200_000)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert "quantization_config" not in json.loads((tmp_path / "c" / "config.json").read_text())
    whole = {k: v for f in set(index["weight_map"].values()) for k, v in load_file(tmp_path / "c" / f).items()}
    assert all(torch.equal(whole[name], p) for name, p in model.named_parameters())
    again = export(tmp_path / "c", tmp_path / "d", layout="fp8-block")
    assert [one.as_trained for one in again.linears if one.cast != "bf16"] == [None] * 4
    assert torch.equal(load_file(tmp_path / "d" / "model.safetensors")["attn.o_proj.weight"].float(),
                       tensors["attn.o_proj.weight"].float())  # fmt: skip


def test_parts_of_a_fused_linear_stay_together(tmp_path: Path) -> None:
    """One that is kept, or that blocks would cut, keeps the others in BF16, too."""
    report = export(trained(None), tmp_path / "a", config={}, keep=["*.k_proj"])
    stays = {one.name: one.why for one in report.linears if one.cast == "bf16"}
    assert stays["attn.k_proj"] == "kept in BF16 as asked"
    assert stays["attn.q_proj"] == stays["attn.v_proj"] == "engines join it with attn.k_proj, which stays in BF16"
    assert "attn.o_proj" not in stays
    config = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == {"attn.q_proj", "attn.k_proj", "attn.v_proj", "lm_head"}
    ragged = Source(
        (
            Weight("m.gate_proj.weight", torch.randn(192, 256), True),
            Weight("m.up_proj.weight", torch.randn(192, 256), True),
            Weight("m.down_proj.weight", torch.randn(256, 128), True),
        ),
        {},
    )
    report = export(ragged, tmp_path / "b", layout="fp8-block")
    assert [(one.name, one.cast) for one in report.linears if one.cast != "bf16"] == [("m.down_proj", "E4M3[128x128]")]
    assert "no whole blocks of 128x128" in str(report)


def test_kv_cache_scales_and_zero_weights(tmp_path: Path) -> None:
    zero = Source((Weight("o.weight", torch.zeros(128, 128), True),), {})
    export(zero, tmp_path / "a", kv_scales={"layers.0.attn": (0.5, 0.25)})
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert (tensors["layers.0.attn.k_scale"].tolist(), tensors["layers.0.attn.v_scale"].tolist()) == ([0.5], [0.25])
    assert bool((tensors["o.weight_scale"] > 0).all())
    assert json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    broken = Source((Weight("o.weight", torch.full((128, 128), float("nan")), True),), {})
    for arguments, message in (
        ((broken, tmp_path / "out"), "o.weight holds an infinity or NaN"),
        ((trained(None), tmp_path / "out", "fp9"), "layout 'fp9'"),
        ((trained(None), tmp_path / "out", "modelopt"), "no history of their input"),
    ):
        with pytest.raises(ExportError, match=message):
            export(*arguments[:2], layout=(*arguments, "fp8-block")[2], config={})
    with pytest.raises(ExportError, match="matches no linear"):
        export(trained(None), tmp_path / "out", config={}, keep=["nothing"])
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device"):
        export(nn.Sequential(nn.Linear(128, 128, device="meta")), tmp_path / "out", config={})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("mine")
    with pytest.raises(ExportError, match="not empty"):
        export(trained(None), tmp_path / "full", config={})
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["a"]


def test_without_a_layout_it_is_the_one_of_training(tmp_path: Path) -> None:
    """And a layout that leaves everything in BF16 is refused: it would say FP8 and hold none."""
    for recipe, layout in (
        ("rowwise", "compressed-tensors-channel"),
        ("mxfp8", "compressed-tensors-mxfp8"),
        ("blockwise", "compressed-tensors-block"),
        ("tensorwise", "compressed-tensors-tensor"),
        (None, "compressed-tensors-block"),
        ("bf16", "compressed-tensors-block"),  # a converted model that casts nothing is like one of torch
    ):
        report = export(trained(recipe), tmp_path / str(recipe), config={}, recast=recipe == "tensorwise")
        assert report.layout == layout, recipe
        assert sum(one.cast != "bf16" for one in report.linears) == 4
    small = Source((Weight("o.weight", torch.randn(64, 64), True),), {})
    with pytest.raises(ExportError, match=r"leaves every weight in BF16: .*no whole blocks"):
        export(small, tmp_path / "small", layout="fp8-block")


UNREAD_EXPERTS = ("compressed-tensors-block", "compressed-tensors-mxfp8", "compressed-tensors-nvfp4")
FAMILIES = ("Llama", "Qwen3", "Mistral", "Gemma2", "Phi3", "Qwen3Moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_numbers_that_were_trained(family: str, tmp_path: Path) -> None:
    """Hugging Face's own dequantization, experts too, over every layout that it reads, without a missing or unexpected
    key. A layout whose experts it does not read, or reads without the scale of the tensor, is refused."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("compressed_tensors")
    base = {"vocab_size": 384, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
    base |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
    more = {"Qwen3": {"head_dim": 64, "tie_word_embeddings": True}, "Gemma2": {"head_dim": 64}}
    more["Qwen3Moe"] = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}
    config = getattr(transformers, f"{family}Config")(**base, **more.get(family, {}))
    torch.manual_seed(0)
    for layout, recipe in RECIPE_OF.items():
        if layout.startswith("modelopt"):
            continue
        model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
        ottava.convert(model, recipe)
        if family == "Qwen3Moe" and layout in UNREAD_EXPERTS:
            with pytest.raises(ExportError, match="transformers loads no experts"):
                export(model, tmp_path / layout, layout=layout, recast=True)
            continue
        report = export(model, tmp_path / layout, layout=layout, recast=True)
        how = {}
        if layout.startswith("compressed-tensors"):
            how["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
        back, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / layout, dtype=torch.bfloat16, output_loading_info=True, **how
        )
        assert not any(info.values()), (layout, info)
        tensors = load_file(tmp_path / layout / "model.safetensors")
        plain = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
        assert not plain.load_state_dict(back.state_dict(), strict=False).missing_keys
        numbers = {weight.module: weight.tensor for weight in of_model(plain).weights}
        read = [one for one in report.linears if one.cast != "bf16"]
        assert read
        for one in read:
            assert torch.equal(numbers[one.name], decoded(tensors, one.name).bfloat16()), one.name
        if not LAYOUTS[layout].shares_scale:
            assert report.changed == [], layout
        for one in report.linears:
            if ".experts." in one.name:
                assert one.as_trained is not None, one.name
