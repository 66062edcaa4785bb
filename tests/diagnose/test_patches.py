"""Patches: ottava's run as they are printed, and every one names the right layers."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import ottava
from ottava.diagnose.facts import context_of
from ottava.diagnose.ladder import changed, choices
from ottava.diagnose.patches import patterns, render
from ottava.diagnose.rows import Context
from ottava.diagnose.rules import Remedy, load_rules
from ottava.measure.walk import measure
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import GEMMS, GemmRecipe
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter

BOOK = load_rules()
LAYERS = [f"layers.{i}.mlp.{name}" for i in range(5) for name in ("up_proj", "down_proj")]


def model() -> torch.nn.Module:
    """With exactly LAYERS."""
    blocks = (
        torch.nn.ModuleDict(
            {"mlp": torch.nn.ModuleDict({n: torch.nn.Linear(64, 64) for n in ("up_proj", "down_proj")})}
        )
        for _ in range(5)
    )
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(blocks)})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    spec = ottava.QuantizationSpec(ottava.E4M3, scaling="delayed")
    x = torch.randn(8, 16)
    with RunWriter(tmp_path / "run") as writer:
        writer.describe(config={"optimizer_cpu_offload": True})
        for layer in LAYERS:
            key = SlotKey(layer, "input", "row", "delayed", "E4M3", "tensor", "fp32", "delayed", "door")
            writer.tally(1, key, measure(x, ottava.quantize(x, spec)))
    return Run.open(tmp_path / "run")


# --- every patch of ottava, executed --------------------------------------------------------------------------------

GEMMS_OF = {"input": {"fprop", "wgrad"}, "weight": {"fprop", "dgrad"}, "grad_output": {"dgrad", "wgrad"}}
ENDS = [layer for layer in LAYERS if layer.split(".")[1] in "04"]


class Pasted:
    """What a patch did: the names of its scope, the model that it was pasted beside, and the recipe it began with."""

    def __init__(self, patch: str, recipe: str, layers: list[str], tensor: str) -> None:
        self.model, self.layers, self.tensor = model(), layers or LAYERS, tensor
        self.began = ottava.get_recipe(recipe)
        ottava.convert(self.model, "delayed", filter=lambda name, layer: True)
        self.evaluated: list[str] = []
        batch = torch.randn(4, 64)
        self.scope: dict[str, Any] = {
            "ottava": ottava, "torch": torch, "model": self.model, "recipe": self.began, "x": batch, "batch": batch,
            "batches": [batch], "loss": self._loss, "evaluate": self._evaluate, "group_of_all_ranks": None, "lr": 0.1,
            "spec": ottava.QuantizationSpec(ottava.E4M3), "train_step": lambda x: x.sum(),
            "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1),
            "logits": torch.ones(2, 3), "labels": torch.tensor([1, -100]),
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a body of "..." runs no layer, and batches are FP32
            with torch.no_grad():
                self._loss(self.model, batch)
                assert all(layer.quantizers.weight.cached is not None for layer in self._linears())
            exec(patch, self.scope)
        self.recipe = self.scope["recipe"]

    def _linears(self) -> list[Any]:
        return [self.model.get_submodule(layer) for layer in LAYERS]

    def _loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        for layer in LAYERS:
            batch = model.get_submodule(layer)(batch)
        return batch.sum()

    def _evaluate(self, model: torch.nn.Module) -> None:
        with torch.no_grad():
            self._loss(model, self.scope["batch"])
        self.evaluated += [model.get_submodule(layer).last_call.recipe.name for layer in LAYERS]  # type: ignore[union-attr]

    def off(self, layers: list[str], gemms: set[str]) -> None:
        """These GEMMs of these layers are in high precision, and all else is as it was."""
        for layer in LAYERS:
            got, before = self.recipe.for_layer(layer), self.began.for_layer(layer)
            for gemm in GEMMS:
                expected = GemmRecipe() if layer in layers and gemm in gemms else getattr(before, gemm)
                assert getattr(got, gemm) == expected, (layer, gemm)
        ottava.convert(model(), self.recipe)

    def cells(self) -> Iterator[tuple[QuantizationSpec, QuantizationSpec]]:
        """Each quantized cell as it is now, and as the recipe has it that the patch began with."""
        began = self.began if self.began.predicted else ottava.get_recipe("delayed")
        for layer, gemm, side in itertools.product(LAYERS, GEMMS, ("lhs", "rhs")):
            yield tuple(getattr(getattr(r.for_layer(layer), gemm), side) for r in (self.recipe, began))  # type: ignore[misc]


def taken(pasted: Pasted, name: str, layers: list[str]) -> None:
    """These layers run that registered recipe, the others what they ran before."""
    for layer in LAYERS:
        got, own = pasted.recipe.for_layer(layer), ottava.get_recipe(name) if layer in layers else pasted.began
        assert all(getattr(got, gemm) == getattr(own, gemm) for gemm in GEMMS)


def e5m2(pasted: Pasted) -> None:
    """dY's cells have E5M2 and nothing else changed; a cell in high precision stays so."""
    for layer, gemm, side in itertools.product(LAYERS, GEMMS, ("lhs", "rhs")):
        got, own = (getattr(getattr(r.for_layer(layer), gemm), side) for r in (pasted.recipe, pasted.began))
        if own is not None and side == "lhs" and gemm != "fprop" and layer in pasted.layers:
            own = replace(own, format=ottava.E5M2)
        assert got == own, (layer, gemm, side)


