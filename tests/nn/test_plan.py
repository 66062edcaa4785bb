"""The prediction: its arithmetic by hand, what it refuses; tuning measures each distinct GEMM of a model once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.kernels import gemm_choice, reference, scaled_mm
from ottava.kernels.gemm_choice import Store, call_name
from ottava.kernels.native import gemm as native_gemm
from ottava.nn.convert import plan_model
from ottava.nn.plan import Device, plan_layer
from ottava.ops import dispatch
from ottava.recipe import RECIPES, Recipe, get_recipe
from scaling_samples import two_linears

H200 = Device()
IDEAL = Device(launch=0.0, start=0.0, processors=1, bandwidth=1e30, transposing=1e30)


def test_a_large_gemm_is_bound_by_arithmetic_a_thin_one_by_memory() -> None:
    """2 M N K / rate, and bytes / bandwidth; one tile of 132 fills no wave."""
    assert IDEAL.gemm(4096, 4096, 4096, 750e12, 2) == 2 * 4096**3 / 750e12
    thin = replace(IDEAL, bandwidth=4e12)
    assert thin.gemm(16384, 16, 4096, 750e12, 2) == ((16384 + 16) * 4096 * 2 + 2 * 16384 * 16) / 4e12
    seconds = H200.gemm(128, 128, 4 * 2048, 750e12, 2) - H200.start  # 4 of 132 processors
    assert seconds == pytest.approx(33 * 2 * 128 * 128 * 4 * 2048 / 750e12)


def test_without_overheads_each_gemm_gains_its_ratio() -> None:
    """tensorwise: fast accumulation forward, full backward; blocks and rows theirs."""
    for name, ratios in {
        "tensorwise": (1.85, 1.65, 1.65),
        "rowwise": (1.75, 1.75, 1.75),
        "rowwise_with_gw_hp": (1.75, 1.75, 1.0),
        "blockwise": (1.6, 1.6, 1.6),
    }.items():
        layer = plan_layer("x", (4096, 4096, 4096), get_recipe(name), IDEAL)
        gains = [gemm.bf16 / gemm.planned for gemm in layer.gemms.values()]
        assert gains == pytest.approx(ratios)
        assert list(layer.gemms) == ["fprop", "dgrad", "wgrad"]


def test_casts_cost_the_bytes_they_move() -> None:
    """bf16, x and x.T: current 2 + 2 read and 1 + 1 written, delayed and blocks 2 + 1 + 1; of x, w and dy."""
    m, k, n = 4096, 1024, 2048
    elements = m * k + n * k + m * n
    device = replace(H200, transposing=1.0, launch=0.0)
    for name, bytes_moved in {
        "tensorwise": 6,
        "rowwise": 6,
        "delayed": 4,
        "guarded": 4,
        "blockwise": 4,
        "bf16": 0,
    }.items():
        assert plan_layer("x", (m, k, n), get_recipe(name), device).casts == bytes_moved * elements
    launches = replace(H200, transposing=1e30, launch=1.0)
    assert plan_layer("x", (m, k, n), get_recipe("tensorwise"), launches).casts == pytest.approx(9)
    assert plan_layer("x", (m, k, n), get_recipe("blockwise"), launches).casts == pytest.approx(3)


def test_small_layers_are_refused_and_large_ones_taken(recipe: Recipe) -> None:
    """Never slower than BF16 is the promise; the reason has both numbers."""
    small, large = (plan_layer("x", (size, size, size), recipe, H200) for size in (512, 8192))
    assert not small.taken
    native = all(gemm.kernel.startswith(("fp8", "bf16")) for gemm in large.gemms.values())
    assert large.taken == (native and recipe.quantized)
    if recipe.quantized and native:
        assert "stays in BF16: casts take" in small.reason
        assert "gains: the GEMMs save" in large.reason


@pytest.mark.parametrize(
    "capability, name, message",
    [
        ((8, 0), "tensorwise", "sm_80 emulates fprop, dgrad, wgrad"),
        ((9, 0), "mxfp8", "sm_90 emulates fprop, dgrad, wgrad"),
        ((10, 0), "blockwise", "sm_100 emulates fprop, dgrad, wgrad"),
        ((9, 0), "tensorwise/fp8_inputs_bf16_gemm", "emulates"),
        ((9, 0), "nvfp4", "emulates"),
        ((9, 0), "bf16", "BF16 by the recipe"),
    ],
)
def test_what_a_device_lacks_is_said(capability: tuple[int, int], name: str, message: str) -> None:
    layer = plan_layer("x", (16384, 8192, 8192), get_recipe(name), replace(H200, capability=capability))
    assert not layer.taken
    assert message in layer.reason


def test_the_plan_of_a_model_counts_refused_layers_as_bf16() -> None:
    """On the meta device; overrides are resolved by name."""
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"wide": nn.Linear(4096, 14336), "tiny": nn.Linear(64, 64), "kept": nn.Linear(4096, 4096)}
        )
    plan = plan_model(model, get_recipe("delayed").override("kept", "bf16"), tokens=16384)
    assert {layer.name: layer.taken for layer in plan.layers} == {"wide": True, "tiny": False, "kept": False}
    assert plan.layers[2].reason == "BF16 by the recipe"
    bf16 = sum(layer.bf16 for layer in plan.layers)
    assert plan.speedup == pytest.approx(bf16 / (bf16 - plan.layers[0].bf16 + plan.layers[0].planned))
    assert json.loads(json.dumps(plan.to_dict()))["layers"][0]["gemms"]["fprop"]["kernel"] == "fp8 tensor"
    assert "predicted, not measured" in str(plan)
    assert plan_model(nn.ReLU(), "delayed", tokens=1).speedup == 1.0


def test_the_predictions_of_the_page_are_the_planners() -> None:
    """docs/performance.md shows them beside TransformerEngine's measured figures, of the same four layers."""
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text("utf-8")
    sizes = {"qkv": (4096, 12288), "out": (4096, 4096), "fc1": (4096, 16384), "fc2": (16384, 4096)}
    with torch.device("meta"):
        model = nn.ModuleDict({name: nn.Linear(*one, bias=False, dtype=torch.bfloat16) for name, one in sizes.items()})
    plans = {name: plan_model(model, name, tokens=15_872) for name in ("delayed", "tensorwise", "blockwise")}
    before = sum(layer.bf16 for layer in plans["delayed"].layers)
    assert f"| BF16 | 32.0 | {1e3 * before:.1f} |" in page
    for name, one in plans.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` | ") and "predicted" not in line)
        assert row.endswith(f"| {1e3 * before / one.speedup:.1f}, {one.speedup:.2f} |"), (name, one.speedup)


def test_convert_leaves_layers_that_would_lose() -> None:
    """With the prediction as the reason; without `plan` they are converted; other refusals keep their own words."""
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"wide": nn.Linear(4096, 14336), "small": nn.Linear(256, 256), "lm_head": nn.Linear(64, 64)}
        )
    report = ottava.convert(model, "delayed", plan=16384)
    assert report.converted == ("wide",)
    assert report.skipped["small"].startswith("predicted 0.")
    assert "stays in BF16: casts take" in report.skipped["small"]
    assert report.skipped["lm_head"].startswith("output head")
    assert ottava.convert(model, "delayed", plan=True).converted == ("wide",)
    with pytest.raises(ValueError, match="0"):
        ottava.convert(model, "delayed", plan=0)
    assert set(ottava.convert(model, "delayed", plan=False).converted) == {"wide", "small"}
    assert set(ottava.convert(model, "delayed").converted) == {"wide", "small"}


def test_constants_are_read_and_wrong_files_refused(tmp_path: Path) -> None:
    path = tmp_path / "ceilings.json"
    path.write_text(json.dumps({"constants": {"name": "mine", "bf16": 6e14, "capability": [9, 0]}, "device": "x"}))
    assert Device.read(path) == Device(name="mine", bf16=6e14)
    for wrong in ({"constants": {"bf61": 1.0}}, {"constants": {}}, [], {"bf16": 1}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="needs an object 'constants'"):
            Device.read(path)
    path.write_text(json.dumps({"constants": {"capability": None}}))
    with pytest.raises(ValueError, match="capability is null"):
        Device.read(path)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="each needs at least 1"):
        plan_layer("x", (0, 64, 64), RECIPES["tensorwise"], H200)


def timer(run: Callable[[], Tensor]) -> float:
    return 1.0


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "tensorwise/fp8_inputs_bf16_gemm"])
def test_what_is_measured_is_what_is_looked_up(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every native GEMM of a step asks for a name that was measured; a second layer of one shape adds none."""
    monkeypatch.setattr(dispatch, "CPU_KERNELS", (native_gemm, scaled_mm, reference))
    asked: list[str] = []
    monkeypatch.setattr(gemm_choice, "known", lambda *call: asked.append(call_name(*call)))
    net, store = two_linears(recipe), Store(None, "this machine")
    net(torch.randn(16, 64, dtype=torch.bfloat16)).sum().backward()
    names = set(asked)
    assert bool(names) == ("bf16_gemm" not in recipe)
    if not names:
        with pytest.raises(ValueError, match="tune: no layer has run a quantized GEMM"):
            ottava.nn.tune(net, timer=timer, store=store)
        return
    asked.clear()
    before = torch.get_rng_state()
    choices = ottava.nn.tune(net, timer=timer, store=store)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(choices) == names
    assert all(store.known(name) == choice for name, choice in choices.items())
    assert all({"scaled_mm", "native_gemm"} >= set(choice.milliseconds) > set() for choice in choices.values())


def test_a_model_that_has_not_run_is_refused() -> None:
    with pytest.raises(ValueError, match="convert the model and run a forward and a backward first"):
        ottava.nn.tune(two_linears("tensorwise"), timer=timer)
    with pytest.raises(ValueError, match="no layer has run a quantized GEMM"):
        ottava.nn.tune(nn.Linear(4, 4), timer=timer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_tuned_model_trains_on(recipe: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: its GEMMs are measured, and the next step runs what won."""
    net = two_linears(recipe, bias=False).cuda()
    x = torch.randn(256, 64, dtype=torch.bfloat16, device="cuda")
    net(x).sum().backward()
    choices = ottava.nn.tune(net, store=Store(None, "test"))
    monkeypatch.setattr(gemm_choice, "known", lambda *call: choices.get(call_name(*call)))
    net(x).sum().backward()
    for layer in (net[0], net[2]):
        for record in layer.last_call.records.values():
            assert record.kernel in {way.split()[0] for choice in choices.values() for way in choice.milliseconds}
