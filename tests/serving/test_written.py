"""What export writes is what it says: the trained numbers, or an error that names the layouts that hold them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ottava
from foreign_samples import Conv1D
from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import PER_ROW
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import RECIPES, GemmRecipe, Recipe
from ottava.serving.evaluate import differences
from ottava.serving.export import ExportError, export
from ottava.serving.parity import parity
from ottava.serving.sides import under
from ottava.serving.source import Source, Weight, of_folder
from ottava.serving.trained import cast_of, of_model
from ottava.weights.layouts import LAYOUTS

NAN, INF = float("nan"), float("inf")


class Model(nn.Module):
    """A tensor of each kind that a checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 128)
        self.up = nn.Linear(128, 256)
        self.down = nn.Linear(256, 128, bias=False)
        self.norm = nn.LayerNorm(128)
        self.register_buffer("steps", torch.ones(3))
        self.lm_head = nn.Linear(128, 16, bias=False)


def converted(recipe: Recipe | str | None) -> Model:
    torch.manual_seed(0)
    model = Model().bfloat16()
    if recipe is not None:
        ottava.convert(model, recipe)
    return model


def test_each_recipe_in_each_layout_is_as_trained_or_refused(tmp_path: Path) -> None:
    """Decoded by our reader; without a layout it is one that holds the casts, and never another recipe."""
    for recipe in RECIPES.values():
        model = converted(recipe)
        wanted = {name: cast_of(getattr(model, name)) for name in ("up", "down")}
        spec = None if wanted["up"] is None else wanted["up"].spec
        holding = [name for name, form in LAYOUTS.items() if spec is not None and form.holds(spec)]
        if spec is not None and not holding:  # an engine may come later; until then the export says so
            with pytest.raises(ExportError, match="no layout holds that"):
                export(model, tmp_path / recipe.name, config={})
            continue
        for layout in (None, *LAYOUTS):
            folder = tmp_path / f"{recipe.name}-{layout}"
            if layout == "modelopt":
                continue  # needs histories
            elsewhere = layout not in (None, "bf16", *holding) and spec is not None
            if elsewhere:
                with pytest.raises(ExportError, match=rf"training multiplied .* as .*{holding[0]!r}.*--recast"):
                    export(model, folder, layout=layout, config={})
            report = export(model, folder, layout=layout, config={}, recast=elsewhere)
            assert report.layout == (layout or (holding or ["compressed-tensors-block"])[0])
            back = Model().bfloat16()
            if report.layout != "bf16":
                ottava.load_fp8(back, folder, weights="bf16")
            else:
                back.load_state_dict(load_file(folder / "model.safetensors"))
            said = {one.name: one.as_trained for one in report.linears}
            assert said.pop("lm_head") is None
            for name, cast in wanted.items():
                if cast is None:
                    assert said[name] is None
                    continue
                equal = torch.equal(getattr(back, name).weight, cast.dequantize(torch.bfloat16))
                assert equal or elsewhere or layout == "bf16", (recipe.name, layout)
                # numbers of BF16 are no codes; finer blocks may give the numbers of coarser ones
                assert said[name] is equal, (recipe.name, layout)
            text = str(report)
            assert (", as trained" in text, "not as trained" in text) == (True in said.values(), False in said.values())


def test_a_weight_behind_a_transform_is_refused(tmp_path: Path) -> None:
    """Its codes are those of other numbers, whatever their blocks."""
    spec = QuantizationSpec(E4M3, PER_ROW, transform={"kind": "hadamard", "size": 16})  # type: ignore[arg-type]
    model = converted(Recipe("turned", fprop=GemmRecipe(spec, spec)))
    for layout in (None, "compressed-tensors-channel"):
        with pytest.raises(ExportError, match=r"as E4M3\[row, hadamard.*no layout holds that. Take layout 'bf16'"):
            export(model, tmp_path / "out", layout=layout, config={})
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_is_not_finite_is_written(tmp_path: Path) -> None:
    """Each kind of tensor, in high precision, cast, or stored as codes; and what BF16 would make infinite."""
    names = ("up.weight", "up.bias", "norm.weight", "norm.bias", "embed.weight", "lm_head.weight", "steps")
    for recipe, layout in (
        (None, "fp8-block"),
        (None, "bf16"),
        *((one, None) for one in ("tensorwise", "mxfp8", "nvfp4")),
    ):
        for name in names:
            for value in (NAN, INF, -INF, 3.4e38):
                model = converted(recipe).float()
                tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
                tensor.detach().flatten()[1] = value
                with pytest.raises(ExportError, match=rf"export: {name} holds an infinity or NaN"):
                    export(model, tmp_path / "out", layout=layout, config={})
    for pair in ((NAN, 1.0), (1.0, -1.0), (0.0, 1.0), (INF, 1.0)):
        with pytest.raises(ExportError, match=r"kv_scales of a|a.k_scale holds an infinity"):
            export(converted(None), tmp_path / "out", config={}, kv_scales={"a": pair})
    assert list(tmp_path.iterdir()) == []


