"""accelerate: convert before `prepare`; `save_state` and `load_state` keep everything, also of sharded models."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from hf_samples import copied, losses_of, made, same
from ottava.engine.functional import quantized_layers
from ottava.optim import AdamW

accelerate = pytest.importorskip("accelerate")
door = pytest.importorskip("ottava.doors.accelerate")


@pytest.fixture
def accelerator() -> Any:
    return accelerate.Accelerator(cpu=True)


def train(accelerator: Any, model: Any, optimizer: Any, first: int) -> list[float]:
    return losses_of(model, optimizer, range(first, first + 3), accelerator.backward)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize(("recipe", "weights"), [("delayed", None), ("delayed", "fp8"), ("mxfp8", "fp8")])
def test_a_state_is_whole(recipe: str, weights: Any, safe: bool, accelerator: Any, tmp_path: Path) -> None:
    """Trap 2: histories were views of shared storages, and 160 of 189 tensors were lost without a word."""
    model = made()
    model = door.prepare(accelerator, model, recipe=recipe, weights=weights)
    plain: Any = torch.optim.SGD(model.parameters(), 0.05)
    optimizer = AdamW(model.parameters(), lr=1e-3, master="fp32") if weights else accelerator.prepare(plain)
    optimizer = accelerator.prepare(optimizer) if weights else optimizer
    train(accelerator, model, optimizer, 0)
    accelerator.save_state(tmp_path, safe_serialization=safe)
    before = copied(model.state_dict())
    if safe:
        assert safetensors.torch.load_file(tmp_path / "model.safetensors").keys() == before.keys()
    first = train(accelerator, model, optimizer, 3)
    assert not same(before, model.state_dict())
    accelerator.load_state(tmp_path)
    assert same(before, model.state_dict())
    assert train(accelerator, model, optimizer, 3) == first


def test_an_optimizer_made_before_still_steps_the_model(accelerator: Any) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = door.prepare(accelerator, model, optimizer, recipe="tensorwise")
    assert len(quantized_layers(model)) == 14
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    train(accelerator, model, optimizer, 0)
    assert not torch.equal(before, model.model.layers[0].mlp.up_proj.weight)


def test_fp8_of_accelerate_itself_gets_the_line_to_write(accelerator: Any) -> None:
    other = accelerate.Accelerator.__new__(accelerate.Accelerator)
    other.state = type("State", (), {"mixed_precision": "fp8"})()
    line = r"prepare\(Accelerator\(mixed_precision='bf16'\), model, ..., recipe='mxfp8'\)"
    with pytest.raises(ValueError, match=line):
        door.prepare(other, made(), recipe="mxfp8")
    with pytest.raises(TypeError, match=r"prepare: got a LlamaForCausalLM; needs an accelerate.Accelerator"):
        door.prepare(made(), accelerator)
    model = door.prepare(accelerator, made())
    with pytest.raises(ValueError, match="is under ottava's recipe 'tensorwise' already"):
        door.prepare(accelerator, model)


@pytest.mark.parametrize(
    ("recipe", "weights", "on_meta"),
    [("delayed", "bf16", "meta"), ("delayed", "bf16", "cpu"), ("tensorwise", "fp8", "cpu")],
)
def test_a_sharded_state_is_whole(recipe: str, weights: str, on_meta: str, tmp_path: Path) -> None:
    """FSDP2 on two ranks. accelerate sends every entry of a model on meta as a parameter; histories stay out."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", port]
    script = str(Path(__file__).with_name("accelerate_ranks.py"))
    arguments = [script, str(tmp_path), recipe, weights, on_meta]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert told["kind"].startswith("FSDP")
    assert told["again"] == told["first"]
    assert told["early"][0] != told["first"][0]
