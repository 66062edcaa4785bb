"""The file of recorded amaxes: every fp32 number survives, a killed run loses at most one line, damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ottava
import warm
from ottava.numerics.tensor import QuantizationSpec
from ottava.record.amaxes import AmaxLog, RecordedTensor, Recording, RecordingError, Setting, read_series

DELAYED = QuantizationSpec(ottava.E4M3, scaling="delayed", amax_history_len=4, margin=1)
GRADIENTS = QuantizationSpec(ottava.E5M2, scaling="guarded", scale_format="pow2", guard_bits=2)


def row(*amaxes: float) -> list[tuple[str, str, QuantizationSpec, float]]:
    names = [("fc1", "input", DELAYED), ("fc1", "grad_output", GRADIENTS)]
    return [(*name, amax) for name, amax in zip(names, amaxes, strict=True)]


def record(folder: Path, steps: int = 4) -> Path:
    log = AmaxLog(folder)
    for step in range(1, steps + 1):
        log.append(step, row(step / 3, 0.0))
    return log.path


def test_every_fp32_number_survives(tmp_path: Path) -> None:
    """Random bits: normal, subnormal and the largest numbers."""
    bits = torch.randint(0, 0x7F800000, (500,), dtype=torch.int32)
    numbers = torch.cat([bits.view(torch.float32), torch.tensor([0.0, 1e-45, torch.finfo(torch.float32).max])])
    log = AmaxLog(tmp_path)
    for step, number in enumerate(numbers.tolist()):
        log.append(step, row(number, 0.0))
    found = read_series(tmp_path)
    assert torch.equal(found.amax[:, 0], numbers)
    assert found.amax.dtype == torch.float32
    assert found.steps == tuple(range(503))


def test_header_holds_what_a_replay_needs(tmp_path: Path) -> None:
    record(tmp_path)
    first, second = read_series(tmp_path).tensors
    assert first == RecordedTensor("fc1", "input", ottava.E4M3, "fp32", 3, Setting(4, "max", 1))
    assert second == RecordedTensor("fc1", "grad_output", ottava.E5M2, "pow2", 2, Setting(16, "max", 0))
    header = json.loads((tmp_path / "amax.jsonl").read_text().splitlines()[0])
    assert header["schema_version"] == 1
    assert header["tensors"][0]["format"] == "E4M3"


def test_header_needs_no_more_than_names_and_formats(tmp_path: Path) -> None:
    """What another program would write."""
    lines = [
        {"schema_version": 1, "tensors": [{"layer": "fc1", "tensor": "input", "format": "E4M3"}]},
        {"step": 10, "amax": [1.5]},
        {"step": 20, "amax": [2]},
    ]
    (tmp_path / "amax.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_series(tmp_path)
    assert found.tensors == (RecordedTensor("fc1", "input", ottava.E4M3),)
    assert (found.steps, found.amax.tolist(), found.setting) == ((10, 20), [[1.5], [2.0]], None)


def test_function_as_algorithm_is_recorded_as_unknown(tmp_path: Path) -> None:
    spec = QuantizationSpec(ottava.E4M3, scaling="delayed", amax_compute_algo=torch.median)
    AmaxLog(tmp_path).append(1, [("fc1", "input", spec, 1.0)])
    assert read_series(tmp_path).setting is None


@pytest.mark.parametrize("torn", [b'{"step": 5', b'{"step": 5, "amax": [1.0, 2.0]}', b"\x00"])
def test_torn_last_line_is_passed_over_and_cut_on_resumption(torn: bytes, tmp_path: Path) -> None:
    path = record(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert read_series(tmp_path).steps == (1, 2, 3, 4)
    AmaxLog(tmp_path, step=4).append(5, row(5.0, 0.0))
    assert read_series(tmp_path).steps == (1, 2, 3, 4, 5)
    assert path.read_bytes().startswith(whole)


def test_resumed_run_writes_the_file_of_the_uninterrupted_one(tmp_path: Path) -> None:
    """Killed after step 4 with a checkpoint of step 2."""
    for name, stops in (("whole", [5]), ("resumed", [4, 5])):
        (tmp_path / name).mkdir()
        begin = 0
        for stop in stops:
            log = AmaxLog(tmp_path / name, step=begin)
            for step in range(begin + 1, stop + 1):
                log.append(step, row(step / 7, step))
            begin = 2
    assert (tmp_path / "whole" / "amax.jsonl").read_bytes() == (tmp_path / "resumed" / "amax.jsonl").read_bytes()


def test_run_without_a_checkpoint_starts_the_file_anew(tmp_path: Path) -> None:
    record(tmp_path)
    AmaxLog(tmp_path, step=0).append(1, row(9.0, 9.0))
    assert read_series(tmp_path).amax.tolist() == [[9.0, 9.0]]


def test_other_tensors_than_before_are_refused(tmp_path: Path) -> None:
    log = AmaxLog(tmp_path)
    log.append(1, row(1.0, 1.0))
    changed = [("fc1", "input", DELAYED, 1.0)]
    for writer in (log, AmaxLog(tmp_path, step=1)):
        with pytest.raises(ValueError, match="step 2 has other tensors or settings"):
            writer.append(2, changed)
    assert read_series(tmp_path).steps == (1,)


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_amax_that_is_none_is_refused(bad: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="negative or not finite"):
        AmaxLog(tmp_path).append(1, row(1.0, bad))
    with pytest.raises(ValueError, match="negative or not finite"):
        Recording.of({"fc.input": ("E4M3", [1.0, bad])})


def test_series_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"series of \[1, 2\] steps"):
        Recording.of({"a.input": ("E4M3", [1.0]), "b.input": ("E4M3", [1.0, 2.0])})


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


@pytest.mark.parametrize(
    "harm, said",
    [
        (lambda text: "", "is empty"),
        (lambda text: "training went well\n" + text, "its first line is not the header"),
        (lambda text: "[]\n", "its first line is not the header"),
        (replaced('"format": "E4M3"', '"format": "E9M9"'), "its first line is not the header"),
        (replaced('"margin": 1', '"margins": 1'), "its first line is not the header"),
        (replaced('"schema_version": 1', '"schema_version": 2'), "has schema_version 2; this ottava reads 1"),
        (replaced('"step": 2', '"stop": 2'), "line 3 is no step of a recording"),
        (replaced('"step": 2, ', '"step": 2 '), "line 3 is no step of a recording"),
        (replaced('"step": 2', '"step": 1'), "line 3 is step 1, after step 1"),
        (replaced("[0.666666667, 0]", "[0.666666667]"), "line 3 has 1 numbers for the 2 tensors"),
        (replaced("[0.666666667, 0]", "[0.666666667, -1]"), "line 3 has an amax that is negative or not finite"),
        (replaced("[0.666666667, 0]", "[0.666666667, 1e60]"), "line 3 has an amax that is negative or not finite"),
    ],
)
def test_damage_is_named_with_its_line(harm: Callable[[str], str], said: str, tmp_path: Path) -> None:
    path = record(tmp_path)
    whole = path.read_text()
    path.write_text(harm(whole))
    assert path.read_text() != whole
    with pytest.raises(RecordingError) as caught:
        read_series(tmp_path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 4


def test_missing_recording_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="only runs whose recipe predicts scales"):
        read_series(tmp_path)


@pytest.mark.parametrize("bad", [{"amax_history_len": 0}, {"amax_history_len": 4, "amax_compute_algo": "maxx"}])
def test_setting_refuses_what_no_spec_offers(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"amax_history_len|did you mean 'max'"):
        Setting(**bad)  # type: ignore[arg-type]


# --- what the scaling state hands over --------------------------------------------------------------------------------


def two_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).bfloat16()
    ottava.convert(model, "delayed")
    return model


def run(model: nn.Sequential, size: float, *, layers: int = 2) -> None:
    model[:layers](torch.full((4, 64), size, dtype=torch.bfloat16)).sum().backward()


def inputs(state: ottava.ScalingState) -> dict[str, float]:
    return {door.layer: door.amax for door in state.take_amax() if door.tensor == "input"}


def test_amaxes_of_a_step_are_those_that_entered_the_windows() -> None:
    model = two_layers()
    state, optimizer = ottava.ScalingState(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for size in (3.0, 2.0):
        run(model, size)
        run(model, size / 2)  # a second micro-batch
        optimizer.step()
        taken = state.take_amax()
        assert [(door.layer, door.tensor) for door in taken] == [
            (layer, tensor) for layer in "01" for tensor in ("input", "weight", "grad_output")
        ]
        for door in taken:
            quantizer = model[int(door.layer)].quantizers.get_submodule(door.tensor)
            assert door.amax == quantizer.amax_history[0].item()
            assert door.spec == quantizer.spec
    assert inputs(state) == {"0": 0.0, "1": 0.0}  # told once


def test_step_with_several_boundaries_is_told_whole() -> None:
    """An update besides the one that the optimizer's step brought; an optimizer for each layer."""
    model = two_layers()
    state = ottava.ScalingState(model)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    run(model, 3.0)
    for optimizer in optimizers:
        optimizer.step()
    state.update()
    found = inputs(state)
    assert found["0"] == 3.0
    assert found["1"] == model[1].quantizers.input.amax_history[0].item() > 0


