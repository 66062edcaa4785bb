"""Names of layers are data: braces, template tags, markup and HTML in them are printed as they are, everywhere."""

from __future__ import annotations

import html
import io
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import ottava
from command import run
from ottava.cli.console import print_table
from ottava.measure.tally import Tally
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter
from ottava.report.page import make_report
from ottava.train.demo import render_report
from ottava.train.verdict import DemoResult, Machinery, RunResult

NAMES = (
    "a{0.__class__}",
    "{% raw %}",
    "{{ self }}",
    "[bold]x[/bold]",
    "<script>alert(1)</script>",
    "{}",
    "%s$x",
    "007",
)


def model() -> nn.Sequential:
    """A linear layer of each name, below a number, after one step."""
    net = nn.Sequential(nn.Sequential())
    for name in NAMES:  # a dot stands between a module and the one in it
        outer, _, inner = name.partition(".")
        linear = nn.Linear(64, 64)
        net[0].add_module(outer, nn.Sequential(OrderedDict({inner: linear})) if inner else linear)
    net.bfloat16()
    ottava.convert(net, "tensorwise")
    net(torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    return net


def test_receipt_and_observation_show_the_names() -> None:
    net = model()
    receipt = ottava.receipt(net)
    with ottava.debug.observe(net) as seen:
        net(torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    for name in NAMES:
        assert f"0.{name} " in str(receipt)
        assert f"0.{name} " in str(seen)
        assert f"0.{html.escape(name)}<" in receipt._repr_html_()
        assert f"0.{html.escape(name)}<" in seen._repr_html_()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with RunWriter(tmp_path / "run") as writer:
        for step in (1, 2):
            writer.step(step, loss=2.0)
            for name in NAMES:
                key = SlotKey(name, "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
                writer.tally(step, key, Tally(n=8, n_nonzero=8, n_underflow=4, amax=2.0, sxx=4.0, see=0.5))
            writer.event(step, "fallback", layer=NAMES[0], tensor="input", reason=NAMES[1])
    return tmp_path / "run"


def test_the_pages_show_the_names(folder: Path) -> None:
    page = make_report(Run.open(folder)).write(folder / "report.html").read_text(encoding="utf-8")
    row = {"gemm": "fprop", "operands": "", "kernel": "k", "shape": "", "padding": "", "fp8": True, "native": False}
    row |= {"saved_bytes": 0, "high_precision_bytes": 0, "note": "", "weight": 1}
    cast = {"tensor": "input", "direction": "row", "format": "E4M3", "granularity": "tensor", "amax": 1.0}
    cast |= {"underflow_pct": 0.1, "sqnr_db": 31.5}
    engine = Machinery(
        receipt=[{"layer": name, **row} for name in NAMES],
        fp8_fraction=1.0,
        skipped=dict.fromkeys(NAMES, "because"),
        numbers=[{"layer": name, **cast} for name in NAMES],
    )
    runs = [
        RunResult(recipe=recipe, seed=0, losses=[2.0, 1.9], validation=[(1, 2.0), (2, 1.9)], high_precision_loss=1.9,
                  seconds_per_step=0.1, tokens_per_step=64, diverged_at=None)
        for recipe in ("bf16", "tensorwise")
    ]  # fmt: skip
    demo = DemoResult(
        runs=runs, machinery={"tensorwise": engine}, command="ottava demo", config="", text="text", parameters=1,
        facts={"started": "2026-11-23", "torch": "2.13", "platform": "here"}, training_seconds=1.0,
    )  # fmt: skip
    for shown in (page, render_report(demo)):
        assert "<script>alert(1)" not in shown
        for name in NAMES:
            assert html.escape(name, quote=False) in shown.replace("&#39;", "'").replace("&#34;", '"')


def test_tables_show_the_names(folder: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """The command's text, a pipe, and a terminal, where rich would read markup."""
    assert run("table", folder) == 0
    said = capsysbinary.readouterr().out.decode()
    screen, pipe = io.StringIO(), io.StringIO()
    rows = [(name, 1.5) for name in NAMES]
    print_table(Console(file=screen, force_terminal=True, width=200), ("[layer]", "amax"), rows, left=["[layer]"])
    print_table(Console(file=pipe), ("[layer]", "amax"), rows, left=["[layer]"])
    for name in (*NAMES, "[layer]"):
        assert f"{name} " in screen.getvalue().replace(f"{os.linesep}", "\n")
        assert f"{name} " in pipe.getvalue()
        assert name in said or name == "[layer]"
    assert "\x1b" not in pipe.getvalue()