def wider(pasted: Pasted) -> None:
    more = {new.margin - old.margin for new, old in pasted.cells()}
    assert all(new == replace(old, margin=new.margin, amax_history_len=64) for new, old in pasted.cells())
    assert len(more) == 1
    assert more <= {1, 2}


def shorter(pasted: Pasted) -> None:
    lengths = {new.amax_history_len for new, _ in pasted.cells()}
    assert all(new == replace(old, amax_history_len=new.amax_history_len) for new, old in pasted.cells())
    assert len(lengths) == 1
    assert lengths <= {16, 4, 1}


def finer(pasted: Pasted) -> None:
    """fprop of these layers as in rowwise and wgrad in BF16, if that is what the record asks for; else 1x128 blocks."""
    if pasted.recipe.for_layer(pasted.layers[0]).wgrad != GemmRecipe():
        return taken(pasted, "blockwise", pasted.layers)
    for layer in LAYERS:
        got, own = pasted.recipe.for_layer(layer), pasted.began.for_layer(layer)
        inside = layer in pasted.layers
        assert got.fprop == (ottava.get_recipe("rowwise").fprop if inside else own.fprop)
        assert got.wgrad == (GemmRecipe() if inside else own.wgrad)
        assert got.dgrad == own.dgrad
    return None


def split(pasted: Pasted) -> None:
    for layer in LAYERS:
        got = pasted.recipe.for_layer(layer)
        assert got.fprop == replace(pasted.began.fprop, fast_accum=False)
        assert (got.dgrad, got.wgrad) == (pasted.began.dgrad, pasted.began.wgrad)


def calibrated(pasted: Pasted) -> None:
    history = [pasted.model.get_submodule(layer).quantizers.input.amax_history for layer in LAYERS]  # type: ignore[union-attr]
    assert all(int((window > 0).sum()) == 1 for window in history)


def forgotten(pasted: Pasted) -> None:
    assert all(pasted.model.get_submodule(layer).quantizers.weight.cached is None for layer in LAYERS)  # type: ignore[union-attr]


def unchanged(pasted: Pasted) -> None:
    assert pasted.recipe == pasted.began


def in_bf16(pasted: Pasted) -> None:
    assert {pasted.model.get_submodule(layer).recipe.name for layer in LAYERS} == {"bf16"}  # type: ignore[union-attr]


def predicted_as_pasted(pasted: Pasted, remedy: Remedy, context: Context) -> None:
    """What `diagnose` predicts a remedy by is the recipe that its patch makes."""
    began = pasted.began
    layers = [] if pasted.layers is LAYERS else pasted.layers
    if not remedy.change or (foreseen := changed(began, remedy, context, layers, pasted.tensor)) is None:
        return
    wanted = ottava.get_recipe("bf16") if remedy.name == "bf16_run" else pasted.recipe
    for layer in LAYERS:
        a, b = foreseen.for_layer(layer), wanted.for_layer(layer)
        assert all(getattr(a, gemm) == getattr(b, gemm) for gemm in GEMMS), layer


