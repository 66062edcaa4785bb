"""The byte model: size, causality, the same as in plain torch, initial weights."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch

from ottava.bench.models import PlainByteTransformer
from ottava.optim import AdamW, Muon
from ottava.train.checkpoint import _renamed, newest_checkpoint
from ottava.train.config import ModelConfig
from ottava.train.loop import Trainer
from ottava.train.model import ByteTransformer, loss
from ottava.weights.parameter import is_quantized_weight
from train_samples import SHORT, STORED, curve, tiny

SMALL = ModelConfig(d_model=32, layers=2, heads=4, kv_heads=2, ffn=48)


def build(config: ModelConfig = SMALL, length: int = 24) -> ByteTransformer:
    torch.manual_seed(0)
    return ByteTransformer(config, length)


def test_state_dict_holds_parameters_only() -> None:
    model = build()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert model.lm_head.weight is not model.embedding.weight


@pytest.mark.parametrize("autocast", [False, True])
def test_it_is_the_same_model_as_in_plain_torch(autocast: bool) -> None:
    """The same initial weights; logits to the bit, and gradients up to the rounding of a norm's backward.

    That is one of fp32, or of BF16 (2**-9 of a number) in front of a GEMM under autocast, in 2 blocks.
    """
    model = build()
    torch.manual_seed(0)
    plain = PlainByteTransformer(SMALL, 24)
    ids = torch.randint(0, 256, (2, 25))
    moved = {_renamed(f".{name}")[1:]: name for name in plain.state_dict()}
    assert set(moved) == set(model.state_dict())
    for name, before in moved.items():
        assert torch.equal(model.state_dict()[name], plain.state_dict()[before]), name
    for net in (model, plain):
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.ndim == 1:
                    parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss(net, ids[:, :-1], ids[:, 1:]).backward()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(model(ids[:, :24]), plain(ids[:, :24]))
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        expected = grads[moved[name]]
        assert parameter.grad is not None
        assert expected is not None
        assert parameter.grad.abs().max() > 0, name
        assert (parameter.grad - expected).norm() <= (2**-7 if autocast else 2**-20) * expected.norm(), name


def test_matrices_start_at_one_over_root_width_and_those_that_write_to_the_stream_smaller() -> None:
    """1 / sqrt(128) = 0.088; over sqrt(2 * 5 layers): 0.028."""
    model = build(ModelConfig(), 8)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.0884 / math.sqrt(10) if writes else 0.0884
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


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


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def saved(run: Path) -> dict[str, torch.Tensor]:
    checkpoint, _ = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    return dict(checkpoint.tensors)


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_every_option_survives_kill_9_bit_for_bit(tmp_path: Path) -> None:
    """A fork of this process trains and is killed between two checkpoints; this process continues the run."""
    for number, options in enumerate(OPTIONS):
        config = tiny(*SHORT, *options)
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
    trainer = Trainer(tiny(*SHORT), tmp_path / "run")
    assert type(trainer._optimizer) is torch.optim.AdamW
    assert trainer._optimizer.param_groups[0]["fused"] is True
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["optimizer"] == "torch.optim.adamw.AdamW"
    digests = {tiny(*SHORT, *options).digest() for options in ((), ("optimizer.momentum=0.95",), ("rewarm=0",))}
    assert len(digests) == 1
    assert tiny(*SHORT, "optimizer.moments=bf16").digest() not in digests


def test_settings_make_what_they_say(tmp_path: Path) -> None:
    trainer = Trainer(tiny(*SHORT, *STORED, "recipe=delayed"), tmp_path / "a")
    trainer.advance(2)
    trainer.close()
    assert isinstance(trainer._optimizer, AdamW)
    dtypes = {name: p.dtype for name, p in trainer.model.named_parameters()}
    assert set(dtypes.values()) == {torch.bfloat16}
    stored = [name for name, p in trainer.model.named_parameters() if is_quantized_weight(p)]
    assert stored == [f"{name}.weight" for name in trainer.conversion.converted]
    muon = Trainer(tiny(*SHORT, "optimizer.name=muon"), tmp_path / "b")
    muon.close()
    assert isinstance(muon._optimizer, Muon)
    inner, ends, gains = muon._optimizer.param_groups
    assert [group["adamw"] for group in (inner, ends, gains)] == [False, True, True]
    assert {tuple(p.shape) for p in ends["params"]} == {(256, 32)}
