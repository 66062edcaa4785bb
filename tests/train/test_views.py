"""What the words of `ottava eval` open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ottava.train.checkpoint import CheckpointError
from ottava.train.config import load_config
from ottava.train.data import DataError
from ottava.train.llama import open_view, texts_of
from ottava.train.loop import Trainer
from serving_samples import exported

TINY = ["model.d_model=64", "model.layers=1", "model.heads=2", "model.ffn=64", "sequence_length=16", "batch_size=2"]
TINY += ["data.max_bytes=100000", "evaluation.batches=1", "device=cpu"]


def test_a_run_computes_as_its_last_step_did(tmp_path: Path) -> None:
    """Its logits are those of the trainer's own model; under another recipe they start from the masters."""
    for recipe, more in (("delayed", []), ("blockwise", ["optimizer.weights=fp8", "optimizer.master=remainder"])):
        folder = tmp_path / recipe
        trainer = Trainer(load_config(None, [*TINY, f"recipe={recipe}", "steps=2", *more]), folder)
        trainer.advance()
        view = open_view(str(folder))
        ids = torch.arange(16).view(1, 16)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            wanted = trainer.model.eval()(ids).float()
        assert torch.equal(view.logits(ids), wanted), recipe
        assert view.casts_weights
        assert view.casts_activations
        plain = open_view(f"{folder}@bf16")
        assert not plain.casts_weights
        assert not torch.equal(plain.logits(ids), wanted)
        step = open_view(str(folder / "checkpoints" / "step-000002.safetensors"))
        assert torch.equal(step.logits(ids), wanted)
        with pytest.raises(ValueError, match="run ottava export first"):
            open_view(str(folder), "engine")


def test_bad_words_end_in_a_sentence(tmp_path: Path) -> None:
    folder = str(exported("bf16"))
    for given, recipe, error, words in (
        (str(tmp_path / "no"), None, CheckpointError, "does not exist"),
        (str(tmp_path), None, CheckpointError, "neither config.yaml"),
        (f"{folder}@bluewise", None, ValueError, "unknown recipe 'bluewise'"),
        (f"{folder}@rowwise", "mxfp8", ValueError, "name one recipe"),
        (f"{folder}@engine", None, ValueError, "no FP8 weights"),
    ):
        with pytest.raises(error, match=words):
            open_view(given, recipe)
    with pytest.raises(ValueError, match="recipe 'rowwise' cannot multiply its codes"):
        open_view(str(exported("compressed-tensors-tensor")), "rowwise")
    odd = tmp_path / "a@b"
    Path(folder).rename(odd)
    assert open_view(str(odd)).longest == 32  # a path may hold an @
    with pytest.raises(DataError, match="cannot be read"):
        texts_of([tmp_path / "no.txt"])
    (tmp_path / "t.txt").write_text("text")
    assert texts_of([tmp_path / "t.txt"]) == {str(tmp_path / "t.txt"): "text"}
    assert len(texts_of(())["held-out text"]) > 100_000
