"""The optimizer of a run: the default's bits, every option killed and resumed."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ottava.optim import AdamW, Muon
from ottava.train.checkpoint import newest_checkpoint
from ottava.train.config import TrainConfig, load_config
from ottava.train.loop import Trainer
from ottava.train.run_folder import StepRecord
from ottava.weights.parameter import is_quantized_weight

TINY = (
    "model={d_model: 32, layers: 1, heads: 2, kv_heads: 1, ffn: 48}",
    "data.max_bytes=200000",
    "batch_size=2",
    "sequence_length=32",
    "steps=6",
    "checkpoint.every=2",
    "evaluation={every: 0, batches: 1}",
)
STORED = ("optimizer.weights=fp8", "optimizer.master=remainder", "optimizer.moments=fp8")
OPTIONS = (
    ("optimizer.weights=bf16", "optimizer.master=fp32", "optimizer.moments=bf16"),
    ("optimizer.weights=bf16", "optimizer.master=remainder", "optimizer.moments=fp8", "recipe=delayed"),
    ("optimizer.weights=bf16", "optimizer.stochastic_rounding=true", "optimizer.moments=int8"),
    ("optimizer.weights=bf16", "recipe=rowwise"),
    ("optimizer.weights=fp8", "optimizer.master=fp32"),
    ("optimizer.weights=fp8", "optimizer.master=remainder", "recipe=mxfp8"),
    ("optimizer.weights=fp8", "optimizer.master=fp32", "optimizer.amax_every=3", "recipe=delayed"),
    ("optimizer.weights=fp8", "optimizer.master=remainder", "optimizer.moments=bf16", "optimizer.amax_every=4"),
    (*STORED, "recipe=delayed"),
    (*STORED, "recipe=blockwise"),
    ("optimizer.moments=fp8", "recipe=bf16"),
    ("optimizer.name=lion", "optimizer.moments=fp8"),
    ("optimizer.name=sgd", "optimizer.moments=int8", "optimizer.learning_rate=0.1"),
    ("optimizer.name=muon", "optimizer.moments=int8", *STORED[:2]),
)


def tiny(*overrides: str) -> TrainConfig:
    return load_config(None, [*TINY, *overrides])


def curve(history: list[StepRecord]) -> list[StepRecord]:
    return [replace(record, seconds=0.0) for record in history]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def saved(run: Path) -> dict[str, torch.Tensor]:
    checkpoint, _ = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    return dict(checkpoint.tensors)


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.slow
def test_every_option_survives_kill_9_bit_for_bit(tmp_path: Path) -> None:
    """A fork of this process trains and is killed between two checkpoints; this process continues the run."""
    for number, options in enumerate(OPTIONS):
        config = tiny(*options)
        whole, run = tmp_path / f"whole{number}", tmp_path / f"run{number}"
        expected = Trainer(config, whole).advance()
        child = os.fork()
        if not child:
            Trainer(config, run).advance(3)
            os.kill(os.getpid(), 9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
        resumed = Trainer(config, run, resume=True)
        assert resumed.step == 2, options
        resumed.advance()
        assert curve(resumed.history) == curve(expected), options
        ends = saved(whole), saved(run)
        assert ends[0].keys() == ends[1].keys()
        for name, tensor in ends[0].items():
            assert torch.equal(bits(tensor), bits(ends[1][name])), (options, name)
        for parameter in resumed.model.parameters():
            assert getattr(parameter, "high_precision", None) is None, "a master has taken its place"


def test_the_default_is_torchs_fused_adamw(tmp_path: Path) -> None:
    """Its bits are those of runs before there was a choice; a setting at its default leaves the digest as it was."""
    trainer = Trainer(tiny(), tmp_path / "run")
    assert type(trainer._optimizer) is torch.optim.AdamW
    assert trainer._optimizer.param_groups[0]["fused"] is True
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["optimizer"] == "torch.optim.adamw.AdamW"
    digests = {tiny(*options).digest() for options in ((), ("optimizer.momentum=0.95",), ("rewarm=0",))}
    assert len(digests) == 1
    assert tiny("optimizer.moments=bf16").digest() not in digests


def test_settings_make_what_they_say(tmp_path: Path) -> None:
    trainer = Trainer(tiny(*STORED, "recipe=delayed"), tmp_path / "a")
    trainer.advance(2)
    trainer.close()
    assert isinstance(trainer._optimizer, AdamW)
    dtypes = {name: p.dtype for name, p in trainer.model.named_parameters()}
    assert set(dtypes.values()) == {torch.bfloat16}
    stored = [name for name, p in trainer.model.named_parameters() if is_quantized_weight(p)]
    assert stored == [f"{name}.weight" for name in trainer.conversion.converted]
    muon = Trainer(tiny("optimizer.name=muon"), tmp_path / "b")
    muon.close()
    assert isinstance(muon._optimizer, Muon)
    inner, ends, gains = muon._optimizer.param_groups
    assert [group["adamw"] for group in (inner, ends, gains)] == [False, True, True]
    assert {tuple(p.shape) for p in ends["params"]} == {(256, 32)}