EFFECTS: dict[str, Callable[[Pasted], object]] = {
    "no_weight_cache": forgotten,
    "high_precision_operand_check": lambda p: p.scope["x_q"].spec == p.scope["spec"] or pytest.fail("no cast"),
    "reduce_amax": unchanged,
    "one_update_a_step": unchanged,
    "restore_state": calibrated,
    "own_context": unchanged,
    "bf16_inputs": lambda p: {q.dtype for q in p.model.parameters()} == {torch.bfloat16} or pytest.fail("no cast"),
    "multiples_of_16": unchanged,
    "margin": wider,
    "shorter_history": shorter,
    "warm_phase": lambda p: calibrated(p) if p.began.predicted else unchanged(p),
    "e5m2_gradients": e5m2,
    "current_scaling": lambda p: taken(p, "tensorwise", p.layers),
    "bf16_operand": lambda p: p.off(p.layers, GEMMS_OF.get(p.tensor, set(GEMMS))),
    "boundary_bf16": lambda p: p.off(ENDS, set(GEMMS)),
    "fine_scaling": finer,
    "fine_gradients": lambda p: taken(p, "blockwise", p.layers),
    "round_up_scales": lambda p: taken(p, "mxfp8", p.layers),
    "norms_bf16": lambda p: p.off(p.layers, {"dgrad", "wgrad"}),
    "wgrad_bf16": lambda p: p.off(p.layers, {"wgrad"}),
    "dgrad_bf16": lambda p: p.off(p.layers, {"dgrad"}),
    "check_data": unchanged,
    "check_inference": unchanged,
    "skip_batch": lambda p: isinstance(p.scope["guard"], ottava.debug.SpikeGuard) or pytest.fail("no guard"),
    "check_labels": lambda p: torch.isclose(p.scope["loss"], torch.tensor(3.0).log()) or pytest.fail("other mean"),
    "check_start": unchanged,
    "check_operation": lambda p: torch.is_anomaly_enabled() or pytest.fail("off"),
    "no_margin": lambda p: all(new == replace(old, margin=0) for new, old in p.cells()) or pytest.fail("a margin"),
    "fp32_master": lambda p: {q.dtype for q in p.model.parameters()} == {torch.float32} or pytest.fail("no cast"),
    "smaller_eps": lambda p: p.scope["optimizer"].defaults["eps"] == 1e-8 or pytest.fail("other eps"),
    "higher_clip": unchanged,
    "higher_lr": unchanged,
    "zero_grad": unchanged,
    "router_bf16": lambda p: p.off(p.layers, set(GEMMS)),
    "add_parameters": lambda p: len(p.scope["optimizer"].param_groups) == 2 or pytest.fail("no group"),
    "unfreeze": lambda p: all(q.requires_grad for q in p.model.parameters()) or pytest.fail("frozen"),
    "convert_rest": unchanged,
    "tie_again": unchanged,
    "train_mode": lambda p: p.model.training or pytest.fail("not in training"),
    "eval_mode": lambda p: p.model.training and pytest.fail("in training"),
    "adam_beta2": lambda p: p.scope["optimizer"].defaults["betas"] == (0.9, 0.95) or pytest.fail("other betas"),
    "split_accumulation": split,
    "amax_floor": unchanged,
    "inference_fp8": lambda p: p.evaluated == [p.began.name] * len(LAYERS) or pytest.fail("not in the training's"),
    "bf16_run": in_bf16,
}
"""Remedy -> the assertion of what its patch does. `upgrade` is a command of the shell."""


def _is_narrow(recipe: str) -> bool:
    """Whether gradients are of fewer than 8 bits, as their other operand is; E5M2 cannot stand beside it."""
    return any(s is not None and s.format.bits < 8 for s in ottava.get_recipe(recipe).cells("grad_output"))


QUANTIZED = [name for name, recipe in ottava.RECIPES.items() if recipe.quantized]
KINDS = ("rowwise_with_gw_hp", "blockwise", "delayed", "nvfp4")


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow) for name in QUANTIZED]
)
def test_every_patch_of_every_rule_does_what_it_says(run: Run, recipe: str) -> None:
    """For findings of no layer, of one, of all of a kind and of all; a patch without an assertion is none."""
    context = context_of(run)
    with_patch = {name for name, remedy in BOOK.remedies.items() if "ottava" in remedy.patch}
    assert with_patch == {*EFFECTS, "upgrade"}
    assert {name for rule in BOOK.rules.values() for name in rule.remedies} >= with_patch
    for name, effect in EFFECTS.items():
        if name == "e5m2_gradients" and _is_narrow(recipe):
            assert all('format != "E2M1"' in str(r.when) for r in BOOK.rules.values() if name in r.remedies)
            continue  # so that no rule proposes it there
        patches: dict[str, tuple[Remedy, list[str], str]] = {}
        finest = [dict, lambda: {"fprop": "rowwise", "wgrad": None}]
        for layers, tensor in (([], ""), (LAYERS[:1], "input"), (LAYERS[1::2], "grad_output"), (LAYERS, "weight")):
            for remedy in itertools.chain.from_iterable(choices(BOOK.remedies[name], found) for found in finest):
                found = render(remedy, context, id="N1", layers=layers, tensor=tensor, recipe=recipe)
                patches[found["patch"]["ottava"]] = remedy, layers, tensor
        for patch, (remedy, layers, tensor) in patches.items():
            try:
                with torch.autograd.set_detect_anomaly(False):
                    pasted = Pasted(patch, recipe, layers, tensor)
                    effect(pasted)
                    predicted_as_pasted(pasted, remedy, context)
            except Exception as error:
                error.add_note(f"{name} under {recipe} for {layers} {tensor}:\n{patch}")
                raise