def test_idle_door_has_0_and_calibration_is_not_mixed_into_the_next_step() -> None:
    model = two_layers()
    state, optimizer = ottava.ScalingState(model), torch.optim.SGD(model.parameters(), lr=0.1)
    ottava.calibrate(model, [torch.full((4, 64), 100.0, dtype=torch.bfloat16)])
    state.take_amax()
    run(model, 3.0, layers=1)
    optimizer.step()
    assert inputs(state) == {"0": 3.0, "1": 0.0}


def one_rank(rank: int, folder: Path) -> dict[str, float]:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        model = two_layers()
        state = ottava.ScalingState(model, dist.group.WORLD)
        run(model, 2.0 + rank, layers=1 + rank)  # rank 0 never runs the second layer
        state.update()
        return inputs(state)
    finally:
        dist.destroy_process_group()


def other_rank(_: int, folder: Path) -> None:
    torch.set_num_threads(1)
    (folder / "found.json").write_text(json.dumps(one_rank(1, folder)))


def test_amaxes_are_those_over_all_ranks(tmp_path: Path) -> None:
    other = warm.start_ranks(other_rank, (tmp_path,), 1)
    found = one_rank(0, tmp_path)
    while not other.join():
        pass
    assert found == json.loads((tmp_path / "found.json").read_text())
    assert found["0"] == 3.0
    assert found["1"] > 0
