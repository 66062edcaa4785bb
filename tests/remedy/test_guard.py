"""Loss spikes are undone, and blamed on the right one: a poisoned batch, or FP8."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.record.reader import Run
from ottava.record.writer import RunWriter
from ottava.remedy.guard import SpikeGuard

WIDTH = 64


class Training:
    """A small network that learns to give its input back, in its own scale: a loss that no honest batch spikes."""

    def __init__(self, recipe: str = "delayed", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
        ottava.convert(self.model, recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.runs = 0

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """All of a step."""
        self.runs += 1
        x, target = batch
        self.optimizer.zero_grad()
        scale = x.square().mean()
        loss = (self.model(x) - target).square().mean() / scale
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def batches(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Inputs and themselves."""
    generator = torch.Generator().manual_seed(seed)
    return [(x, x) for x in (torch.randn(32, WIDTH, generator=generator) for _ in range(count))]


def louder(batch: tuple[Tensor, Tensor], factor: float) -> tuple[Tensor, Tensor]:
    """An honest batch on another scale: in high precision its loss is that of any other."""
    return batch[0] * factor, batch[1] * factor


def poisoned(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Targets that have nothing to do with the inputs."""
    return batch[0], 30 * batch[0].flip(0)


def run(data: list[Any], training: Training | None = None, **settings: Any) -> tuple[SpikeGuard, list[float]]:
    """A guarded training over these batches."""
    training = training or Training()
    guard = SpikeGuard(
        training.model, training.optimizer, training.step, **{"every": 10, "hold": 20, "window": 24, **settings}
    )
    return guard, [guard(batch) for batch in data]


def test_a_quiet_run_is_bit_for_bit_unguarded() -> None:
    plain, data = Training(), batches(40)
    want = [plain.step(batch).item() for batch in data]
    guard, losses = run(data)
    assert losses == want
    assert guard.spikes == []
    assert all(torch.equal(a, b) for a, b in zip(guard.model.parameters(), plain.model.parameters(), strict=True))


def test_a_poisoned_batch_is_data_and_is_skipped() -> None:
    """It spikes without FP8 too. What remains is the training that never saw it, bit for bit."""
    data = batches(50)
    clean = data[:37] + data[38:]
    data[37] = poisoned(data[37])
    guard, losses = run(data)
    (spike,) = guard.spikes
    assert (spike.step, spike.cause, spike.skipped, spike.rewound_to) == (38, "data", (38,), 30)
    assert spike.replayed_loss > 100
    assert math.isnan(losses[37])
    plain = Training()
    want = [plain.step(batch).item() for batch in clean]
    assert losses[:37] + losses[38:] == want
    assert list(guard._losses) == want[-24:]  # what the next one is compared with
    assert guard.high_precision_until == 0


def test_a_sudden_outlier_under_a_stale_scale_is_fp8() -> None:
    """Delayed scaling predicts from quiet batches; one 200 times louder is clipped. Without FP8 it is like others."""
    data = batches(120)
    data[77] = louder(data[77], 200.0)
    guard, losses = run(data)
    (spike,) = guard.spikes
    assert (spike.step, spike.cause, spike.skipped) == (78, "fp8", ())
    assert spike.loss > 0.9
    assert spike.replayed_loss < 0.1
    assert spike.action == "stays in high precision for 20 steps"
    assert losses[77] == spike.replayed_loss
    assert guard.high_precision_until == 98
    assert not guard.in_high_precision
    assert max(losses[78:]) < 0.1


def test_held_in_high_precision_the_histories_go_on() -> None:
    """The loud batch enters the window of the amaxes, and leaves it while FP8 is still off."""
    data = batches(79)
    data[77] = louder(data[77], 200.0)
    guard, _ = run(data)
    door = guard.model[0].quantizers.input
    amaxes = [x.abs().max().item() for x, _ in data]
    assert guard.in_high_precision
    assert door.amax_history[:3].tolist() == [amaxes[78], amaxes[77], amaxes[76]]
    for batch in batches(16, seed=2):
        guard(batch)
    assert guard.in_high_precision
    assert door.amax_history.max() < 10


@pytest.mark.filterwarnings("error:ottava.autocast")
def test_without_predicted_scales_high_precision_is_no_calibration() -> None:
    """There is nothing to calibrate, and nobody is told that it was not done."""
    data = batches(40)
    data[30] = poisoned(data[30])
    guard, _ = run(data, Training("tensorwise"))
    assert [spike.cause for spike in guard.spikes] == ["data"]  # found out by a replay in high precision


def test_not_finite_is_a_spike_from_the_start() -> None:
    """A NaN in a batch, before there is anything to compare with; and one in a gradient norm that a loss hides."""
    data = batches(12)
    data[5] = (data[5][0], torch.full_like(data[5][1], math.nan))
    guard, losses = run(data, every=4)
    assert [(s.step, s.cause, s.z) for s in guard.spikes] == [(6, "data", math.inf)]
    assert all(math.isfinite(loss) for i, loss in enumerate(losses) if i != 5)
    training = Training()

    def with_norm(batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
        loss = training.step(batch).item()
        norm = math.inf if batch[0][0, 0] == 7.0 else 1.0
        return loss, norm

    data = batches(12)
    data[5][0][0, 0] = 7.0
    guard = SpikeGuard(training.model, training.optimizer, with_norm, every=4)
    for batch in data:
        guard(batch)
    assert [(s.step, s.cause) for s in guard.spikes] == [(6, "data")]


def test_poison_that_shows_late_takes_the_window() -> None:
    """The batch before the spike is to blame: skipping the one that spikes does not help, skipping all does."""
    training, data = Training(), batches(60)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = training.step((batch[0], batch[0]))
        if batch[1][0, 0] == 99.0:  # corrupts the weights in silence
            with torch.no_grad():
                training.model[0].weight.mul_(-20)
        return loss

    data[34][1].data = data[34][1].clone().index_put_((torch.tensor(0), torch.tensor(0)), torch.tensor(99.0))
    guard = SpikeGuard(training.model, training.optimizer, step, every=10, lead=4)
    losses = [guard(batch) for batch in data]
    assert [(s.step, s.cause, s.rewound_to) for s in guard.spikes] == [(36, "data", 30), (37, "data", 30)]
    assert [s.skipped for s in guard.spikes] == [(36,), tuple(range(31, 38))]
    plain = Training()
    want = [plain.step((batch[0], batch[0])).item() for batch in data[:30] + data[37:]]
    assert losses[37:] == want[30:]


def test_relapses_hold_longer_and_call_the_fallback() -> None:
    """The second time FP8 is to blame soon after, it is held twice as long, and the remedy is applied."""
    data = batches(120)
    for loud in (77, 105):
        data[loud] = louder(data[loud], 200.0)
    called = []
    guard, _ = run(data, fallback=lambda model, spike: called.append((model, spike.step)))
    assert [(s.step, s.cause, s.action.split()[-2]) for s in guard.spikes] == [(78, "fp8", "20"), (106, "fp8", "40")]
    assert called == [(guard.model, 106)]


def test_events_and_rewinds_are_told(tmp_path: Path) -> None:
    data = batches(40)
    data[30] = poisoned(data[30])
    left: list[int] = []
    with RunWriter(tmp_path) as writer:
        run(data, log=writer, on_rewind=left.append)
    spike, rewind = Run.open(tmp_path).events
    assert (spike["kind"], spike["step"], spike["cause"]) == ("spike", 31, "data")
    assert (rewind["kind"], rewind["to"], rewind["skipped"]) == ("rewind", 20, [31])
    assert left == [20, 20]


def test_memory_is_bounded() -> None:
    """Snapshots are few, and only batches that one of them needs are kept."""
    guard, _ = run(batches(95), snapshots=2, every=10)
    assert len(guard._snapshots) == 2
    assert sorted(guard._batches) == list(range(81, 96))


def test_extras_are_rewound() -> None:
    """A scheduler stands where it would have without the spike."""
    training, data = Training(), batches(40)
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 5, 0.9)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = training.step(batch)
        scheduler.step()
        return loss

    data[30] = poisoned(data[30])
    guard = SpikeGuard(training.model, training.optimizer, step, every=10, extras=[scheduler])
    for batch in data:
        guard(batch)
    assert scheduler.last_epoch == 39  # one batch was left out


@pytest.mark.parametrize("wrong", [{"snapshots": 0}, {"every": 0}, {"window": 0}, {"z": 0}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    training = Training()
    with pytest.raises(ValueError, match="needs"):
        SpikeGuard(training.model, training.optimizer, training.step, **wrong)
