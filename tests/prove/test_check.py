"""`check`: clean pairs raise no alarm, planted faults are placed, and bad input is refused in words."""

from __future__ import annotations

import copy
import html
import json
import math
import re
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import command
import ottava
from ottava.prove import Subject, check
from ottava.prove.align import UnlikeError
from ottava.prove.page import check_page
from ottava.prove.prover import Judged
from ottava.prove.recorder import StepRecorder, StepRecording, TraceError
from ottava.prove.tolerance import Distance, Nudge, distance


class Net(nn.Module):
    """Two blocks with a norm; `fault` changes one of them."""

    def __init__(self, fault: str = "", recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(32), "up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})
            for _ in range(2)
        )
        self.head = nn.Linear(32, 32)
        self.fault, self.recompute = fault, recompute

    def block(self, x: Tensor, number: int) -> Tensor:
        block, fault = self.blocks[number], self.fault if number else ""
        hidden = F.gelu(block["up"](block["norm"](x)), approximate="tanh" if fault == "gelu" else "none")
        if fault == "detached":
            hidden = hidden.detach()
        if fault == "scaled gradient":
            hidden = hidden * 0.5 + hidden.detach() * 0.5
        return x + block["down"](hidden) * (0.9 if fault == "residual" else 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number in range(2):
            x = checkpoint(self.block, x, number, use_reentrant=False) if self.recompute else self.block(x, number)
        return self.head(x)


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def batch() -> Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))


def micro(parts: int, scale: float) -> object:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        optimizer.zero_grad()
        for part in tokens.chunk(parts):
            (loss(model, part) * scale).backward()
        optimizer.step()

    return step


def test_clean_pairs_raise_no_alarm() -> None:
    torch.manual_seed(0)
    a = Net()
    bf16 = copy.deepcopy(a).bfloat16()
    fp8 = copy.deepcopy(bf16)
    ottava.convert(fp8, "tensorwise")
    pairs = {
        "itself": (a, copy.deepcopy(a)),
        "recomputed": (a, Net(recompute=True)),
        "micro-batched": (a, Subject(copy.deepcopy(a), micro(4, 0.25))),  # type: ignore[arg-type]
        "BF16": (a, bf16),
        "FP8": (bf16, fp8),
        "compiled": (a, torch.compile(copy.deepcopy(a), backend="eager")),
    }
    for name, (one, two) in pairs.items():
        verdict = check(one, two, batch(), loss=loss, optimizer=adam)  # type: ignore[arg-type]
        assert verdict.same, f"{name}: {verdict}"
        assert len(verdict.judged) > 40


class Shared(nn.Module):
    """A router and two experts read one tensor; `apart`: the experts read a copy, as all-to-all of tokens makes one."""

    def __init__(self, apart: bool = False, fault: bool = False) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(8), nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.apart, self.fault = apart, fault

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        gates = self.router(x.detach() if self.fault else x).softmax(-1)
        x = x.clone() if self.apart else x
        return gates[:, :1] * self.experts[0](x) + gates[:, 1:] * self.experts[1](x)


def test_a_gradient_of_some_readers_is_not_held_against_that_of_all() -> None:
    torch.manual_seed(0)
    a, x = Shared(), torch.randn(16, 8)
    verdict = check(a, Shared(apart=True), x)
    assert verdict.same, str(verdict)
    assert "Not compared: input gradient of router is a sum over other modules in B than in A" in str(verdict)
    assert len(check(a, Shared(), x).judged) == len(verdict.judged) + 3
    assert ": output gradient of norm: all of it is" in str(check(a, Shared(apart=True, fault=True), x))


def test_planted_faults_are_placed() -> None:
    torch.manual_seed(0)
    a = Net()
    expected = {
        "gelu": ("forward", "input of blocks.1.down"),
        "residual": ("forward", "input of head"),
        "detached": ("backward", "input gradient of blocks.1.down"),
        "scaled gradient": ("backward", "output gradient of blocks.1.up"),
    }
    for fault, place in expected.items():
        finding = check(a, Net(fault), batch(), loss=loss).finding
        assert finding is not None, fault
        assert (finding.phase, str(finding.key)) == place
    for step, phase in ((micro(4, 1.0), "loss"), (micro(1, 1.0), "")):
        finding = check(a, Subject(copy.deepcopy(a), step), batch(), loss=loss, optimizer=adam).finding  # type: ignore[arg-type]
        assert (finding.phase if finding else "") == phase
    finding = check(
        a, Subject(copy.deepcopy(a), None, lambda p: torch.optim.AdamW(p, lr=2e-3)), batch(), loss=loss, optimizer=adam
    ).finding
    assert finding is not None
    assert finding.phase == "update"
    finding = check(a, Net(), batch(), loss=loss, optimizer=adam, share_weights=False).finding
    assert finding is not None
    assert finding.phase == "start"


