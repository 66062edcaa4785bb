"""Axolotl's own plugin manager with the plugin, on a small Llama: settings, conversion, LoRA beside it, callback."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel, ValidationError

import ottava

base: Any = pytest.importorskip("axolotl.integrations.base")
doors = pytest.importorskip("ottava.doors.axolotl")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "ottava.doors.axolotl.OttavaPlugin"


class Theirs(BaseModel):
    """In place of Axolotl's own settings, whose module asks for half a hundred packages."""

    base_model: str = "none"


@pytest.fixture
def manager() -> Iterator[Any]:
    """Axolotl keeps one for the process."""
    one = base.PluginManager.get_instance()
    before = dict(one.plugins)
    one.register(PLUGIN)
    assert PLUGIN in one.plugins
    yield one
    one.plugins.clear()
    one.plugins.update(before)


def configured(manager: Any, **settings: Any) -> Any:
    """The settings as Axolotl makes them: checked by its classes and those of plugins, then a DictDefault."""
    from axolotl.utils.dict import DictDefault

    (path,) = manager.get_input_args()
    module, name = path.rsplit(".", 1)
    args: type[BaseModel] = getattr(importlib.import_module(module), name)
    merged = type("AxolotlInputConfig", (Theirs, args), {})  # as axolotl.integrations.config does
    return DictDefault(merged(**settings).model_dump(exclude_none=True))


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(config).bfloat16()


def test_the_model_is_converted_before_adapters(manager: Any) -> None:
    peft = pytest.importorskip("peft")
    model, plain = llama(), llama()
    cfg = configured(manager, ottava_recipe="mxfp8", ottava_skip=["model.layers.0.*"])
    manager.post_model_build(cfg, model)
    ids = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(1))
    ottava.convert(plain, "mxfp8", filter=lambda name, _: name.startswith("model.layers.1."))
    assert torch.equal(model(ids).logits, plain(ids).logits)
    fp8 = {row.layer for row in ottava.receipt(model).rows if row.fp8}
    assert fp8
    assert all(name.startswith("model.layers.1.") for name in fp8)

    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    adapted(input_ids=ids, labels=ids).loss.backward()
    assert {row.layer.rpartition("model.layers.")[2] for row in ottava.receipt(adapted).rows if row.fp8}
    assert [name for name, p in adapted.named_parameters() if p.grad is not None and "lora" not in name] == []


def test_the_example_has_these_settings(manager: Any) -> None:
    example = yaml.safe_load((ROOT / "examples" / "door_axolotl.yaml").read_text("utf-8"))
    assert example["plugins"] == [PLUGIN]
    settings = {key: value for key, value in example.items() if key.startswith("ottava_")}
    cfg = configured(manager, **settings)
    assert {key: cfg[key] for key in settings} == settings
    assert settings.keys() == doors.OttavaArgs.model_fields.keys()


def test_without_a_recipe_nothing_changes(manager: Any) -> None:
    model = llama()
    manager.post_model_build(configured(manager), model)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_settings_are_checked_first(manager: Any) -> None:
    with pytest.raises(ValidationError, match="unknown recipe 'mxfp9'; did you mean 'mxfp8'"):
        configured(manager, ottava_recipe="mxfp9")
    with pytest.raises(ValueError, match=r"skip: unknown pattern 'blocks\.\*'"):
        manager.post_model_build(configured(manager, ottava_recipe="mxfp8", ottava_skip=["blocks.*"]), llama())
    taken = llama()
    ottava.convert(taken, "rowwise")
    with pytest.raises(ValueError, match=r"OttavaConfig: .* is under ottava's recipe 'rowwise' already"):
        manager.post_model_build(configured(manager, ottava_recipe="mxfp8"), taken)


def test_the_callback_is_the_trainers(manager: Any) -> None:
    assert manager.add_callbacks_post_trainer(configured(manager, ottava_log=False), None) == []
    (callback,) = manager.add_callbacks_post_trainer(configured(manager), None)
    assert isinstance(callback, transformers.TrainerCallback)
