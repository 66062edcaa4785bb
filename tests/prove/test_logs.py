"""Logs and dumps of others: DebugMode, torchtitan, TransformerEngine. Right pairs agree, a changed one is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._debug_mode import DebugMode

import command
from ottava.prove import check
from ottava.prove.align import UnlikeError
from ottava.prove.logs import compare_logs, load_log
from ottava.prove.recorder import TraceError
from ottava.prove.traces import load_trace

TITAN = """Total captured activations: 2
================================================================================

[layers.0.mlp/op_0_mm]
  Shape: torch.Size([4, 8]), Dtype: torch.bfloat16
  L1 norm: {l1}
  L2 norm: 3.0
  Min: -1.5
  Max: 2.0
  Mean: 0.25
  Location: model.py:12

[layers.0.mlp/op_1_mm]
  Shape: torch.Size([4, 8])
  L1 norm: 7.0
  L2 norm: 2.0
  Min: -1.0
  Max: 1.0
  Mean: 0.0
  Phase: backward

"""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def logged(model: nn.Module, x: Tensor, path: Path, before: Callable[[Tensor], Tensor] = lambda x: x) -> Path:
    """The log of a forward and its backward, as torch writes it."""
    with DebugMode(record_nn_module=True) as mode, DebugMode.log_tensor_hashes(hash_inputs=True):
        model(before(x)).square().sum().backward()
    path.write_text(mode.debug_string(), "utf-8")
    return path


def test_debug_mode_logs_of_other_length_and_precision_agree(tmp_path: Path) -> None:
    """A cast that one program makes is left out; BF16 against FP32 differs by its rounding alone."""
    x = torch.randn(4, 16)
    a = load_log(logged(net(), x, tmp_path / "a.txt"))
    longer = load_log(logged(net(), x, tmp_path / "b.txt", lambda x: (x * 2) / 2))
    half = load_log(logged(net().bfloat16(), x, tmp_path / "c.txt", lambda x: x.bfloat16()))
    assert {one.module for one in a} >= {"0", "1", "2"}
    assert {one.backward for one in a} == {False, True}
    for other in (a, longer, half):
        verdict = compare_logs(a, other)
        assert verdict.same, str(verdict)
        assert len(verdict.judged) >= 0.8 * len(a)
    assert min(len(longer), len(half)) > len(a)


def test_a_changed_operation_of_a_log_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(4, 16)
    a = logged(net(), x, tmp_path / "a.txt")
    wrong = net()
    wrong[1] = nn.GELU(approximate="tanh")
    wrong[2].weight.data *= 1.05
    b = logged(wrong.bfloat16(), x, tmp_path / "b.txt", lambda x: x.bfloat16())
    finding = compare_logs(load_log(a), load_log(b)).finding
    assert finding is not None
    assert (finding.module, finding.phase) == ("2", "forward")
    assert command.run("check", str(a), str(b), "--json") == 1
    assert json.loads(capsys.readouterr().out)["finding"]["module"] == "2"
    assert command.run("check", str(a), str(a)) == 0


def test_torchtitan_captures_are_logs(tmp_path: Path) -> None:
    for name, l1 in (("a", "9.0"), ("b", "9.9")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_0_activations.log").write_text(TITAN.format(l1=l1), "utf-8")
    a, b = (load_log(tmp_path / name / "rank_0_activations.log") for name in "ab")
    assert [(o.module, o.name, o.backward, o.dtype) for o in a] == [
        ("layers.0.mlp", "mm", False, torch.bfloat16), ("layers.0.mlp", "mm", True, None)
    ]  # fmt: skip
    assert compare_logs(a, a).same
    finding = compare_logs(a, b).finding
    assert finding is not None
    assert "the L1 norm" in finding.sentence
    assert command.run("check", str(tmp_path / "a"), str(tmp_path / "b")) == 1


def test_dumps_of_transformer_engine_are_traces(tmp_path: Path) -> None:
    """High precision, or codes and a scale; layer 10 comes after layer 2; a wrong weight gradient is the first."""

    def dump(name: str, wrong: float) -> Path:
        folder = tmp_path / name / "tensor_dumps" / "rank_0"
        folder.mkdir(parents=True)
        torch.manual_seed(0)
        for layer in ("model.layers.2.fc1", "model.layers.10.fc1"):
            for tensor in ("activation", "weight", "output", "gradient", "wgrad", "dgrad"):
                x = torch.randn(4, 4) * (wrong if (layer[13:15], tensor) == ("10", "wgrad") else 1)
                codes = {"data": x.to(torch.float8_e4m3fn), "scale_inv": torch.ones(1)}
                held = codes if tensor == "activation" else {"high_precision": x}
                torch.save(held, folder / f"{layer}_{tensor}_iter_000007.pt")
        return tmp_path / name

    a, b = (load_trace(dump(name, wrong)) for name, wrong in (("a", 1.0), ("b", 1.1)))
    assert [e.key.path for e in sorted(a.entries, key=lambda e: e.order) if e.key.kind == "output"] == [
        "model.layers.2.fc1", "model.layers.10.fc1"
    ]  # fmt: skip
    assert check(a, copy.deepcopy(a)).same
    finding = check(a, b).finding
    assert finding is not None
    assert (finding.phase, finding.key.path) == ("weight gradient", "model.layers.10.fc1.weight")


def test_what_is_no_log_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("hello\n", "utf-8")
    (tmp_path / "rank_0").mkdir()
    with pytest.raises(TraceError, match="has no operation"):
        load_log(tmp_path / "empty.txt")
    with pytest.raises(TraceError, match="a rank has no tensor"):
        load_trace(tmp_path)
    x = torch.randn(4, 16)
    a = load_log(logged(net(), x, tmp_path / "a.txt"))
    other = load_log(logged(nn.Sequential(nn.Conv1d(1, 2, 3)), x[:, None], tmp_path / "b.txt"))
    with pytest.raises(UnlikeError, match="two logs of one model"):
        compare_logs(a, [o for o in other if o.name.startswith("conv")])