class Old(nn.Module):
    def __init__(self, *, linear: bool) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(256, 128), Conv1D(128, 256)
        self.attn = nn.ModuleDict({"c_proj": Conv1D(128, 128)})
        if linear:
            self.mix = nn.Linear(128, 128, bias=False)


def test_a_conv1d_stays_in_bf16(tmp_path: Path) -> None:
    """On the list of ignored layers, from a model, converted or not, and from a folder; square ones, too."""
    turned = ["attn.c_proj", "c_fc", "c_proj"]
    for recipe in (None, "rowwise", "tensorwise"):
        for linear in (False, True):
            model, folder = Old(linear=linear).bfloat16(), tmp_path / f"{recipe}-{linear}"
            kept = {name: p.detach().clone() for name, p in model.named_parameters()}
            if recipe is not None:
                ottava.convert(model, recipe)
            report = export(model, folder / "bf16", layout="bf16", config={})
            tensors = load_file(folder / "bf16" / "model.safetensors")
            assert all(torch.equal(tensors[name], values) for name, values in kept.items())
            assert report.changed == ([] if recipe is None else [*turned, *["mix"] * linear])
            for source in (model, folder / "bf16"):
                out, layout = folder / f"fp8-{source is model}", "compressed-tensors-channel"
                layout = "compressed-tensors-tensor" if recipe == "tensorwise" else layout
                config = {} if source is model else None
                if not linear:
                    for name in (layout, None):
                        with pytest.raises(ExportError, match="leaves every weight in BF16: it is a Conv1D"):
                            export(source, out, layout=name, config=config)
                    continue
                if recipe is not None and source is model:
                    with pytest.raises(ExportError, match=r"would stay in BF16: it is a Conv1D.*: c_fc, c_proj, attn"):
                        export(source, out, layout=layout, config=config)
                export(source, out, layout=layout, config=config, recast=True)
                ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
                assert sorted(ignored) == turned
                tensors = load_file(out / "model.safetensors")
                assert all(torch.equal(tensors[name], kept[name]) for name in kept if name != "mix.weight")
                assert tensors["mix.weight"].dtype == torch.float8_e4m3fn


def test_experts_go_where_they_are_read(tmp_path: Path) -> None:
    """transformers fails on three layouts, or drops the scale of the tensor; another engine can be named."""
    names = [f"l.0.mlp.experts.{i}.{part}.weight" for i in range(2) for part in ("gate_proj", "up_proj", "down_proj")]
    source = Source(tuple(Weight(name, torch.randn(128, 128).bfloat16(), True) for name in names), {})
    dense = Source((Weight("o.weight", torch.randn(128, 128).bfloat16(), True),), {})
    instead = {"block": "'fp8-block'", "mxfp8": "'mxfp8'", "nvfp4": "'modelopt-nvfp4'"}
    for layout in LAYOUTS:
        kind = layout.removeprefix("compressed-tensors-")
        if kind in instead and kind != layout:
            with pytest.raises(ExportError, match=f"loads no experts.*Take layout {instead[kind]}, or name"):
                export(source, tmp_path / layout, layout=layout)
            assert export(dense, tmp_path / f"dense-{layout}", layout=layout).layout == layout
            kept = export(Source((*source.weights, *dense.weights), {}), tmp_path / f"kept-{layout}", layout=layout,
                          keep=["*.experts.*"])  # fmt: skip
            assert [one.name for one in kept.linears if one.cast != "bf16"] == ["o"]
        if layout != "modelopt":
            export(source, tmp_path / layout, layout=layout, engine="sglang" if layout == "mxfp8" else "vllm")
    assert export(source, tmp_path / "a").layout == "fp8-block"
    assert export(under(source, RECIPES["mxfp8"]), tmp_path / "b").layout == "mxfp8"
    assert export(dense, tmp_path / "c").layout == "compressed-tensors-block"
    llama = replace(dense, config={"model_type": "llama"})
    for engine, layout, message in (
        ("sglang", "fp8-block", "sglang renames weight_scale_inv of a Llama.*'compressed-tensors-block'$"),
        ("vllm", "mxfp8", "vllm reads mxfp8 by ModelOpt's names.*'compressed-tensors-mxfp8'$"),
        ("sglang", "compressed-tensors-mxfp4", "no scheme for MXFP4 of a dense linear"),
        ("transformers", "modelopt", "does not read quant_method 'modelopt'.*'compressed-tensors-tensor'$"),
        ("vlm", "bf16", "unknown engine 'vlm'; did you mean 'vllm'"),
    ):
        given = replace(llama, weights=tuple(replace(one, input_scale_inv=1.0) for one in llama.weights))
        with pytest.raises(ExportError, match=message):
            export(given, tmp_path / "d", layout=layout, engine=engine)
    certificate = parity(source, tmp_path / "compressed-tensors-block", "transformers")
    assert certificate.first is not None
    assert (certificate.first.cause, "no experts" in certificate.first.found) == ("unread", True)


