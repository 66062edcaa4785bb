"""What asks for CUDA gets the CPU, says what it cannot have, and torch is as before at the end."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.on_cpu import missing, on_cpu


def asked(device: str) -> list[Any]:
    """What scripts do with a device; CUDA's answers, or those of the CPU."""
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.manual_seed(3)
    else:
        torch.default_generator.manual_seed(3)
    kept = torch.get_rng_state()
    x = torch.randn(4, 8, device=device)
    made = [x, torch.zeros(2, device=torch.device(device)), torch.arange(3).to(device), x.new_ones(2, device=device)]
    with torch.device(device):
        made += [torch.ones(3), nn.Linear(8, 4)(x)]
    made += [torch.tensor([1.0], device=device), torch.empty_like(x, device=device).fill_(1.0), nn.ReLU().to(device)(x)]
    layer = te.Linear(8, 4, device=device)
    with torch.autocast(device, dtype=torch.bfloat16), te.fp8_autocast(enabled=True):
        made.append(layer(x))
    with torch.autocast(device, torch.float16):
        made.append(x @ x.t())
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    made.append(scaler.scale(x.sum()))
    torch.set_rng_state(kept)
    return [t.detach() for t in made]


def test_a_cuda_device_is_the_cpu() -> None:
    with on_cpu():
        found = asked("cuda")
    for mine, theirs in zip(found, asked("cpu"), strict=True):
        assert mine.device.type == "cpu"
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_questions_and_moves(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    with on_cpu():
        assert torch.cuda.is_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert torch.cuda.get_device_capability() >= (9, 0)
        assert torch.cuda.memory_allocated() == 0
        torch.cuda.synchronize()
        torch.cuda.set_device(0)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        with torch.cuda.stream(torch.cuda.Stream()) as stream:
            stream.wait_stream(torch.cuda.current_stream())
            layer = nn.Linear(4, 2).cuda().to(0)
        end.record()
        assert begin.elapsed_time(end) >= 0
        x = torch.ones(1, 4, device="cuda:0").pin_memory().cuda(non_blocking=True)
        torch.cuda.nvtx.range_push("forward")
        y = layer(x)
        torch.save({"y": y}, tmp_path / "y.pt")
        assert torch.equal(torch.load(tmp_path / "y.pt", map_location="cuda")["y"], y)
        torch.set_default_device("cuda")
        assert torch.ones(1).device.type == "cpu"
        torch.set_default_device(None)
        with torch.autocast("cuda"):  # CUDA's default dtype
            assert (x @ x.t()).dtype == torch.float16
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
        group = torch.distributed.new_group(backend="nccl")
        assert torch.distributed.get_backend() == torch.distributed.get_backend(group) == "gloo"
        torch.distributed.destroy_process_group()
    torch.set_rng_state(state)


def test_what_needs_a_gpu_is_named() -> None:
    with on_cpu():
        for call, name in ((torch.cuda.CUDAGraph, "CUDAGraph"), (torch.cuda.make_graphed_callables, "make_graphed")):
            with pytest.raises(RuntimeError, match=rf"torch\.cuda\.{name}.* needs a CUDA device; --cpu has nothing"):
                call()
        if not torch.backends.cuda.is_built():
            with pytest.raises((AssertionError, RuntimeError, AttributeError)) as failed:
                torch.cuda.get_device_properties(0)
            assert missing(failed.tb) in ("torch.cuda.get_device_properties", "torch.cuda._lazy_init")
        with pytest.raises(ZeroDivisionError) as own:
            1 / 0  # noqa: B018
        assert missing(own.tb) == ""


def test_torch_is_as_before_at_the_end() -> None:
    """Also after an error, and for torch's and ottava's own questions inside."""
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    load, start = torch.load, torch.autocast.__init__
    with contextlib.suppress(ZeroDivisionError), on_cpu():
        assert torch.cuda.is_available is not before["is_available"]
        asking = {"__name__": "torch.somewhere"}
        exec("import torch\nanswer = torch.cuda.is_available()", asking)
        assert asking["answer"] is False
        raise ZeroDivisionError
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert torch.load is load
    assert torch.autocast.__init__ is start
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.ones(1, device="cuda")
        with pytest.raises(RuntimeError, match="this machine has no CUDA device"):
            te.Linear(4, 4, device="cuda")
