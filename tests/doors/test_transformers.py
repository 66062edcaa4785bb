"""`OttavaConfig` with the real transformers: load, train, save, load again, resume, push, generate, compile."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from hf_samples import CONFIGS, batch, copied, hf, made, rows, same, saved, train
from ottava.doors.entries import HISTORIES
from ottava.doors.transformers import OttavaConfig
from ottava.engine.functional import quantized_layers
from ottava.nn import assert_fp8, receipt
from ottava.optim import AdamW
from ottava.recipe import RECIPES, get_recipe
from ottava.weights.parameter import is_quantized_weight
from sweep import sweep

NO_FP8_WEIGHTS = ("ms_eden",)
"""Recipes whose transform makes other numbers of a weight: `convert` refuses to store it."""


def load(folder: Path, config: OttavaConfig | None = None) -> Any:
    """A model, and every key that transformers complains of."""
    given = {} if config is None else {"quantization_config": config}
    model, said = hf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **given)
    assert {kind: keys for kind, keys in said.items() if keys} == {}
    return model


def round_trip(tmp_path: Path, name: str, config: OttavaConfig) -> None:
    """Loads, trains, saves and loads: no key too many or too few, the same bits, and the same next step."""
    model = load(saved(tmp_path / "hub", name), config)
    train(model, 2)
    model.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert same(model.state_dict(), again.state_dict())
    assert train(model, 1, first=5) == train(again, 1, first=5)


@sweep(recipe=tuple(RECIPES))
def test_every_recipe_survives_saving(recipe: str, tmp_path: Path) -> None:
    round_trip(tmp_path / recipe, "llama", OttavaConfig(recipe))
    if recipe not in NO_FP8_WEIGHTS:
        round_trip(tmp_path / f"{recipe} codes", "llama", OttavaConfig(recipe, weights="fp8"))


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_delayed_scaling_survives_saving(weights: Any, tmp_path: Path) -> None:
    """Trap 3: `from_pretrained` dropped 168 histories. Trap 1: it left them on the meta device."""
    round_trip(tmp_path, "llama", OttavaConfig("delayed", weights=weights))
    entries = safetensors.torch.load_file(tmp_path / "ours" / "model.safetensors")
    assert HISTORIES in entries
    assert not any(".quantizers." in key for key in entries)
    assert sum(key.endswith("_scale_inv") for key in entries) == (14 if weights else 0)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "llama"])
def test_architectures_survive_saving(name: str, tmp_path: Path) -> None:
    """Tied heads, Conv1D, and experts, whose stacks transformers cuts apart when it saves."""
    round_trip(tmp_path, name, OttavaConfig("delayed"))


def test_a_checkpoint_in_shards_is_whole(tmp_path: Path) -> None:
    model = load(saved(tmp_path / "hub"), OttavaConfig("delayed", weights="fp8"))
    train(model, 2)
    model.save_pretrained(tmp_path / "ours", max_shard_size="60KB")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    assert same(model.state_dict(), load(tmp_path / "ours").state_dict())


def test_the_body_of_a_model_loads_without_its_head(tmp_path: Path) -> None:
    """`AutoModel` has the names without their prefix."""
    model = load(saved(tmp_path / "hub"), OttavaConfig("delayed", weights="fp8"))
    train(model, 2)
    model.save_pretrained(tmp_path / "ours")
    body, said = hf.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert said["missing_keys"] == set()
    assert same(model.model.state_dict(), body.state_dict())


def test_square_weights_of_gpt2_are_not_stored_sideways(tmp_path: Path) -> None:
    """Conv1D keeps (in, out); a square one was taken for (out, in)."""
    model = load(saved(tmp_path / "hub", "gpt2"), OttavaConfig("tensorwise", weights="fp8"))
    assert model.transformer.h[0].attn.c_proj.weight.shape == (64, 64)
    assert not any(is_quantized_weight(p) for p in model.parameters())
    assert train(model, 1) == train(load(tmp_path / "hub", OttavaConfig("tensorwise")), 1)


def arguments(folder: Path, **settings: Any) -> Any:
    defaults = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4, "report_to": []}
    return hf.TrainingArguments(folder, **defaults | {"use_cpu": True, "disable_tqdm": True} | settings)


@pytest.mark.parametrize(("recipe", "weights"), [("delayed", None), ("delayed", "fp8"), ("nvfp4", None)])
def test_the_trainer_resumes_with_the_same_bits(
    recipe: str, weights: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, states, losses = saved(tmp_path / "hub"), [], []
    for resume in (None, str(tmp_path / "out" / "checkpoint-2")):
        model = load(folder, OttavaConfig(recipe, weights=weights))
        optimizer = AdamW(model.parameters(), lr=1e-3, master="fp32") if weights else None
        trainer = hf.Trainer(model, arguments(tmp_path / "out"), train_dataset=rows(), optimizers=(optimizer, None))
        logging.getLogger("transformers").propagate = True
        trainer.train(resume_from_checkpoint=resume)
        states.append(copied(model.state_dict()))
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[0] == losses[1]
    assert same(*states)
    assert not [line for line in caplog.messages if "missing keys" in line or "unexpected keys" in line]
    assert_fp8(model, 0.8)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """A Hub that notes the entries of each model that it gets."""
    uploads: list[set[str]] = []

    class Api:
        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return type("Repo", (), {"repo_id": repo_id})

        def create_commit(self, operations: Any, **_: Any) -> None:
            for one in operations:
                if one.path_in_repo.endswith(".safetensors"):
                    uploads.append(set(safetensors.torch.load_file(one.path_or_fileobj)))

        def create_branch(self, **_: Any) -> None: ...

        def upload_folder(self, folder_path: str, **_: Any) -> Any:
            uploads.append(set(safetensors.torch.load_file(Path(folder_path) / "model.safetensors")))

    import transformers.modeling_utils
    import transformers.trainer
    import transformers.utils.hub

    for module in (transformers.modeling_utils, transformers.utils.hub, transformers.trainer):
        monkeypatch.setattr(module, "hf_api", Api, raising=False)
    card = type("Card", (), {"save": lambda self, path: None})
    monkeypatch.setattr(transformers.utils.hub, "create_and_tag_model_card", lambda *_, **__: card())
    monkeypatch.setattr(transformers.trainer.Trainer, "create_model_card", lambda *_, **__: None)
    return uploads


def test_a_push_to_the_hub_has_no_histories(
    tmp_path: Path, hub: list[set[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Trap 4. By every way to push; what it leaves out is said, and a model that was asked to keeps them."""
    model = load(saved(tmp_path / "hub"), OttavaConfig("delayed"))
    train(model, 2)
    model.push_to_hub("me/model")
    model.save_pretrained(tmp_path / "pushed", push_to_hub=True, repo_id="me/model")
    trainer = hf.Trainer(model, arguments(tmp_path / "out"), train_dataset=rows())
    trainer.hub_model_id, trainer.push_in_progress = "me/model", None
    trainer.push_to_hub()
    assert len(hub) == 3
    assert not any(HISTORIES in entries for entries in hub)
    assert sum("without the histories of delayed scaling (210 tensors)" in line for line in caplog.messages) == 3
    load(tmp_path / "pushed")  # without a complaint, and with histories that are empty
    model.hf_quantizer.quantization_config.push_histories = True
    model.push_to_hub("me/model")
    assert HISTORIES in hub[-1]


