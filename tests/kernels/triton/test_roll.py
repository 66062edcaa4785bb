"""The boundary by one launch against that of torch operations, bit by bit; on a GPU with -m gpu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ottava.engine.quantizer import Quantizer
from ottava.engine.state import roll_windows
from ottava.kernels.triton import quantize as triton_quantize
from ottava.kernels.triton import step as triton_step
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.tensor import QuantizationSpec
from scaling_samples import BUFFERS
from sweep import sweep
from triton_mode import DEVICE, ON_GPU, never_waits, with_triton

pytestmark = with_triton()

DELAYED = QuantizationSpec(E4M3, scaling="delayed", amax_history_len=4)
SPECS = [
    DELAYED,
    replace(DELAYED, amax_compute_algo="most_recent"),
    replace(DELAYED, scale_format="pow2", margin=2),
    replace(DELAYED, format=E5M2, amax_history_len=1),
    replace(DELAYED, scaling="guarded", amax_history_len=300),
    replace(DELAYED, bootstrap=False, amax_history_len=1024),
]
AMAXES = (1.0, 0.0, 448.0, 3.0e38, 1e-45, 1e-38, 0.3, 7.0)


def with_triton(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    monkeypatch.setattr(triton_step, "supports_roll", lambda *_: None if wanted else "not wanted in this pass")


def prepared(specs: list[QuantizationSpec | None]) -> list[Quantizer]:
    """Doors, some without state, with something in every buffer."""
    doors = [Quantizer() for _ in specs]
    for door, spec in zip(doors, specs, strict=True):
        if spec is None:
            continue
        door.prepare(spec, DEVICE)
        door.amax_history.copy_(torch.rand(spec.amax_history_len) * (torch.rand(spec.amax_history_len) > 0.2))
        door.scale.fill_(3.0)
        door.nonfinite_count.fill_(2**40)
        door.staged.copy_(torch.tensor([2.0, 1.0, 1.0]))
    return doors


def lanes_of(count: int, step: int) -> Tensor:
    """Every kind of amax, doors that are not due, counts."""
    due = (torch.rand(count) > 0.3).float()
    amax = torch.tensor([AMAXES[(step + i) % len(AMAXES)] for i in range(count)])
    return (torch.stack([amax, (torch.rand(count) > 0.5).float(), (torch.rand(count) > 0.5).float(), due]) * due).to(
        DEVICE
    )


def bits(doors: list[Quantizer]) -> list[Any]:
    return [getattr(door, name).cpu().clone() for door in doors if door.spec for name in (*BUFFERS, "staged")]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec}, {spec.amax_history_len}")
def test_windows_scales_and_counts_have_the_bits_of_torch_operations(
    spec: QuantizationSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle, tiny, huge and ordinary amaxes; doors that are not due; twelve boundaries."""
    results = []
    for wanted in (False, True):
        torch.manual_seed(0)
        with_triton(monkeypatch, wanted)
        doors, seen = prepared([spec, None, spec, spec, spec]), []
        for step in range(12):
            roll_windows(doors, lanes_of(5, step))
            seen += bits(doors)
        results.append(seen)
    assert len(results[0]) == 12 * 4 * 5
    assert all(map(torch.equal, *results))


@sweep(spec=SPECS[:3] + [replace(DELAYED, scaling="guarded")], value=["nan", "inf", "-inf"])
def test_what_is_not_finite_is_counted_and_enters_no_window(spec: QuantizationSpec, value: str) -> None:
    """From the cast that stages it to the boundary: only what was finite in that step enters; the scale is finite."""
    for finite in ([], [2.0]):
        with pytest.MonkeyPatch.context() as patch:
            with_triton(patch, True)
            (door,) = prepared([spec])
            before, counted = door.amax_history.clone(), int(door.nonfinite_count)
            door.staged.zero_()
            for number in (*finite, float(value)):
                x = torch.full((3, 5), number, device=DEVICE)
                triton_quantize.quantize_both(x, spec, spec, door.scale, door.staged)
            assert door.staged.tolist()[:2] == [sum(finite), 1]
            roll_windows([door], torch.cat([door.staged, torch.ones(1, device=DEVICE)])[:, None])
        assert int(door.nonfinite_count) == counted + 1
        window = torch.cat([torch.tensor(finite, device=DEVICE), before])[: len(before)]
        assert torch.equal(door.amax_history, window)
        assert door.scale.isfinite()


def test_one_launch_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of tensors; and every tensor of the other spec as well."""
    with_triton(monkeypatch, True)
    launches: list[Any] = []
    original = triton_step.roll
    monkeypatch.setattr(triton_step, "roll", lambda *a: launches.append(a) or original(*a))
    doors = prepared([SPECS[0], SPECS[3]] * 20)
    roll_windows(doors, torch.ones(4, 40, device=DEVICE))
    assert [call[3].shape for call in launches] == [(20, 4), (20, 1)]
    assert all(float(door.scale) == (448.0 if door.spec == SPECS[0] else 57344.0) for door in doors)


def test_memory_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph needs: a boundary writes to the same addresses every time."""
    with_triton(monkeypatch, True)
    doors = prepared([DELAYED] * 3)
    roll_windows(doors, torch.ones(4, 3, device=DEVICE))
    before = [getattr(door, name).data_ptr() for door in doors for name in (*BUFFERS, "staged")]
    roll_windows(doors, torch.ones(4, 3, device=DEVICE))
    assert [getattr(door, name).data_ptr() for door in doors for name in (*BUFFERS, "staged")] == before


def test_refusals_say_why() -> None:
    """Device, function of the window, length, place, and a tensor without memory, as planners of memory make them."""
    ask = triton_step.supports_roll
    lanes, history = torch.zeros(4, 2), torch.zeros(2, 4)
    assert ask(DELAYED, history, lanes) == "triton: runs on cuda; got cpu"
    with FakeTensorMode():
        there, wide = torch.zeros(2, 4, device="cuda"), torch.zeros(2, 5000, device="cuda")
        mine = replace(DELAYED, amax_compute_algo=torch.mean)
        assert ask(mine, there, there) == "triton: takes the largest amax or the last one; got a function of the window"
        assert ask(DELAYED, wide, there) == "triton: takes windows of up to 4096 steps; got 5000"
        assert "triton: the amaxes are on cpu and the windows on cuda" in str(ask(DELAYED, there, torch.zeros(4, 2)))
        assert "triton: takes plain tensors; got a FakeTensor" in str(ask(DELAYED, there, there))


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_boundary_can_be_captured_in_a_graph() -> None:
    """Replayed with other amaxes it gives their scales, and nothing waits for the device."""
    doors = prepared([DELAYED] * 3)
    lanes = torch.ones(4, 3, device=DEVICE)
    roll_windows(doors, lanes)
    with never_waits():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            roll_windows(doors, lanes)
    for amax in (2.0, 4.0, 8.0):
        lanes[0].fill_(amax)
        graph.replay()
        assert all(float(door.scale) == 448.0 / amax for door in doors)
        assert all(float(door.amax_history[0]) == amax for door in doors)
