"""What a running watch says for a log: from memory, and what its files say later."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

import ottava
from ottava.diagnose.diagnose import diagnose
from ottava.record.reader import Run
from ottava.watching.live import Live
from ottava.watching.session import watch


def test_numbers_are_those_of_the_record(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    ottava.convert(model, "tensorwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(32, 64).bfloat16()
    with watch(model, tmp_path / "run", every=4) as seen:
        live, told = Live(seen, model, share=1.0), []
        for step in range(1, 9):
            loss = (model(x) - x).float().square().mean() * (math.nan if step == 8 else 1.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2 == 0:
                told.append(live.numbers())
        seen.flush()
        run = Run.open(seen.folder)
        norms = run.steps["grad_norm"]
        assert [line["ottava/grad_norm"] for line in told[:3]] == [max(norms[i : i + 2]) for i in (0, 2, 4)]
        (shadow,) = [e for e in run.experiments if e["kind"] == "shadow"]
        assert ["ottava/fp8_damage" in line for line in told] == [False, False, True, True]
        assert told[-1]["ottava/fp8_damage"] == shadow["error"]
        assert live.event is not None
        assert told[-1]["ottava/loss_event"] == live.event.step == 8
        assert live.diagnosis is not None
        assert live.diagnosis.fp8 == diagnose(run).fp8
        table = run.table()
        looked = [table.metric("row_sqnr_p50_db")[table["step"] == step].min() for step in (1, 4)]
        assert [line["ottava/worst_sqnr_db"] for line in told[:2]] == looked
        assert told[0]["ottava/fp8_share"] == ottava.receipt(model).fp8_fraction == 1.0
