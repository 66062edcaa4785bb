"""A run of the trainer becomes a Llama: its tensors by name, its casts, and with transformers its logits to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ottava.cli.app import app
from ottava.serving.export import export
from ottava.train.checkpoint import CheckpointError
from ottava.train.config import ModelConfig
from ottava.train.llama import as_llama, of_run
from ottava.train.model import ByteTransformer

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
    sizes = [f"model.{name}={value}" for name, value in SMALL.items()]
    words = ["steps=3", f"recipe={recipe}", "sequence_length=32", "batch_size=2", *sizes]
    arguments = ["train", "--run-dir", str(tmp_path / "run")]
    for word in words:
        arguments += ["--set", word]
    assert app(arguments, standalone_mode=False) in (0, None)
    source = of_run(tmp_path / "run")
    assert len(source.weights) == 2 + 1 + 2 * 9
    assert app(["export", str(tmp_path / "run"), str(tmp_path / "out"), "-l", layout], standalone_mode=False) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_folder_without_a_run_ends_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.yaml"):
        of_run(tmp_path)
