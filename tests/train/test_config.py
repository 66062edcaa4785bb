"""Settings: defaults, overrides, and refusals that name the key."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import ottava
from ottava.base.settings import ConfigError
from ottava.recipe import RECIPES
from ottava.train.config import ScheduleConfig, TrainConfig, load_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.yaml"


def test_example_file_states_the_defaults() -> None:
    assert load_config(EXAMPLE) == TrainConfig()


def test_config_survives_its_own_yaml(tmp_path: Path) -> None:
    overrides = ["optimizer.betas=[0.8, 0.99]", "data.path=some/text", "recipe=delayed", "checkpoint.every=7"]
    config = load_config(None, overrides)
    saved = tmp_path / "config.yaml"
    saved.write_text(config.to_yaml())
    assert load_config(saved) == config
    assert config.data.path == Path.cwd() / "some/text"


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_may_be_a_name_or_spelled_out(name: str, tmp_path: Path) -> None:
    spelled_out = TrainConfig(recipe=RECIPES[name].to_dict())
    assert spelled_out.build_recipe() == TrainConfig(recipe=name).build_recipe() == RECIPES[name]
    saved = tmp_path / "config.yaml"
    saved.write_text(spelled_out.to_yaml())
    assert load_config(saved).build_recipe() == RECIPES[name]


def test_later_override_wins_and_file_yields_to_overrides(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("steps: 5\noptimizer: {learning_rate: 1e-3, eps: 1e-6}\n")
    config = load_config(file, ["optimizer.learning_rate=1e-2", "optimizer.learning_rate=2e-2"])
    assert (config.steps, config.optimizer.learning_rate, config.optimizer.eps) == (5, 2e-2, 1e-6)
    with pytest.raises(ConfigError, match=r"steps\.x: steps is 5 here, which holds no keys"):
        load_config(file, ["steps.x=1"])


@pytest.mark.parametrize(
    "override, said",
    [
        (
            "optimizer.learning_rat=1",
            "unknown setting 'optimizer.learning_rat'; did you mean 'optimizer.learning_rate'?",
        ),
        ("stpes=1", "unknown setting 'stpes'; did you mean 'steps'?"),
        ("optimzer.eps=1", "unknown setting 'optimzer'; did you mean 'optimizer'?"),
        ("recipe=rowise", "recipe: unknown recipe 'rowise'; did you mean 'rowwise'?"),
        ("recipe={name: x, fpro: {}}", "recipe: Recipe: unknown field 'fpro'; did you mean 'fprop'?"),
        ("recipe=null", "recipe: got None; needed: a recipe's name"),
        ("steps=0", "steps: got 0; input should be greater than or equal to 1"),
        ("steps=many", "steps: got 'many'; input should be a valid integer"),
        ("model.heads=3", "model: d_model 128 must be heads 3 times an even number"),
        ("model.kv_heads=3", "model: heads 4 must be a multiple of kv_heads 3"),
        (
            "steps=9007199254740993",
            "steps: got 9007199254740993; input should be less than or equal to 9007199254740992",
        ),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate: got inf; input should be a finite number"),
        ("recipe={name: x, fprop: 5}", "recipe: GemmRecipe is 5; needs a mapping"),
        ("device=gpu", "device: got 'gpu'; needed: auto, cpu, cuda or cuda:N"),
        ("steps.x=1", "steps: got {'x': 1}; input should be a valid integer"),
        ("auto_fallback=propose", "auto_fallback is 'propose', which needs a watch"),
        ("watch={evry: 5}", "unknown setting 'watch.evry'; did you mean 'watch.every'?"),
        ("watch={triggers: 5}", "watch.triggers: got 5; input should be"),
        ("guard={evry: 5}", "unknown setting 'guard.evry'; did you mean 'guard.every'?"),
        ("recipe=" + "[" * 5000, "recipe: the value '[[[["),
        ("steps", "got the setting 'steps'; needed: KEY=VALUE"),
        ("steps=[1", "steps: the value '[1' is no YAML"),
    ],
)
def test_refusal_names_the_key_and_what_would_do(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert str(caught.value).startswith(said)


def mutations(tree: object) -> Iterator[Callable[[object], object]]:
    """For every place in a tree of plain values, a function that gives the tree with another value there."""
    yield lambda new: new
    if isinstance(tree, dict | list):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            for inner in mutations(tree[key]):

                def change(new: object, key: Any = key, inner: Callable[[object], object] = inner) -> object:
                    changed = copy.copy(tree)
                    changed[key] = inner(new)
                    return changed

                yield change


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_recipe_with_anything_anywhere_is_refused_or_can_be_used(name: str) -> None:
    """A wrong recipe is a ValidationError and no other error; each accepted recipe casts a tensor."""
    recipe = RECIPES[name].override("*.0", "rowwise").override("a", cells={"fprop.lhs": None, "fprop.rhs": None})
    tree = recipe.to_dict()
    strange = (None, 5, -1, 1 << 60, 1e300, math.nan, True, "x", "1x5000000000000", [], [5], [[]], {}, {"x": 1}, {1: 2})
    weight = torch.ones(16, 16)
    accepted = set()
    for change in mutations(tree):
        for value in strange:
            try:
                config = load_config(None, []).model_validate({"recipe": change(value)})
            except ValidationError:
                continue
            accepted.add(config.build_recipe())
    for recipe in accepted:
        for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad):
            if gemm.lhs is not None:
                ottava.quantize(weight, gemm.lhs)
    assert accepted


@pytest.mark.parametrize(
    "text, said",
    [
        ("a: [", "is no YAML"),
        ("[" * 5000, "nested"),
        ("steps: 1" + "0" * 30, "whole number"),
        ("- 1", "got a YAML list"),
        ("stpes: 1", "stpes"),
        (None, "cannot be read"),
    ],
)
def test_bad_file_is_named(text: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(file) in str(caught.value)
    assert said in str(caught.value)


def test_digest_ignores_only_what_cannot_change_the_trained_bits() -> None:
    digest = TrainConfig().digest()
    assert load_config(None, ["checkpoint.every=1", "evaluation.batches=3"]).digest() == digest
    for override in ("steps=7", "seed=1", "recipe=bf16", "optimizer.eps=1e-7", "data.max_bytes=null", "device=cpu"):
        assert load_config(None, [override]).digest() != digest


OLD_DIGESTS = (
    # settings, hashes of the versions before `amax_every`, and since
    ((), ("c58d7e696571f33caca76831fb4a5a8aa8a1fe81c10c58f256996144ce14281b",
          "9943e53fb23af4507acb0631cc6185c7c00135df5aad49fc14c5840d290c3ed9")),
    (("guard={}",), ("20f68aab06472dae63411198597b97fa5ba84ce62c16280c398c2ec691d4bb01",
                     "35748119bfc5ba884a9e4627cb1a72ef73c2a531297dc6a92cfe421d7e8f69cc")),
    (("microbatches=4",), ("bd47a8e50c5bec017447597b1655d77a3c8fb55bf65765fa7e2e7001f2ba4d34",)),
)  # fmt: skip
"""What those versions computed. If the last of a row changes, a new setting is missing in `_LATER` of config.py."""


def test_a_checkpoint_of_any_older_version_has_a_known_digest() -> None:
    for settings, digests in OLD_DIGESTS:
        known = load_config(None, settings).older_digests()
        assert known.issuperset(digests), settings
        assert load_config(None, settings).digest() in known
    assert [load_config(None, settings).digest() for settings, _ in OLD_DIGESTS[:2]] == [
        d[-1] for _, d in OLD_DIGESTS[:2]
    ]
    assert (
        OLD_DIGESTS[0][1][1]
        not in load_config(None, ["optimizer={weights: fp8, master: fp32, amax_every: 4}"]).older_digests()
    )
    assert OLD_DIGESTS[0][1][0] not in load_config(None, ["seed=1"]).older_digests()


def test_learning_rate_rises_to_its_peak_if_it_warms_up_and_ends_at_the_final_fraction() -> None:
    """Warm-up of 10 % of 20 steps is 2 steps: 1/2, 1; half-way down the cosine (step 11) is (1 + 0.1) / 2."""
    schedule = ScheduleConfig(warmup_fraction=0.1, final_fraction=0.1)
    factors = [schedule.factor(step, 20) for step in range(1, 21)]
    assert factors[:2] == [0.5, 1.0]
    assert factors[10] == pytest.approx(0.55)
    assert factors[-1] == pytest.approx(0.1)
    assert factors[1:] == sorted(factors[1:], reverse=True)
    for warmup, wanted in ((1.0, [0.25, 0.5, 0.75, 1.0]), (0.0, pytest.approx([0.8536, 0.5, 0.1464, 0.0], abs=1e-4))):
        schedule = ScheduleConfig(warmup_fraction=warmup, final_fraction=0.0)
        assert [schedule.factor(step, 4) for step in range(1, 5)] == wanted


def test_a_run_may_name_an_accumulator() -> None:
    """Every GEMM on codes runs under it; without one the digest is that of older runs; unknown ones are refused."""
    config = load_config(None, ["accumulator=hopper"])
    assert config.build_recipe() == RECIPES["tensorwise"].under("hopper")
    assert config.digest() != load_config(None).digest()
    assert load_config(None, ["recipe=tensorwise/hopper"]).build_recipe() == config.build_recipe()
    with pytest.raises(ConfigError, match="did you mean 'hopper'"):
        load_config(None, ["accumulator=hoper"])


def test_a_batch_without_end_is_hashed_at_once() -> None:
    """`./x fuzz --seed 3 --only config --case 62` looked for its divisors for years."""
    config = load_config(None, ["batch_size=9007199254740992"])
    assert 1 < len(config.older_digests()) < 100
