"""The manifest tells the versions and the host that really ran, and every layer with the reason why it was not seen."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
from torch import nn

import ottava
from ottava.watching.manifest import recipes_of, start_of_run


def test_layers_of_both_kinds_are_listed_with_reasons(tmp_path: Path) -> None:
    ours, plain = nn.Linear(32, 32), nn.Linear(32, 32)
    model = nn.ModuleDict({"ours": nn.Sequential(ours), "plain": plain, "idle": nn.Linear(32, 32)}).bfloat16()
    ottava.convert(model["ours"], "tensorwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ottava.watch(model, tmp_path / "run", every=1):
        x = torch.randn(8, 32, dtype=torch.bfloat16)
        (model["ours"](x) + model["plain"](x)).sum().backward()
        optimizer.step()
    manifest = ottava.debug.Run.open(tmp_path / "run").manifest
    layers = {layer["name"]: (layer["source"], layer["seen"]) for layer in manifest["layers"]}
    assert layers == {"0": ("door", True), "plain": ("hook", True), "idle": ("hook", False)}
    coverage = manifest["coverage"]
    assert (coverage["linear"], coverage["seen"]) == (3, 2)
    assert [(skipped["name"], "did not run" in skipped["why"]) for skipped in coverage["skipped"]] == [("idle", True)]


def test_a_converted_layer_that_stays_in_bf16_is_seen(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16()
    ottava.convert(model, ottava.get_recipe("tensorwise").override("1", "bf16"))
    with ottava.watch(model, tmp_path / "run", every=1):
        model(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward()
    manifest = ottava.debug.Run.open(tmp_path / "run").manifest
    assert (manifest["coverage"]["seen"], manifest["coverage"]["skipped"]) == (2, [])


def test_recipes_keep_their_overrides() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    recipe = ottava.get_recipe("tensorwise").override("1", "bf16")
    ottava.convert(model, recipe, filter=lambda name, layer: True)
    found = recipes_of([weakref.ref(layer) for layer in model])
    assert [ottava.Recipe.from_dict(r.to_dict()) for r in found] == [recipe]
    assert start_of_run(3)["host"]["world_size"] == 3