def test_a_trip_through_bf16_keeps_numbers_and_not_codes(tmp_path: Path) -> None:
    """mxfp8, decoded, cast again: other codes, and parity, difference and export call it equal."""
    torch.manual_seed(0)
    plain = Source((Weight("up.weight", torch.randn(256, 128).bfloat16(), True),), {})
    source = under(plain, RECIPES["mxfp8"])
    export(source, tmp_path / "a", layout="mxfp8")
    back = export(tmp_path / "a", tmp_path / "bf16", layout="bf16")
    assert [one.as_trained for one in back.linears] == [True]  # E4M3 times a power of two is a number of BF16
    export(tmp_path / "bf16", tmp_path / "b", layout="mxfp8")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    codes, scales = (
        int((one[key].view(torch.uint8) != two[key].view(torch.uint8)).sum())
        for key in ("up.weight", "up.weight_scale_inv")
    )
    assert (codes, scales) == (1_440, 45)  # of 32,768 and 1,024; docs/serving.md
    first, second = (parity(source, tmp_path / name, "sglang") for name in "ab")
    assert first.equal
    assert second.equal
    assert first.sha256_served == second.sha256_served == second.sha256_trained
    (found,) = differences(source, of_folder(tmp_path / "b")).tensors
    assert (found.same_codes, found.wrong) == (True, "")
    again = export(under(of_folder(tmp_path / "bf16"), RECIPES["mxfp8"]), tmp_path / "c", layout="mxfp8")
    assert again.changed == []


def test_parity_reads_four_bits(tmp_path: Path) -> None:
    """The weights are equal; NVFP4's layout leaves activations in BF16, which is named."""
    names = [f"model.layers.0.self_attn.{one}_proj.weight" for one in "qkvo"]
    plain = Source(tuple(Weight(name, torch.randn(64, 64).bfloat16(), True) for name in names), {"model_type": "llama"})
    for layout in ("compressed-tensors-mxfp4", "modelopt-nvfp4", "compressed-tensors-nvfp4"):
        recipe = layout.rpartition("-")[2]
        source = under(plain, RECIPES[recipe])
        folder = tmp_path / layout
        export(source, folder, layout=layout, recast=True)
        rows: Any = {row.layer: row for row in parity(source, folder, "vllm").rows}
        o = rows["model.layers.0.self_attn.o_proj"]
        assert o.sha256_trained == o.sha256_served
        assert o.served.startswith("E2M1[")
        causes = {one.cause for one in parity(source, folder, "vllm").findings}
        assert causes <= {"activation-granularity", "stale", "joined-scale", "granularity"}
        assert ("activation-granularity" in causes) == (recipe == "nvfp4")
    tensors = load_file(folder / "model.safetensors")
    assert {key.rpartition(".")[2] for key in tensors} == {"weight_packed", "weight_scale", "weight_global_scale"}


def test_transformers_gives_the_logits_of_a_gpt2(tmp_path: Path) -> None:
    """In BF16; in FP8 it is refused. The bias may come first or last, so a rounding may go the other way,
    and two blocks hand that on: four units of BF16 of the largest logit.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=128, n_layer=2, n_head=2, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).bfloat16().eval()
    ids = torch.randint(0, 64, (2, 16))
    for recipe in (None, "tensorwise", "rowwise"):
        if recipe is not None:
            ottava.convert(model, recipe)
        export(model, tmp_path / f"{recipe}", layout="bf16")
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{recipe}", dtype=torch.bfloat16)
        with torch.no_grad(), ottava.autocast("bf16"):
            ours, theirs = model(ids).logits.float(), back(ids).logits.float()
        assert float((ours - theirs).abs().max()) <= (0.0 if recipe is None else 4 * 2**-8) * float(theirs.abs().max())
        assert all(weight.stays for weight in of_model(model).weights if weight.linear)
        for source in (model, tmp_path / f"{recipe}"):
            with pytest.raises(ExportError, match="Conv1D"):
                export(source, tmp_path / "out")
