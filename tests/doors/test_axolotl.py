"""The plugin in Axolotl's plugin manager on a small Llama; a whole `axolotl train` where all of Axolotl is there."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
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


def llama(words: int = 128, length: int = 64) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=words, max_position_embeddings=length)
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
    with pytest.raises(ValueError, match=r"skip: no layer matches: unknown pattern 'blocks\.\*'"):
        manager.post_model_build(configured(manager, ottava_recipe="mxfp8", ottava_skip=["blocks.*"]), llama())
    taken = llama()
    ottava.convert(taken, "rowwise")
    with pytest.raises(ValueError, match=r"OttavaConfig: .* is under ottava's recipe 'rowwise' already"):
        manager.post_model_build(configured(manager, ottava_recipe="mxfp8"), taken)


def test_the_callback_is_the_trainers(manager: Any) -> None:
    assert manager.add_callbacks_post_trainer(configured(manager, ottava_log=False), None) == []
    (callback,) = manager.add_callbacks_post_trainer(configured(manager), None)
    assert isinstance(callback, transformers.TrainerCallback)


@pytest.mark.slow
def test_axolotl_train_from_its_command_line(tmp_path: Path) -> None:
    """The example's own file, with a model and data of this disk: trains, logs, saves; what it saved loads in FP8."""
    for package in ("xformers", "trackio", "axolotl.cli.main"):
        pytest.importorskip(package, reason="Axolotl without its dependencies")
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *letters])}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(tmp_path / "model")
    llama(len(words), 256).save_pretrained(tmp_path / "model")
    lines = (json.dumps({"instruction": f"Add one to {i}.", "input": "", "output": str(i + 1)}) for i in range(64))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))

    settings = yaml.safe_load((ROOT / "examples" / "door_axolotl.yaml").read_text("utf-8"))
    settings = {key: value for key, value in settings.items() if "lora" not in key and key != "adapter"}
    settings |= {"base_model": str(tmp_path / "model"), "output_dir": str(tmp_path / "out"), "max_steps": 8}
    settings |= {"datasets": [{"path": str(tmp_path / "data.jsonl"), "ds_type": "json", "type": "alpaca"}]}
    settings |= {"bf16": False, "fp16": False, "ottava_recipe": "delayed", "logging_steps": 4, "sequence_len": 256}
    (tmp_path / "axolotl.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "axolotl.cli.main", "train", "axolotl.yaml", "--launcher", "python"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "out" / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    assert told[1]["loss"] < told[0]["loss"]
    assert 0 < told[1]["ottava/fp8_share"] < 1
    again, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values())
    assert {again.model.layers[1].mlp.up_proj.recipe.name, again.hf_quantizer.quantization_config.skip[0]} == {
        "delayed",
        "model.layers.0.*",
    }
