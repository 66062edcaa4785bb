"""Scaling state read out of files: ottava's, TransformerEngine's, damaged ones, and ones that want to run something."""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn

import ottava
from ottava.interop.contents import ScalingStateFile, StateFileError, TensorState, read_contents

FP8_MAX = {"fwd": 448.0, "bwd": 57344.0}


def read_state(path: Path) -> ScalingStateFile:
    found = read_contents(path).state
    assert found is not None
    return found


# --- ottava's own -----------------------------------------------------------------------------------------------------


def trained(recipe: Any = "delayed", steps: int = 3) -> nn.Module:
    """Two layers after some steps."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    ottava.convert(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.randn(4, 64, dtype=torch.bfloat16) * (step + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def save_safetensors(state: dict[str, Any], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


def save_nested(state: dict[str, Any], path: Path) -> None:
    torch.save({"step": 3, "net": {"state": state}}, path)


@pytest.mark.parametrize("save", [save_safetensors, torch.save, save_nested])
def test_shows_the_state_of_a_trained_model(save: Callable[[dict[str, Any], Path], None], tmp_path: Path) -> None:
    """Every number is that of the door's own buffers, and every scale is seen to follow from its history."""
    model = trained()
    save(model.state_dict(), tmp_path / "file")
    found = read_state(tmp_path / "file")
    assert (found.source, found.problems) == ("ottava", [])
    assert len(found.rows) == 6
    for row in found.rows:
        door = model[int(row.layer[-1])].quantizers.get_submodule(row.tensor)
        assert (row.history_len, row.filled) == (16, 3)
        assert row.newest == door.amax_history[0].item()
        assert row.largest == door.amax_history.max().item()
        assert row.scale == door.scale.item()
        assert (row.nonfinite, row.guard_fires) == (0, 0)
        assert row.follows == ("E5M2" if row.tensor == "grad_output" else "E4M3") + ", max, margin 0"


