"""After a spike the last steps run again: as they ran, in high precision, under remedies; and the training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.record.reader import Run


def spiked(folder: Path | None, *, outlier: bool, steps: int = 36) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """A training whose batch 30 has an outlier that only casts mind, or targets that everybody minds."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    with torch.no_grad():
        net[0].weight[:, 0] = 0.0  # nothing reads the first feature
    ottava.convert(net, "tensorwise")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    watch = None if folder is None else ottava.watch(net, folder, replay=10)
    for step in range(1, steps + 1):
        x = torch.randn(256, 32)
        x[:, 0] = 1e7 if outlier and step == 30 else 0.0
        target = 2 * x * (1 if outlier or step != 30 else 20)
        target[:, 0] = 0.0
        nn.functional.mse_loss(net(x), target).backward()
        if outlier and step == 30:
            net[0].weight.grad[:, 0] = 0.0
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = {name: t.clone() for name, t in net.state_dict().items()} | {"random": torch.rand(2)}
    for i, state in enumerate(optimizer.state.values()):
        after |= {f"{i}.{k}": v.clone() for k, v in state.items() if isinstance(v, Tensor)}
    if watch is None or folder is None:
        return after, []
    watch.close()
    return after, [line for line in Run.open(folder).experiments if line["kind"] == "replay"]


@pytest.mark.parametrize("outlier", [True, False], ids=["the casts", "the data"])
def test_a_spike_is_replayed_and_training_keeps_every_bit(outlier: bool, tmp_path: Path) -> None:
    alone, _ = spiked(None, outlier=outlier)
    watched, lines = spiked(tmp_path / "run", outlier=outlier)
    assert {name for name in alone if not torch.equal(alone[name], watched[name])} == set()
    (line,) = lines
    assert line["step"] == 30
    assert (line["reproduces"], line["differs"]) == (True, None)
    arms = {arm["name"]: arm for arm in line["arms"]}
    assert list(arms)[:2] == ["as it ran", "high precision"]
    assert len(arms["as it ran"]["losses"]) == line["step"] - line["from"] + 1
    assert arms["high precision"]["calm"] is outlier  # the data is innocent only where the casts are guilty
    assert arms["as it ran"]["losses"][-1] > 2 * arms["as it ran"]["losses"][-2]