def test_the_first_and_last_block_are_those_of_the_run_in_every_framework(run: Run, tmp_path: Path) -> None:
    """Whichever layers the finding has; where a run names no blocks, nothing that lists layers is printed."""
    remedy, context = BOOK.remedies["boundary_bf16"], context_of(run)
    for layers in ([], LAYERS[3:4]):
        patch = render(remedy, context, id="T4", layers=layers, tensor="", recipe="tensorwise")["patch"]
        pattern = yaml.safe_load(patch["te"])["ottava_t4"]["layers"]["layer_name_regex_pattern"]
        assert [layer for layer in LAYERS if re.match(pattern, layer)] == ENDS
        scope: dict[str, Any] = {}
        exec(patch["torchao"].splitlines()[0], scope)
        assert scope["skipped"] == set(ENDS)
        assert '"*"' not in patch["ottava"]
    with RunWriter(tmp_path / "empty") as writer:
        writer.describe(config={})
    empty = context_of(Run.open(tmp_path / "empty"))
    patch = render(remedy, empty, id="T4", layers=[], tensor="", recipe="tensorwise")["patch"]
    assert set(patch) == {"ottava", "megatron"}


# --- other frameworks -----------------------------------------------------------------------------------------------


def test_transformer_engine_gets_yaml_that_matches_the_layers(run: Run) -> None:
    found = render(
        BOOK.remedies["bf16_operand"],
        context_of(run),
        id="N1",
        layers=LAYERS[1::2],
        tensor="input",
        recipe="tensorwise",
    )
    section = yaml.safe_load(found["patch"]["te"])["ottava_n1"]
    pattern = section["layers"]["layer_name_regex_pattern"]
    assert found["text"] == "Keep X of these layers in BF16."
    assert [layer for layer in LAYERS if re.match(pattern, layer)] == LAYERS[1::2]
    assert section["transformer_engine"]["DisableQuantizationGEMM"]["gemms"] == ["fprop", "wgrad"]


def test_patterns_match_their_layers_and_no_other() -> None:
    from fnmatch import fnmatchcase

    for wanted in (LAYERS[1::2], LAYERS[:1], LAYERS[:6], LAYERS, LAYERS[2:9]):
        found = patterns(wanted, LAYERS)
        assert [x for x in LAYERS if any(fnmatchcase(x, p) for p in found)] == wanted
    assert patterns(LAYERS[1::2], LAYERS) == ["*.mlp.down_proj"]
    assert patterns(["a[0].x"], []) == ["a[[]0].x"]


def test_constraints_are_told_where_they_apply(run: Run, tmp_path: Path) -> None:
    """Megatron: only delayed scaling with offload, no BF16 boundary with delayed; TE: no backward_override."""
    context = context_of(run, config=BOOK.config)
    names = ("current_scaling", "boundary_bf16", "wgrad_bf16", "margin")
    place: dict[str, Any] = {"id": "x", "layers": [], "tensor": "", "recipe": "delayed"}
    notes = {name: render(next(choices(BOOK.remedies[name])), context, **place)["notes"] for name in names}
    assert "offload" in notes["current_scaling"][0]
    assert "--first-last-layers-bf16" in notes["boundary_bf16"][0]
    assert "backward_override" in notes["wgrad_bf16"][0]
    assert notes["margin"] == []
    with RunWriter(tmp_path / "plain") as writer:
        writer.describe(config={})
    plain = context_of(Run.open(tmp_path / "plain"), config=BOOK.config)
    assert render(BOOK.remedies["current_scaling"], plain, id="x", layers=[], tensor="", recipe="")["notes"] == []


def test_no_placeholder_is_left(run: Run) -> None:
    for remedy in BOOK.remedies.values():
        remedy = next(choices(remedy))
        found = render(remedy, context_of(run), id="N1", layers=LAYERS[:2], tensor="input", recipe="strange")
        assert "${" not in found["text"] + "".join(found["patch"].values())