def test_counts_and_empty_histories_are_told(tmp_path: Path) -> None:
    """A step with an infinite input: nothing enters the input's window, and it is counted."""
    model = trained(steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    x[0, 0] = torch.inf
    model(x).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "file.pt")
    found = read_state(tmp_path / "file.pt")
    (row,) = [row for row in found.rows if (row.layer, row.tensor) == ("0", "input")]
    assert (row.filled, row.scale, row.nonfinite, row.follows) == (0, 0.0, 1, None)
    beginnings = ["no history yet", "had steps with an amax of inf or nan"]
    assert [note.startswith(text) for note, text in zip(row.notes, beginnings, strict=True)] == [True, True]
    assert found.problems == []
    assert "the next cast takes the current scale" in str(found)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"margin": 2}, "E4M3, max, margin 2"),
        ({"amax_compute_algo": "most_recent"}, "E4M3, most_recent, margin 0"),
        ({"scale_format": "pow2"}, "a power of two"),
    ],
)
def test_setting_behind_a_scale_is_recognised(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    from dataclasses import replace

    recipe = ottava.get_recipe("delayed")
    changed = {
        gemm: replace(
            getattr(recipe, gemm),
            **{side: replace(getattr(getattr(recipe, gemm), side), **change) for side in ("lhs", "rhs")},
        )
        for gemm in ("fprop", "dgrad", "wgrad")
    }
    layer = ottava.nn.Linear(64, 64, recipe=replace(recipe, **changed)).bfloat16()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for size in (3.0, 1.3):  # the largest is not the newest
        layer(torch.full((4, 64), size, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    torch.save(layer.state_dict(), tmp_path / "file.pt")
    found = read_state(tmp_path / "file.pt")
    assert found.rows[0].follows == expected
    assert found.problems == []


def damage(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def apply(state: dict[str, Tensor]) -> None:
        state[f"0.quantizers.input.{name}"].view(-1)[0] = value

    return apply


@pytest.mark.parametrize(
    "harm, said",
    [
        (damage("scale", 3.0), "the scale does not follow from the history"),
        (damage("scale", 0.0), "has a history, but its scale is 0"),
        (damage("scale", float("inf")), "has negative or non-finite entries"),
        (damage("amax_history", float("nan")), "has negative or non-finite entries"),
        (damage("amax_history", -1.0), "has negative or non-finite entries"),
        (damage("amax_history", 1e6), "the scale does not follow from the history"),
        (lambda state: state["0.quantizers.input.amax_history"].zero_(), "has a scale without a history"),
    ],
)
def test_contradictions_are_problems(harm: Callable[[dict[str, Tensor]], None], said: str, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in trained().state_dict().items()}
    harm(state)
    torch.save(state, tmp_path / "file.pt")
    found = read_state(tmp_path / "file.pt")
    (problem,) = found.problems
    assert problem.startswith(f"0 input: {said}")
    assert problem.removeprefix("0 input: ") in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


# --- TransformerEngine's ----------------------------------------------------------------------------------------------


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = _FormatHelper(448, 448)
    HYBRID = _FormatHelper(448, 57344)


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Any = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True


@contextmanager
def transformer_engine() -> Iterator[None]:
    """TE's module for as long as something is pickled: whoever reads it later meets names that nobody can import."""
    names = ("transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    module = sys.modules[name]
    before = {}
    for kind in (_FormatHelper, Format, DelayedScaling):
        before[kind] = kind.__module__
        kind.__module__ = name
        setattr(module, kind.__name__, kind)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        for kind, original in before.items():
            kind.__module__ = original


def te_update(history: Tensor, scale: Tensor, fp8_max: float, margin: int, algorithm: str) -> None:
    """TE's fused kernel, per column, written out: delayed_scaling.cu as of 2.x. history (L, n), row 0 staged."""
    length = len(history)
    for column in range(history.shape[1]):
        last = history[0, column].item()
        amax = 0.0
        if last != 0:
            window = [history[i + 1, column].item() if i < length - 1 else last for i in range(length)]
            for i in range(length):
                history[i, column] = window[i] if i > 0 else 0.0
            amax = max(window) if algorithm == "max" else last
        if amax > 0:
            scaled_max = torch.tensor(fp8_max * 2.0**-margin, dtype=torch.float32)
            scale[column] = scaled_max / torch.tensor(amax, dtype=torch.float32)


def te_state(
    *, length: int, steps: int, gemms: int = 1, margin: int = 0, algorithm: str = "max", old: bool = False
) -> tuple[dict[str, Any], dict[str, list[list[float]]]]:
    """What TE's get_extra_state pickles after some steps, and the amaxes of each column that were staged."""
    state: dict[str, Any] = {}
    staged: dict[str, list[list[float]]] = {}
    if not old:
        with transformer_engine():
            state["recipe"] = DelayedScaling(margin, Format.HYBRID, length, algorithm)
    for direction, used in (("fwd", (1, 1, 0)), ("bwd", (1, 0))):
        columns = used * gemms
        scale, history = torch.ones(len(columns)), torch.zeros(length, len(columns))
        amaxes = torch.exp2(3 * torch.randn(steps, len(columns))) * torch.tensor(columns)
        for row in amaxes:
            history[0] = row
            te_update(history, scale, FP8_MAX[direction], margin, algorithm)
        state |= {f"scale_{direction}": scale, f"amax_history_{direction}": history}
        if old:
            state[f"scale_inv_{direction}"] = 1 / scale
        staged[direction] = amaxes.t().tolist()
    extra = {"num_gemms": gemms, "fp8_checkpoint": True}
    state["extra_fp8_variables"] = extra | ({f"fp8_max_{d}": FP8_MAX[d] for d in FP8_MAX} if old else {})
    return state, staged


def as_uint8(state: Any) -> Tensor:
    """TE 2.x."""
    with transformer_engine():
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def as_bytesio(state: Any) -> io.BytesIO:
    """TE 1.x."""
    stream = io.BytesIO()
    with transformer_engine():
        torch.save(state, stream)
    return stream


def rows_of(path: Path) -> dict[tuple[str, str], TensorState]:
    return {(row.layer, row.tensor): row for row in read_state(path).rows}


@pytest.mark.parametrize("length", [2, 4, 16])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_shows_what_transformer_engine_predicts_from(length: int, algorithm: str, margin: int, tmp_path: Path) -> None:
    """Columns, order and scales agree with what the kernel was fed.

    After 6 steps with L = 4 the file holds the last 3 amaxes, while the scale came from the last 4.
    """
    state, staged = te_state(length=length, steps=6, algorithm=algorithm, margin=margin)
    torch.save({"fc.weight": torch.ones(2, 2), "fc._extra_state": as_uint8(state)}, tmp_path / "te.pt")
    found = read_state(tmp_path / "te.pt")
    assert (found.source, found.problems) == ("transformer_engine", [])
    assert f"amax_history_len={length}" in found.recipes[0]
    assert "largest numbers 448 forward, 57344 backward" in found.recipes[0]
    rows = rows_of(tmp_path / "te.pt")
    assert list(rows) == [("fc", "input"), ("fc", "weight"), ("fc", "grad_output")]
    for column, (tensor, direction) in ((0, ("input", "fwd")), (1, ("weight", "fwd")), (0, ("grad_output", "bwd"))):
        row, fed = rows["fc", tensor], staged[direction][column]
        kept = fed[-(length - 1) :]
        assert (row.history_len, row.filled) == (length - 1, len(kept))
        assert (row.newest, row.largest) == (kept[-1], max(kept))
        assert row.scale == state[f"scale_{direction}"][column].item()
        fmt = "E5M2" if direction == "bwd" else "E4M3"
        behind = max(fed[-length:]) if algorithm == "max" else fed[-1]
        older = algorithm == "max" and behind > max(kept)
        same = "max" if algorithm == "max" else "most_recent"
        assert row.follows == ("an older amax" if older else f"{fmt}, {same}, margin {margin}")


def test_reads_every_form_that_transformer_engine_has_had(tmp_path: Path) -> None:
    """uint8 with a pickle, BytesIO with a file of torch.save, with and without recipe; safetensors; a nested model."""
    new, old = te_state(length=8, steps=5, gemms=2)[0], te_state(length=8, steps=5, old=True)[0]
    entries = {"mlp._extra_state": as_uint8(new), "a._extra_state": as_bytesio(new), "b._extra_state": as_bytesio(old)}
    torch.save({"model": {"decoder": entries}, "iteration": 5}, tmp_path / "te.pt")
    rows = rows_of(tmp_path / "te.pt")
    for name in ("mlp", "a"):
        for gemm in (1, 2):
            assert rows[f"model.decoder.{name} GEMM {gemm}", "weight"].filled == 5
            assert rows[f"model.decoder.{name} GEMM {gemm}", "weight"].follows == "E4M3, max, margin 0"
    assert rows["model.decoder.mlp GEMM 2", "input"].scale == new["scale_fwd"][3].item()
    assert rows["model.decoder.mlp GEMM 2", "grad_output"].scale == new["scale_bwd"][2].item()
    assert rows["model.decoder.b", "grad_output"].follows == "E5M2, max, margin 0"
    save_file({"mlp._extra_state": as_uint8(new)}, tmp_path / "te.safetensors")
    assert rows_of(tmp_path / "te.safetensors")["mlp GEMM 2", "input"].scale == new["scale_fwd"][3].item()


def test_a_scale_that_transformer_engine_cannot_have_made_is_a_problem(tmp_path: Path) -> None:
    """The leak of TE #814 looks like this: a history that another model wrote beside a scale that is one's own."""
    state, _ = te_state(length=8, steps=3)
    state["scale_fwd"][0] /= 2
    torch.save({"fc._extra_state": as_uint8(state)}, tmp_path / "te.pt")
    (problem,) = read_state(tmp_path / "te.pt").problems
    assert problem.startswith("fc input: the scale does not follow from the history")


def test_module_that_never_ran_is_a_note_and_history_of_one_cannot_be_checked(tmp_path: Path) -> None:
    """With L = 1 TE keeps nothing but the staging row, which it clears: 0 entries, and a scale from the last step."""
    never, one = te_state(length=4, steps=0)[0], te_state(length=1, steps=3)[0]
    torch.save({"never._extra_state": as_uint8(never), "one._extra_state": as_uint8(one)}, tmp_path / "te.pt")
    found = read_state(tmp_path / "te.pt")
    assert found.problems == []
    rows = rows_of(tmp_path / "te.pt")
    assert rows["never", "input"].notes == ("no history yet: the next cast multiplies by 1",)
    assert (rows["one", "input"].history_len, rows["one", "input"].follows) == (0, None)
    assert rows["one", "input"].scale == one["scale_fwd"][0].item()


def test_file_of_a_whole_megatron_job_is_read_with_its_classes_left_alone(tmp_path: Path) -> None:
    """Arguments, enums and numpy's random state lie beside the model in the file; none of them is imported or made."""
    import argparse

    import numpy as np

    contents = {
        "args": argparse.Namespace(fp8="hybrid", lr=1e-4),
        "rng_state": [{"np_rng_state": np.random.get_state()}],
        "model": {"fc._extra_state": as_bytesio(te_state(length=4, steps=2)[0])},
    }
    torch.save(contents, tmp_path / "model_optim_rng.pt")
    assert rows_of(tmp_path / "model_optim_rng.pt")["model.fc", "input"].filled == 2


# --- files that must be refused ---------------------------------------------------------------------------------------


class RunsACommand:
    """What an attacker's pickle does when loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


PLACES: dict[str, Callable[[Any, Path], None]] = {
    "extra state": lambda attack, path: torch.save({"fc._extra_state": as_uint8({"scale_fwd": attack})}, path),
    "old extra state": lambda attack, path: torch.save({"fc._extra_state": as_bytesio({"scale_fwd": attack})}, path),
    "file": lambda attack, path: torch.save({"fc.weight": attack}, path),
    "old file": lambda attack, path: torch.save({"fc.weight": attack}, path, _use_new_zipfile_serialization=False),
    "safetensors": lambda attack, path: save_file({"fc._extra_state": as_uint8(attack)}, path),
}


@pytest.mark.parametrize("hide", PLACES.values(), ids=PLACES)
def test_file_that_would_run_a_command_is_refused_and_runs_nothing(
    hide: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    marker, path = tmp_path / "ran", tmp_path / "evil"
    hide(RunsACommand(marker), path)
    with pytest.raises(StateFileError, match=r"system") as caught:
        read_state(path)
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    pickle.loads(pickle.dumps(RunsACommand(marker)))  # the attack works on whoever is not careful
    assert marker.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_storage_bytes_inside_a_pickle_are_not_trusted_either(tmp_path: Path) -> None:
    """torch's own rebuilding function unpickles the bytes it is given without a restriction."""
    marker = tmp_path / "ran"

    class HiddenDeeper:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.storage._load_from_bytes, (pickle.dumps(RunsACommand(marker)),)

    torch.save({"fc._extra_state": as_uint8({"scale_fwd": HiddenDeeper()})}, tmp_path / "evil.pt")
    with pytest.raises(StateFileError):
        read_state(tmp_path / "evil.pt")
    assert not marker.exists()


def garbage(good: bytes) -> bytes:
    return bytes(range(256)) * 4


def nothing(good: bytes) -> bytes:
    return b""


def half(good: bytes) -> bytes:
    return good[: len(good) // 2]


@pytest.mark.parametrize("save", [save_safetensors, torch.save])
@pytest.mark.parametrize("harm", [garbage, nothing, half])
def test_damaged_file_is_refused_in_one_sentence(
    save: Callable[[dict[str, Any], Path], None], harm: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    save(trained().state_dict(), path)
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(StateFileError, match="is cut short, damaged or no") as caught:
        read_state(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("form", [as_uint8, as_bytesio])
def test_damaged_extra_state_is_refused_in_one_sentence(
    form: Callable[[Any], Any], keep: float, tmp_path: Path
) -> None:
    whole = form(te_state(length=4, steps=2)[0])
    data = whole.getvalue() if isinstance(whole, io.BytesIO) else whole.numpy().tobytes()
    cut = data[: int(len(data) * keep)]
    torch.save({"fc._extra_state": torch.frombuffer(bytearray(cut), dtype=torch.uint8)}, tmp_path / "te.pt")
    with pytest.raises(StateFileError, match=r"fc\._extra_state: is cut short or damaged") as caught:
        read_state(tmp_path / "te.pt")
    assert "\n" not in str(caught.value)


def te_with(**parts: Any) -> dict[str, Any]:
    return {"fc._extra_state": as_uint8(te_state(length=4, steps=2)[0] | parts)}


def ours_with(**parts: Any) -> dict[str, Any]:
    """One door's state with other parts; None leaves a part out."""
    state = {"amax_history": torch.ones(2), "scale": torch.tensor(448.0)}
    state |= {"nonfinite_count": torch.tensor(0), "guard_count": torch.tensor(0)}
    return {f"fc.quantizers.input.{name}": part for name, part in (state | parts).items() if part is not None}


@pytest.mark.parametrize(
    "contents, said",
    [
        (lambda: [1, 2], "holds no tensor"),
        (lambda: {"fc._extra_state": torch.ones(2)}, "fc._extra_state: got Tensor; needs a uint8 tensor"),
        (lambda: te_with(scale_fwd=torch.ones(4)), "fwd scale and amax_history are"),
        (lambda: te_with(amax_history_bwd=None), "bwd scale and amax_history are"),
        (lambda: ours_with(scale=None), "fc.quantizers.input: lacks scale"),
        (lambda: ours_with(scale=torch.ones(3)), "fc.quantizers.input.scale: needs a torch.float32"),
        (lambda: ours_with(scale="448"), "fc.quantizers.input.scale: needs a torch.float32"),
        (lambda: ours_with(guard_count=torch.tensor(0.5)), "fc.quantizers.input.guard_count: needs a torch.int64"),
    ],
)
def test_foreign_file_is_refused_with_what_is_wrong(contents: Callable[[], Any], said: str, tmp_path: Path) -> None:
    torch.save(contents(), tmp_path / "file.pt")
    with pytest.raises(StateFileError) as caught:
        read_state(tmp_path / "file.pt")
    assert said in str(caught.value)


@pytest.mark.parametrize("size", [0x80, 0x180, 0x8080])
def test_a_header_that_begins_as_a_pickle_is_safetensors(size: int, tmp_path: Path) -> None:
    """Its length comes first: 128 is the byte that a pickle begins with. One file in 32 was refused as a pickle."""
    parts = {"fc.quantizers.input.amax_history": torch.ones(4), "fc.quantizers.input.scale": torch.tensor(448.0)}
    parts |= {
        "fc.quantizers.input.nonfinite_count": torch.tensor(0),
        "fc.quantizers.input.guard_count": torch.tensor(0),
    }
    whole = save(parts)
    own = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + own].ljust(-(-own // 256) * 256 + size)
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + own :])
    assert path.read_bytes()[0] == 0x80
    assert len(read_state(path).rows) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="a file that opens and cannot be read")
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.pt").symlink_to("/proc/self/mem")
    with pytest.raises(StateFileError, match=r"a\.pt: Input/output error"):
        read_state(tmp_path / "a.pt")