def test_the_config_survives_json() -> None:
    recipe = get_recipe("rowwise").override("*.q_proj", "bf16")
    for config in (OttavaConfig("delayed", skip="*.0.*", weights="fp8"), OttavaConfig(recipe, push_histories=True)):
        plain = json.loads(json.dumps(config.to_dict()))
        assert OttavaConfig.from_dict(plain).__dict__ == config.__dict__
    assert OttavaConfig("mxfp8").to_dict()["recipe"] == "mxfp8"


def test_skipped_layers_stay_in_high_precision(tmp_path: Path) -> None:
    model = load(saved(tmp_path / "hub"), OttavaConfig("tensorwise", skip=("*.layers.0.*", "*.o_proj")))
    names = {layer.name for layer in quantized_layers(model)}
    assert len(names) == 6
    assert all(".layers.1." in name and "o_proj" not in name for name in names)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_has_the_same_gradients(reentrant: bool, tmp_path: Path) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = load(saved(tmp_path / "hub"), OttavaConfig("delayed")).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for step in range(2):
            model(**batch(step)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert same(*gradients)


def test_generation_leaves_no_trace(tmp_path: Path) -> None:
    model = load(saved(tmp_path / "hub"), OttavaConfig("delayed"))
    train(model, 2)
    before = copied(model.state_dict())
    text = model.eval().generate(batch()["input_ids"], max_new_tokens=4, do_sample=False)
    assert text.shape == (2, 20)
    assert same(before, model.state_dict())


def test_a_compiled_model_trains(tmp_path: Path) -> None:
    losses = []
    for compiled in (False, True):
        model = load(saved(tmp_path / "hub"), OttavaConfig("delayed"))
        run: Any = torch.compile(model, backend="aot_eager") if compiled else model
        losses.append(train(run, 3))
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert {row.kernel for row in receipt(model).rows if row.gemm == "fprop"} <= {"compiled", "torch.mm bfloat16", "-"}


def test_a_model_from_a_config_is_converted_and_saved(tmp_path: Path) -> None:
    model = made()
    report = OttavaConfig("delayed").convert(model)
    assert len(report.converted) == 14
    train(model, 2)
    model.save_pretrained(tmp_path)
    assert same(model.state_dict(), load(tmp_path).state_dict())
    model.float()  # plain parameters: no quantized model to transformers


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unknown field 'recipes'; did you mean 'recipe'"):
        OttavaConfig(recipes="delayed")
    with pytest.raises(ValueError, match="unknown recipe 'delayd'; did you mean 'delayed'"):
        OttavaConfig("delayd")
    with pytest.raises(ValueError, match="unknown weights 'int8'"):
        OttavaConfig(weights="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"skip: unknown pattern '\*.q_prj'"):
        OttavaConfig(skip="*.q_prj").convert(made())
    with pytest.raises(ValueError, match=r"not for '.*experts.gate_up_proj_groups.0'.*skip='\*.experts.\*'"):
        OttavaConfig(weights="fp8").convert(made("mixtral"))
    report = OttavaConfig(weights="fp8", skip="*.experts.*").convert(made("mixtral"))
    assert report.skipped["model.layers.0.mlp.experts.down_proj_groups.3"] == "skipped by '*.experts.*'"
    model = made()
    OttavaConfig().convert(model)
    with pytest.raises(ValueError, match=r"OttavaConfig: model.layers.0.self_attn.q_proj is under ottava's recipe"):
        OttavaConfig().convert(model)


def test_a_model_that_torchao_has_quantized_is_refused(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = made()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match=r"weight is quantized already \(a Int8Tensor of torchao\)"):
        OttavaConfig().convert(model)


def test_damaged_histories_are_refused(tmp_path: Path) -> None:
    model = load(saved(tmp_path / "hub"), OttavaConfig("delayed"))
    train(model, 1)
    model.save_pretrained(tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    config["quantization_config"]["recipe"] = get_recipe("delayed", amax_history_len=4).to_dict()
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="convert with that amax_history_len first"):
        load(tmp_path / "ours")


def test_parameters_stay_those_of_the_class(tmp_path: Path) -> None:
    """What other libraries look for: the class, nn.Linear, the dtype, what trains."""
    model = load(saved(tmp_path / "hub"), OttavaConfig("tensorwise"))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert all(isinstance(layer, nn.Linear) for layer in quantized_layers(model))
    assert all(p.requires_grad for p in model.parameters())
    assert model.dtype == torch.bfloat16