def test_the_reproducer_reproduces(tmp_path: Path) -> None:
    torch.manual_seed(0)
    verdict = check(Net(), Net("gelu"), batch(), loss=loss, reproducer=tmp_path / "shown.py")
    assert verdict.reproducer is not None
    assert "gelu with other arguments" in str(verdict)
    assert len(verdict.reproducer.read_text("utf-8").splitlines()) <= 30
    done = subprocess.run([sys.executable, str(verdict.reproducer)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("distance ")


def test_the_page_has_the_answer_the_picture_and_names_as_text(tmp_path: Path) -> None:
    """Names are text; thousands of tensors stay below 400 kB, and the first that is wrong has its point."""

    def net(gelu: nn.Module) -> nn.Module:
        parts = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        parts.insert(1, nn.Sequential(OrderedDict({"<script>alert(1)</script>": gelu})))
        return parts

    verdict = check(net(nn.GELU()), net(nn.GELU("tanh")), torch.randn(16, 8), reproducer=tmp_path / "shown.py")
    page = check_page(verdict, "ottava check a.py -- --x")
    name = "1.&lt;script&gt;alert(1)&lt;/script&gt;"
    assert f"<h1>The first tensor that differs: output of {name}, forward</h1>" in page
    assert "<script>alert" not in page
    assert "ottava check a.py -- --x" in page
    assert "aten.gelu" in page
    assert page.count('<td class="wrong">') > page.count('<td class="exact">') > 0
    same = check(net(nn.GELU()), net(nn.GELU()), torch.randn(16, 8))
    assert "<h1>B computes what A computes</h1>" in check_page(same)
    assert 'class="wrong"' not in check_page(same)
    wrong = next(j for j in verdict.judged if j.wrong)
    deep = replace(wrong.row, key=wrong.row.key._replace(path="model.layers." * 40 + "up"))
    far = Judged(deep, Distance(*[math.inf] * 4), wrong.limit)
    many = replace(verdict, judged=[verdict.judged[0]] * 2000 + [wrong] + [far] * 2000, reproducer=None)
    page = check_page(many)
    assert len(page.encode()) < 400_000
    assert f"[2001.0,{json.dumps(str(wrong.row.key))}]" in html.unescape(page).replace(", ", ","), "its point is there"


def recorded(model: nn.Module, nudge: Nudge | None = None, most: int = 1 << 30) -> StepRecording:
    model = copy.deepcopy(model)
    with StepRecorder(model, nudge=nudge, most=most) as recorder:
        loss(model, batch()).backward()
    return recorder.recording()


def test_saved_traces_and_their_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Net()
    wrong = Net("residual")
    wrong.load_state_dict(model.state_dict())
    good = recorded(model)
    good.nudged = [recorded(model, Nudge(1))]
    good.save(tmp_path / "good")
    recorded(wrong).save(tmp_path / "bad")
    recorded(model, most=4000).save(tmp_path / "part")
    loaded = StepRecording.load(tmp_path / "good")
    assert [e.key for e in loaded.entries] == [e.key for e in good.entries]
    assert all(torch.equal(x.value, y.value) for x, y in zip(loaded.entries, good.entries, strict=True))
    assert command.run("check", tmp_path / "good", tmp_path / "good") == 0
    assert "fit into" not in capsys.readouterr().out
    assert command.run("check", tmp_path / "part", tmp_path / "part") == 0
    assert re.search(r"part has \d+ more tensors than fit into 8 GiB. They are not compared.", capsys.readouterr().out)
    written = tmp_path / "page.html", tmp_path / "data.json"
    outs = [word for path in written for word in ("-o", path)]
    assert command.run("check", tmp_path / "good", tmp_path / "bad", "--json", "--lang", "zh", *outs) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["finding"]["phase"] == "forward"
    assert json.loads(written[1].read_text("utf-8"))["finding"] == said["finding"]
    assert "<h1>第一个不同的张量：head 的输入，前向</h1>" in written[0].read_text("utf-8")


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnlikeError, match=r"parameter weight of B .* A has no parameter"):
        check(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(TypeError, match="got a int; needs a model"):
        check(3, nn.Linear(2, 2))  # type: ignore[arg-type]

    def unseeded(x: Tensor) -> None:
        torch.seed()
        nn.Linear(2, 2)(torch.randn(2, 2)).sum().backward()

    with pytest.raises(UnlikeError, match="two runs of A itself differ"):
        check(unseeded, unseeded, torch.ones(1, 2))
    with pytest.raises(UnlikeError, match="has called no module"):
        check(lambda x: None, lambda x: None, torch.ones(1))
    with pytest.raises(TraceError, match="there is no rank0"):
        StepRecording.load(tmp_path)
    recorded(nn.Sequential(nn.Embedding(32, 32))).save(tmp_path)
    text = (tmp_path / "rank0.json").read_text("utf-8")
    for hostile in ("[]", '{"schema": "ottava.trace/1"}', text.replace('"entries": [', '"entries": [7, '), text[:-9]):
        (tmp_path / "rank0.json").write_text(hostile, "utf-8")
        with pytest.raises(ValueError, match="rank0"):
            StepRecording.load(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(ValueError, match="the same command"):
        command.run("check", str(tmp_path / "train.py"))
    with pytest.raises(FileNotFoundError, match=r"there is no file 'train\.py'"):
        command.run("check", "train.py")


def test_the_command_writes_a_reproducer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first operator behind the first call of the model; memory that nobody wrote is none."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import sys, torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
        "gelu = nn.GELU('tanh' if '--tanh' in sys.argv else 'none')\n"
        "model = nn.Sequential(nn.Linear(8, 16), gelu, nn.Linear(16, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "model(torch.randn(6, 8)).square().mean().backward()\noptimizer.step()\n"
    )
    assert command.run("check", "train.py", "--draws", 1, "--reproducer", "shown.py", "--", "--tanh") == 1
    text = Path("shown.py").read_text("utf-8")
    assert "aten.gelu.default" in text
    assert len(text.splitlines()) <= 20
    with pytest.raises(ValueError, match="one rank"):
        command.run("check", "train.py", "--ranks", 2, "--reproducer", "shown.py")


def test_distances_and_nudges() -> None:
    x = torch.randn(64, 64)
    assert distance(x, x.clone()) == (0, 0, 0, 0)
    wrong = x.clone()
    wrong[3] = 0
    far = distance(x, wrong)
    assert far.whole == pytest.approx(float((x - wrong).norm() / x.norm()), rel=1e-6)
    assert far.row == pytest.approx(float(x[3].norm() / 8 / x.norm() * 64), rel=1e-6)
    assert distance(x, torch.full_like(x, torch.nan)).whole == torch.inf
    assert torch.equal(Nudge(0).data(batch()), batch())


_SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
n, r = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU("tanh" if "--bug" in sys.argv else "none"), nn.Linear(16, 4))
x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
net = model
if n > 1:
    dist.init_process_group("gloo")
    net = model if "--nosync" in sys.argv else nn.parallel.DistributedDataParallel(model)
    x, y = x[r::n], y[r::n]
for _ in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
"""


def test_a_script_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT, "utf-8")
    for words, phase in (([], None), (["--", "--nosync"], "weight gradient"), (["--", "--bug"], "forward")):
        code = command.run("check", script, "--ranks", 2, "--draws", 1, "--json", *words)
        found = json.loads(capsys.readouterr().out)["finding"]
        assert (code, found and found["phase"]) == (int(phase is not None), phase), found
    script.write_text("raise ValueError('no data')", "utf-8")
    with pytest.raises(RuntimeError, match="ended with code"):
        command.run("check", script, "--ranks", 2)


def dumped(recording: StepRecording, folder: Path) -> None:
    """As msprobe writes a dump of modules."""
    sides = {
        "input": ("forward", "input_args"),
        "output": ("forward", "output"),
        "output gradient": ("backward", "input"),
        "input gradient": ("backward", "output"),
    }
    data: dict[str, dict[str, list[dict[str, str]]]] = {}
    (folder / "dump_tensor_data").mkdir(parents=True)
    for number, entry in enumerate(recording.entries):
        if entry.key.path and entry.key.kind in sides:
            way, side = sides[entry.key.kind]
            held = data.setdefault(f"Module.{entry.key.path}.{entry.operation}.{way}.0", {})
            held.setdefault(side, []).append({"type": "torch.Tensor", "data_name": f"{number}.pt"})
            torch.save(entry.value, folder / "dump_tensor_data" / f"{number}.pt")
    (folder / "dump.json").write_text(json.dumps({"task": "tensor", "level": "L0", "data": data}), "utf-8")


def test_dumps_of_msprobe_are_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, wrong = Net(), Net("gelu")
    wrong.load_state_dict(model.state_dict())
    for name, one in (("good", model), ("bad", wrong)):
        dumped(recorded(one), tmp_path / name)
    assert check(tmp_path / "good", tmp_path / "good").same
    finding = check(tmp_path / "good", tmp_path / "bad").finding
    assert finding is not None
    assert str(finding.key) == "input of blocks.1.down"
    hostile = {
        "Module.a.Linear.forward.0": {
            "output": [{"data_name": "../good/dump_tensor_data/1.pt"}, 7, {}],
            "input_args": 3,
        }
    }
    for data in ("[]", "{", '{"data": []}', json.dumps({"data": hostile})):
        (tmp_path / "bad" / "dump.json").write_text(data, "utf-8")
        with pytest.raises(TraceError, match=r"dump\.json"):
            check(tmp_path / "good", tmp_path / "bad")
