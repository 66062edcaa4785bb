"""A run of the trainer becomes a Llama: its tensors by name, its casts, and with transformers its logits to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ottava.base.settings import ConfigError
from ottava.nn.convert import convert
from ottava.serving.export import export
from ottava.serving.source import of_folder
from ottava.train.checkpoint import CheckpointError
from ottava.train.config import ModelConfig, load_config
from ottava.train.llama import as_llama, is_weights, model_of, of_run, read_weights, settings_of
from ottava.train.loop import Trainer
from ottava.train.model import ByteTransformer
from ottava.weights.layouts import LAYOUTS
from ottava.weights.parameter import QuantizedWeight
from serving_samples import CONFIG, LENGTH, TEXT, exported, learned
from train_samples import tiny

SMALL = {"d_model": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128}


def test_logits_of_transformers_are_ours_to_the_bit(tmp_path: Path) -> None:
    """In fp32, with weights that BF16 represents."""
    transformers = pytest.importorskip("transformers")
    config = ModelConfig(**SMALL)
    torch.manual_seed(0)
    model = ByteTransformer(config, 64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    export(as_llama(model, config, 64), tmp_path / "out", layout="bf16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.randint(0, 256, (2, 48))
    with torch.no_grad():
        assert torch.equal(model(ids), theirs(ids).logits)


@pytest.mark.parametrize(("recipe", "layout"), [("delayed", "modelopt"), ("rowwise", "compressed-tensors-channel")])
def test_a_run_is_exported_with_the_codes_of_its_last_step(recipe: str, layout: str, tmp_path: Path) -> None:
    """q, k and v were one linear in training, so they share its scale."""
    Trainer(tiny("steps=3", f"recipe={recipe}"), tmp_path / "run").advance()
    source = of_run(tmp_path / "run")
    assert len(source.weights) == 2 + 1 + 9
    report = export(source, tmp_path / "out", layout=layout)
    assert {one.name: one.as_trained for one in report.linears if not one.as_trained} == {"lm_head": None}
    assert len(report.linears) == 8


def test_a_folder_without_a_run_ends_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.yaml"):
        of_run(tmp_path)


def test_every_layout_comes_back_as_codes_and_as_numbers() -> None:
    """The codes of each joined linear are those that stand in the folder; without codes its numbers are BF16's."""
    plain = dict(learned().named_parameters())
    for layout, form in LAYOUTS.items():
        if form.static:
            continue
        folder = exported(layout)
        source = of_folder(folder)
        casts = {weight.module: weight.cast for weight in source.weights}
        tensors = {weight.name: weight.tensor for weight in source.weights}
        model, longest = model_of(source, folder, None)
        assert longest == LENGTH
        up = model.get_submodule("layers.1.mlp.gate_up_proj").weight
        values = torch.cat([tensors[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up")])
        if form.spec is None:
            assert torch.equal(up, plain["layers.1.mlp.gate_up_proj.weight"].bfloat16().float())
        else:
            assert isinstance(up, QuantizedWeight), layout
            cast = casts["model.layers.1.mlp.up_proj"]
            assert cast is not None
            assert torch.equal(up.quantized().data[-128:].view(torch.uint8), cast.data.view(torch.uint8))
            assert torch.equal(up.quantized().dequantize(torch.float32), values)
        read = read_weights(folder, CONFIG).tensors
        assert torch.equal(read["model.layers.1.mlp.gate_up_proj.weight"], values.float())
        assert torch.equal(read["model.lm_head.weight"], plain["lm_head.weight"].bfloat16().float())


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    folder = exported("bf16")
    path = folder / "config.json"
    tree = json.loads(path.read_text())
    for change, words in (
        ({"model_type": "gemma2"}, "model_type is 'gemma2', and the model of `ottava train` has 'llama'"),
        ({"vocab_size": 32000}, "vocab_size is 32000"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_scaling is 'yarn'"),
        ({"hidden_size": None}, "does not describe a Llama"),
        ({"head_dim": 7}, "head_dim 7 x 2 heads"),
        ({"intermediate_size": 64}, "another model; it needs --set model.ffn=64"),
    ):
        path.write_text(json.dumps(tree | change))
        with pytest.raises(CheckpointError, match=words):
            read_weights(folder, CONFIG)
    for layers, words in ((3, r"lacks model\.layers\.2"), (1, r"holds model\.layers\.1")):
        path.write_text(json.dumps(tree | {"num_hidden_layers": layers}))
        with pytest.raises(CheckpointError, match=words):
            read_weights(folder, CONFIG.model_copy(update={"layers": layers}))
    for change, words in (  # refused before memory is asked for
        ({"num_hidden_layers": 1 << 31}, "tensors; its config says 2147483648 layers"),
        ({"intermediate_size": 1 << 31}, "intermediate_size is 2147483648; needs 1 to 1,048,576"),
        ({"intermediate_size": 1 << 20}, "shape .*; its config.json needs .*2097152"),
        ({"max_position_embeddings": 1e308}, "max_position_embeddings is 1e"),
        ({"max_position_embeddings": -32}, "max_position_embeddings is -32"),
    ):
        path.write_text(json.dumps(tree | change))
        with pytest.raises(CheckpointError, match=words):
            model_of(of_folder(folder), folder, None)
    del tree["hidden_size"]
    with pytest.raises(CheckpointError, match="has no 'hidden_size'"):
        settings_of(tree, folder)
    path.write_text(json.dumps(tree | {"hidden_size": 128, "intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"its config\.json needs"):
        model_of(of_folder(folder), folder, None)
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_weights(folder, CONFIG)
    assert is_weights(folder)
    assert not is_weights(tmp_path)


def test_a_run_starts_from_every_folder_and_takes_a_step(tmp_path: Path) -> None:
    """Its weights are those of the folder: numbers bit for bit, and under the recipe of the codes the codes."""
    sizes = [f"model.{key}={value}" for key, value in CONFIG.model_dump(exclude={"rope_theta", "norm_eps"}).items()]
    words = [
        *sizes,
        f"sequence_length={LENGTH}",
        "batch_size=2",
        "steps=1",
        f"data.path={tmp_path / 'text'}",
        "device=cpu",
    ]
    (tmp_path / "text").write_text(TEXT)
    words += ["evaluation.batches=1", f"data.path={tmp_path / 'text'}"]
    fp8 = ["recipe=blockwise", "optimizer.weights=fp8", "optimizer.master=remainder"]
    for layout, more in (
        ("bf16", ["recipe=tensorwise"]),
        ("compressed-tensors-channel", ["recipe=bf16"]),
        ("compressed-tensors-mxfp8", ["recipe=mxfp8"]),
        ("fp8-block-ue8m0", fp8),
    ):
        folder = exported(layout)
        wanted = read_weights(folder, CONFIG).tensors
        config = load_config(None, [*words, f"init={folder}", *more])
        trainer = Trainer(config, tmp_path / layout)
        for name, parameter in trainer.model.named_parameters():
            if isinstance(parameter, QuantizedWeight):
                codes, _ = model_of(of_folder(folder), folder, None)
                assert torch.equal(
                    parameter.dequantize(torch.float32),
                    codes.get_parameter(name).quantized().dequantize(torch.float32),  # type: ignore[attr-defined]
                )
            else:
                assert torch.equal(parameter.float(), wanted[f"model.{name}"].to(parameter.dtype).float()), name
        assert any(isinstance(one, QuantizedWeight) for one in trainer.model.parameters()) == (more is fp8)
        (record,) = trainer.advance()
        assert record.loss < 2  # a new model begins at 5.5
    with pytest.raises(ConfigError, match="holds weights alone"):
        Trainer(load_config(None, [*words, f"init={folder}", "carry=optimizer"]), tmp_path / "on")


def test_the_joined_file_of_a_checkpoint_is_read_with_its_codes(tmp_path: Path) -> None:
    """As `ottava consolidate` writes it: own names, codes with scales, states of doors."""
    model = learned()
    convert(model, "delayed", weights="fp8")
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    tensors = read_weights(tmp_path, CONFIG).tensors
    assert {name.removeprefix("model.") for name in tensors} == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        values = (
            parameter.quantized().dequantize(torch.float32) if isinstance(parameter, QuantizedWeight) else parameter
        )
        assert torch.equal(tensors[f"model.{name}"], values), name
