"""A watched run from its first step to its end."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ottava
import warm
from ottava.base.settings import ConfigError
from ottava.diagnose.diagnose import diagnose
from ottava.experiments.program import Recorder
from ottava.record.reader import Run
from ottava.watching.checks import Checks
from ottava.watching.collector import Collector
from ottava.watching.config import WatchConfig
from ottava.watching.doors import DoorTap
from ottava.watching.functional import FunctionalTap
from ottava.watching.loss import LossTap
from ottava.watching.modules import ModuleNames, ModuleTap
from ottava.watching.session import Watch, watch
from ottava.watching.training import TrainingTap

Batch = Callable[[int], Tensor]


def build(recipe: str | None = "tensorwise") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64)).bfloat16()
    if recipe is not None:
        ottava.convert(model, recipe)
    return model


def batch(step: int) -> Tensor:
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(step)).bfloat16()


def train(model: nn.Module, steps: int = 6, *, data: Batch = batch, micro_batches: int = 1) -> list[float]:
    """Losses of a plain loop that knows nothing of any watch."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(1, steps + 1):
        for micro in range(micro_batches):
            x = data(100 * step + micro)
            loss = (model(x) - x).float().square().mean() / micro_batches
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def watched(folder: Path, steps: int, model: nn.Module | None = None, *, data: Batch = batch, **settings: Any) -> Run:
    """What that loop leaves under a watch."""
    model = model or build()
    with watch(model, folder, **settings):
        train(model, steps, data=data)
    return Run.open(folder)


@pytest.mark.parametrize(
    "recipe, settings",
    [("delayed", {}), *((r, {"every": 1, "sample": 1, "recipes": ("nvfp4", "delayed")}) for r in (None, "nvfp4"))],
)
def test_training_is_bit_for_bit_the_same(recipe: str | None, settings: dict[str, Any], tmp_path: Path) -> None:
    """Losses, weights and scaling state, with dropout and stochastic rounding drawing random numbers."""
    bare, watched = build(recipe), build(recipe)
    expected = train(bare)
    with watch(watched, tmp_path / "run", **settings):
        assert train(watched) == expected
    ours, theirs = watched.state_dict(), bare.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_steps_losses_and_looks_are_on_record(tmp_path: Path) -> None:
    """Without a word from the training loop."""
    model = build()
    with watch(model, tmp_path / "run", every=4) as seen:
        losses = train(model, 9)
    run = Run.open(seen.folder)
    assert run.steps["step"].tolist() == list(range(1, 10))
    assert run.steps["loss"] == pytest.approx(losses, rel=1e-6)
    assert (run.steps["seconds"] > 0).all()
    assert sorted(set(run.table()["step"].tolist())) == [1, 2, 4, 8]
    assert {(key.layer, key.tensor) for key in run.table().slots()} == {
        (layer, tensor) for layer in ("0", "3") for tensor in ("input", "weight", "grad_output")
    }
    assert run.manifest["coverage"] == {"linear": 2, "seen": 2, "skipped": []}
    assert run.manifest["overhead"]["looks"] == 4
    assert 0 < run.manifest["overhead"]["share"] < 1


def test_what_is_logged_has_the_last_word(tmp_path: Path) -> None:
    """Loss, learning rate, tokens, anything."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, tmp_path / "run") as seen:
        model(batch(0)).float().mean().backward()
        seen.log(loss=42.0, lr=0.3, max_logit=3.5)
        optimizer.step()
        model(batch(1)).float().mean().backward()
        optimizer.step()
    steps = Run.open(seen.folder).steps
    assert (steps["loss"][0], steps["lr"][0], steps["max_logit"][0]) == (42.0, 0.3, 3.5)
    assert steps["lr"][1] == 0.1, "the optimizer's"


def test_accumulation_is_one_step_with_the_mean_loss(tmp_path: Path) -> None:
    """Micro-batches end where the optimizer steps."""
    model = build()
    with watch(model, tmp_path / "run", every=1, sample=1, loss="mean") as seen:
        losses = train(model, 2, micro_batches=3)
    run = Run.open(seen.folder)
    assert run.steps["loss"] == pytest.approx([np.mean(losses[:3]), np.mean(losses[3:])], rel=1e-6)
    casts = run.table().where(step=2, layer="0")
    assert dict(zip(casts["tensor"], casts.tallies.n_casts, strict=True)) == {"input": 3, "weight": 1, "grad_output": 3}


@pytest.mark.parametrize("loss", ["sum", "auto"])
def test_a_loop_that_divides_its_losses_says_so(loss: Any, tmp_path: Path) -> None:
    model = build()
    with watch(model, tmp_path / "run", loss=loss) as seen:
        losses = train(model, 2, micro_batches=3)
    assert Run.open(seen.folder).steps["loss"] == pytest.approx([sum(losses[:3]), sum(losses[3:])], rel=1e-6)


@pytest.mark.parametrize("division", ["none", "by number", "by tokens", "by tokens, scaled", "masked"])
def test_the_loss_of_a_step_is_read_from_the_graph(division: str, tmp_path: Path) -> None:
    """Of micro-batches with 2, 5 and 3 labels. What a mask hides is not read, so the mean of what came is recorded."""
    model, counts = nn.Linear(4, 6), (2, 5, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    torch.manual_seed(3)
    means, roots = [], []
    with watch(model, tmp_path / "run") as seen:
        for count in counts:
            logits, labels = model(torch.randn(8, 4)), torch.arange(8) % 6
            labels[count:] = -100
            whole = nn.functional.cross_entropy(logits, labels, reduction="sum")
            means.append(whole.item() / count)
            if division.startswith("by tokens"):
                loss = whole / torch.tensor(sum(counts))
            elif division == "masked":
                loss = (nn.functional.cross_entropy(logits, labels, reduction="none") * (labels >= 0)).sum() / count
            else:
                loss = nn.functional.cross_entropy(logits, labels) * (1.0 if division == "none" else 1 / len(counts))
            roots.append(loss.item())
            (scaler.scale(loss) if division.endswith("scaled") else loss).backward()
        optimizer.step()
    wanted = np.average(means, weights=counts) if division.startswith("by tokens") else np.mean(means)
    assert Run.open(seen.folder).steps["loss"] == pytest.approx([wanted], rel=1e-5)


def test_outputs_of_our_layers_are_seen_too(tmp_path: Path) -> None:
    """X, W and dY at the doors, once; Y, dX and dW from outside."""
    run = watched(tmp_path / "run", 1, every=1, sample=1, tensors=("X", "W", "dY", "Y", "dX", "dW"))
    sources: dict[str, set[str]] = {}
    for key in run.table().slots():
        sources.setdefault(key.tensor, set()).add(key.source)
    assert sources.pop("output") == sources.pop("grad_input") == sources.pop("grad_weight") == {"hook"}
    assert set(map(tuple, sources.values())) == {("door",)}


def test_experts_are_asked_for_by_number(tmp_path: Path) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(2, 8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([nn.functional.linear(part, self.up[e]) for e, part in enumerate(x.chunk(2))])

    model = nn.ModuleDict({"experts": Experts()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, tmp_path / "run", every=1, layers="*.up.1") as seen:
        model["experts"](torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    run = Run.open(seen.folder)
    assert {(key.layer, key.tensor) for key in run.table().slots()} == {
        ("experts.up.1", tensor) for tensor in ("input", "weight", "grad_output")
    }
    with pytest.raises(ConfigError, match=r"\*\.up\.2"):
        watch(model, tmp_path / "none", layers="*.up.2")


def test_two_optimizers_are_one_step(tmp_path: Path) -> None:
    """Weights and biases in an optimizer each: the first that steps ends the step."""
    model = build()
    pair = [torch.optim.SGD([layer.weight, layer.bias], lr=0.1) for layer in (model[0], model[3])]
    with watch(model, tmp_path / "run") as seen:
        for step in range(3):
            model(batch(step)).float().mean().backward()
            for optimizer in pair:
                optimizer.step()
    assert Run.open(seen.folder).steps["step"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "compiled", [torch.jit.script, lambda m: torch.jit.trace(m, torch.zeros(2, 3, dtype=torch.long))]
)
def test_a_scripted_part_of_a_model_ends_no_watch(compiled: Any, tmp_path: Path) -> None:
    inner = compiled(nn.Embedding(9, 4))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = inner, nn.Linear(4, 4)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.inner(ids))
            return out

    model, ids = Net(), torch.arange(6).view(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, tmp_path / "run"):
        for _ in range(3):
            model(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = Run.open(tmp_path / "run")
    assert run.steps["step"].tolist() == [1, 2, 3]
    assert len(run.trace) == 2
    assert not any("trace of this step" in str(line) for line in run.experiments)


@pytest.mark.parametrize("how", ["by hand", "by hand, past the version", "torch's"])
def test_an_optimizer_by_hand_ends_steps_too(how: str, tmp_path: Path) -> None:
    """At the next forward with a gradient, or at the end; and an optimizer of torch's ends a step once."""
    torchs = how == "torch's"
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, tmp_path / "run"):
        for _ in range(5):
            for _ in range(2):
                model(torch.randn(8, 4)).square().mean().backward()
            with torch.no_grad():
                model(torch.randn(8, 4))
                for p in () if torchs else model.parameters():
                    assert p.grad is not None
                    (p.data if "version" in how else p).sub_(p.grad, alpha=0.1)
            if torchs:
                optimizer.step()
            model.zero_grad()
    run = Run.open(tmp_path / "run")
    assert run.steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert np.isfinite(run.steps["loss"]).all()
    assert run.steps["backwards"].tolist() == [2.0] * 5
    assert diagnose(run).verdict == "none"


@pytest.mark.parametrize("how", ["a gradient", "the engine itself"])
def test_a_stage_of_a_pipeline_has_steps_without_a_loss(how: str, tmp_path: Path) -> None:
    """Its backward starts from a gradient, or past torch.autograd.backward; two optimizers still share a step."""
    model = build()
    parts = [part for part in model if list(part.parameters())]
    first, second = (torch.optim.SGD(part.parameters(), lr=1e-2) for part in (parts[0], parts[-1]))
    engine: Any = torch.autograd.Variable._execution_engine
    with watch(model, tmp_path / "run", every=3) as seen:
        seen._light_every = 2  # in some steps no hook is there
        for step in range(7):
            y = model(batch(step))
            if how == "a gradient":
                y.backward(torch.ones_like(y))
            else:
                engine.run_backward((y,), (torch.ones_like(y),), False, False, (), True, True)
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        assert seen.steps_done == 7
    table = Run.open(tmp_path / "run").table(phase="full")
    assert set(table["step"].tolist()) == {1, 2, 3, 6}
    assert set(table.tallies.n_casts) == {1}


def test_another_model_s_optimizer_ends_no_step(tmp_path: Path) -> None:
    """Two models that train in turn in one process."""
    mine, other = build(), build()
    with watch(mine, tmp_path / "run", every=1) as seen:
        train(other, 3)
        train(mine, 2)
    run = Run.open(seen.folder)
    assert len(run.steps["step"]) == 2
    assert run.table().metric("amax").size == 2 * 6


def poisoned(step: int) -> Tensor:
    x = batch(step)
    return x * 300 if step // 100 == 30 else x


def test_a_spike_is_followed_step_by_step_and_its_past_is_kept(tmp_path: Path) -> None:
    """A trigger, the amaxes of the steps before, and full looks at the steps after."""
    run = watched(tmp_path / "run", 40, data=poisoned, every=1000, triggers={"burst": 3}, flight=8)
    events = [event for event in run.events if event["kind"] != "jump"]
    assert [event["kind"] for event in events[:4]] == ["trigger", "trigger", "flight", "burst"]
    assert [(e["step"], e["reason"]) for e in events[:2]] == [(30, "loss_z"), (30, "scale_drift")]
    assert sorted(set(run.table()["step"].tolist())) == [1, 2, 4, 8, 16, 31, 32, 33]
    light = run.table(phase="light").where(layer="0", tensor="input")
    assert light["step"].tolist() == list(range(23, 31))
    assert light.metric("amax")[-1] > 100 * light.metric("amax")[0]


def test_an_infinity_is_a_trigger(tmp_path: Path) -> None:
    """Seen without a full look, and named."""

    def broken(step: int) -> Tensor:
        x = batch(step)
        x[0, 0] = math.inf if step // 100 == 20 else 0.0
        return x

    run = watched(tmp_path / "run", 21, data=broken, every=1000)
    triggers = [event for event in run.events if event["kind"] == "trigger"]
    assert {"nonfinite"} == {event["reason"] for event in triggers if event["step"] == 20}
    assert any(event.get("layer") == "0" and event.get("tensor") == "input" for event in triggers)


def test_a_crash_leaves_the_last_steps_on_record(tmp_path: Path) -> None:
    """The exception passes on; what came before it is there."""
    model = build()

    def crash() -> None:
        with watch(model, tmp_path / "run", every=1000):
            train(model, 12)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    run = Run.open(tmp_path / "run")
    assert run.events[-1]["kind"] == "flight"
    assert "ZeroDivisionError" in run.events[-1]["why"]
    assert sorted(set(run.table(phase="light")["step"].tolist())) == list(range(1, 13))


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """After close: no hook of any kind, and torch's backward is torch's again; closing twice is closing once."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    def hooks() -> tuple[int, ...]:
        found = (module._global_forward_hooks, module._global_forward_pre_hooks, optimizer._global_optimizer_post_hooks)
        return tuple(len(hooks) for hooks in found)

    before, backward = hooks(), torch.autograd.backward
    seen = watch(build(), tmp_path / "run")
    assert hooks() != before
    seen.close()
    seen.close()
    assert hooks() == before
    assert torch.autograd.backward is backward


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    """Loud, with the names there are; TransformerEngine's inspection logs nothing in silence."""
    model = build()
    with pytest.raises(ConfigError, match=r"'\*\.fc2' matches no layer; the layers are: 0, 3"):
        watch(model, tmp_path / "run", layers=("0", "*.fc2"))
    assert not (tmp_path / "run").exists()
    seen = watch(None, tmp_path / "run", layers=("0", "*.fc2"))
    with pytest.raises(ConfigError, match=r"'\*\.fc2' matches no layer; the layers are: 0, 3"):
        train(model, 2)
    seen.close()


def test_a_crash_without_a_context_leaves_the_last_steps_too(tmp_path: Path) -> None:
    """The script never hears of the watch again."""
    script = (
        "import torch, ottava\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"ottava.watch(model, {str(tmp_path / 'run')!r}, every=1000)\n"
        "for step in range(5):\n"
        "    model(torch.randn(8, 64)).sum().backward()\n"
        "    optimizer.step()\n"
        "raise RuntimeError('out of luck')\n"
    )
    ended = warm.run(["-c", script])
    assert ended.returncode == 1
    assert "out of luck" in ended.stderr
    run = Run.open(tmp_path / "run")
    assert "out of luck" in run.events[-1]["why"]
    assert sorted(set(run.table(phase="light")["step"].tolist())) == [1, 2, 3, 4, 5]


def test_weights_become_fp8_under_a_watch(tmp_path: Path) -> None:
    """torch swaps no parameter to which a watch has a weak reference."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, ottava\n"
        "model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)).bfloat16()\n"
        "for p in model.parameters():\n    torch.nn.init.normal_(p, std=0.1)\n"
        "ottava.convert(model, 'blockwise', weights='fp8')\n"
        "optimizer = ottava.optim.AdamW(model.parameters(), lr=1e-3, master='fp32')\n"
        "for _ in range(2):\n"
        "    model(torch.randn(32, 128, dtype=torch.bfloat16)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    ended = warm.run(["-m", "ottava", "watch", "--out", str(tmp_path / "run"), "--", str(script)])
    assert ended.returncode == 0, ended.stderr
    assert Run.open(tmp_path / "run").steps["step"].tolist() == [1, 2]


def test_a_resumed_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    """Steps go on counting, and the resumption is an event."""
    model = build()
    watched(tmp_path / "run", 4, model, every=2)
    run = watched(tmp_path / "run", 2, model, every=2, step=4, append=True)
    assert run.steps["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert sorted(set(run.table()["step"].tolist())) == [1, 2, 4, 6]
    assert [(event["kind"], event["step"]) for event in run.events] == [("resumed", 4)]


def test_steps_after_the_checkpoint_are_replaced(tmp_path: Path) -> None:
    """Killed at step 5, resumed from step 3: steps 4 and 5 are those of the second process, once."""
    model = build()
    watched(tmp_path / "run", 5, model, every=1)
    run = watched(tmp_path / "run", 1, model, every=1, step=3, append=True)
    assert run.steps["step"].tolist() == [1, 2, 3, 4]
    table = run.table().where(layer="0", tensor="input")
    assert table["step"].tolist() == [1, 2, 3, 4]


def test_a_resumed_run_finishes_its_burst(tmp_path: Path) -> None:
    """Killed two steps into it: the steps looked at are those of the run that was not; and so is the pace of looks."""
    settings = {"every": 1000, "triggers": {"burst": 5}}
    looked = []
    for name, stops in (("whole", (40,)), ("resumed", (32, 40))):
        model, done = build(), 0
        for stop in stops:
            settings["data"] = lambda step, start=done: poisoned(step + 100 * start)
            run = watched(tmp_path / name, stop - done, model, **settings, step=done, append=done > 0)
            done = stop
        looked.append(sorted(set(run.table()["step"].tolist())))
    assert looked[0] == looked[1] == [1, 2, 4, 8, 16, 31, 32, 33, 34, 35]


def test_a_rank_resumes_its_own_bursts_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of rank 0 are not its own; and a folder that nobody has begun yet holds none."""
    model = build()
    with watch(model, tmp_path / "run", every=1000, triggers={"burst": 5}) as seen:
        train(model, 31, data=poisoned)
    assert seen.schedule.burst_until == 35
    monkeypatch.setenv("RANK", "1")
    for folder in ("run", "new"):
        with watch(model, tmp_path / folder, every=1000, step=31, append=True) as seen:
            assert (seen.rank, seen.schedule.burst_until) == (1, 0)


def test_a_resumed_run_keeps_the_pace_of_its_looks(tmp_path: Path) -> None:
    """What was too dear before is not tried again."""
    model = build()
    with watch(model, tmp_path / "run", max_overhead=1e-6) as seen:
        train(model, 160)
    assert seen.schedule.every == 100
    with watch(model, tmp_path / "run", step=160, append=True) as seen:
        assert seen.schedule.every == 100
    with watch(model, tmp_path / "run", step=160, append=True, every=20) as seen:
        assert seen.schedule.every == 20


def test_a_resumed_run_measures_the_rows_whose_turn_it_is(tmp_path: Path) -> None:
    """Of a tall weight that nobody changes each look measures others; a resumed run goes on with the third."""
    model, found = nn.Linear(8, 2048), {}
    for name, stops in (("whole", (4,)), ("resumed", (2, 4))):
        for start, stop in itertools.pairwise((0, *stops)):
            with watch(model, tmp_path / name, every=1, step=start, append=start > 0) as seen:
                for _ in range(stop - start):
                    model(torch.ones(1, 8))
                    seen.step()
        found[name] = Run.open(tmp_path / name).table().where(tensor="weight", direction="row").metric("cosine")
    assert len(set(found["whole"].tolist())) == 4
    assert found["resumed"].tolist() == found["whole"].tolist()


def test_overhead_above_the_limit_makes_looks_rarer(tmp_path: Path) -> None:
    """The distance doubles, so that two runs still share steps; an event says so."""
    run = watched(tmp_path / "run", 450, max_overhead=1e-6)
    changes = [(event["light_every"], event["every"]) for event in run.events if event["kind"] == "overhead"]
    assert changes[:6] == [(2**i, 50) for i in range(1, 7)]  # amaxes first, at 4, 8, 16, 32, 50 and 100
    assert changes[6:] == [(64, 100), (64, 200), (64, 400)]  # at 150, 200 and 400
    assert sorted(set(run.table()["step"].tolist())) == [1, 2, 4, 8, 16, 32, 50, 100, 150, 200, 400]


def test_a_watch_that_may_not_look_early_pays_first(tmp_path: Path) -> None:
    """After the first look and shadow step nothing comes unpaid; memory has what files have."""
    model = build()
    with watch(model, tmp_path / "run", max_overhead=1e-6, early=False) as seen:
        train(model, 120)
        recent = seen.recent()
    run = Run.open(seen.folder)
    assert set(run.table()["step"].tolist()) == {1}
    assert [e["step"] for e in run.experiments] == [5]
    assert recent.steps["loss"].tolist() == run.steps["loss"].tolist()
    assert (len(recent.experiments), len(recent.table())) == (1, len(run.table()))
    rich = watched(tmp_path / "rich", 64, model, max_overhead=1.0, early=False)
    assert set(rich.table()["step"].tolist()) > {1}


def test_a_step_without_budget_keeps_its_loss_alone(tmp_path: Path) -> None:
    """Facts come as often as they are paid for; nothing that an idle step leaves out looks like a fault."""
    bare, model = build(), build()
    expected = train(bare, 130, micro_batches=2)
    with watch(model, tmp_path / "run", max_overhead=1e-6, early=False, shadow=0, flight=16, loss="sum") as seen:
        hook = register_optimizer_step_pre_hook(lambda *_: seen.want_norm() if seen.steps_done == 70 else None)
        losses = train(model, 130, micro_batches=2)
        hook.remove()
    assert losses == expected
    steps = Run.open(seen.folder).steps
    told = {name: set(steps["step"][np.isfinite(steps[name])].tolist()) for name in ("loss", "lr", "input_hash")}
    assert told["loss"] == set(range(1, 131))
    assert told["lr"] == told["input_hash"] == {1, 2, 3, 4, *range(16, 129, 16)}
    assert np.allclose(steps["loss"], np.array(losses).reshape(-1, 2).sum(1), rtol=1e-6)
    for name, value in {"written": 0.0, "extra_steps": 0.0, "forwards": 2.0, "backwards": 2.0}.items():
        assert set(steps[name][np.isfinite(steps[name])].tolist()) == {value}, name


def test_what_goes_wrong_in_an_idle_step_is_counted_later(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, tmp_path / "run", max_overhead=1e-6, early=False, shadow=0, flight=16) as seen:
        for step in range(1, 33):
            model(batch(step)).float().square().mean().backward()
            optimizer.step()
            if step == 20:
                optimizer.step()
            optimizer.zero_grad()
    steps = Run.open(seen.folder).steps
    extra = dict(zip(steps["step"].tolist(), steps["extra_steps"].tolist(), strict=True))
    assert (extra[16], extra[32]) == (0.0, 1.0)


def test_settings_and_host_are_in_the_manifest(tmp_path: Path) -> None:
    """Enough to do it again."""
    with watch(build(), tmp_path / "run", every=3) as seen:
        seen.describe(config={"lr": 1e-3})
    manifest = Run.open(seen.folder).manifest
    assert WatchConfig.load(manifest["settings"]).every == 3
    assert manifest["config"] == {"lr": 1e-3}
    assert manifest["versions"]["torch"] == torch.__version__
    assert isinstance(seen, Watch)


def test_operands_that_disagree_are_an_event(tmp_path: Path) -> None:
    """A cached cast of a weight that has changed since: the signature of TransformerEngine #1047."""
    model = build()
    door = model[0].quantizers.weight
    old = door(model[0].weight, *(ottava.RECIPES["tensorwise"].fprop.rhs,) * 2)
    with watch(model, tmp_path / "run", every=1) as seen:
        train(model, 1)
        door.forward = lambda *args, **kwargs: old
        model[0].weight.data.copy_(torch.randn(128, 64))
        train(model, 2)
    checks = [event for event in Run.open(seen.folder).events if event["kind"] == "check"]
    assert [(event["step"], event["check"], event["layer"], event["tensor"]) for event in checks] == [
        (2, "stale_weight", "0", "weight")
    ]


@pytest.mark.parametrize("kept", ["", "output of the model", "loss"])
def test_a_loop_that_stops_at_nan_before_its_backward_is_no_run_without_a_fault(tmp_path: Path, kept: str) -> None:
    """The script has the loss still, or the watch alone the output; a last look at a sound model is neither."""
    model = build(None)
    with watch(model, tmp_path / "run"):
        train(model, 8)
        with torch.no_grad():
            model[3].bias[:] = 0.0 if not kept else math.nan
        loss = model(batch(9)).float().square().mean()
        loss = loss if kept == "loss" else float(loss)
    answer = diagnose(run := Run.open(tmp_path / "run"))
    assert run.manifest.get("unfinished") == ({"step": 9, "what": kept} if kept else None)
    assert (f"before a backward: its {kept} is not finite" in answer.sentence) == bool(kept)
    assert answer.event == ("The loss is not finite from step 9 on." if kept else "")
    assert torch.autograd.backward.__code__.co_filename != inspect.getsourcefile(LossTap)  # torch's own again


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("recipe", (None, "delayed", "nvfp4"), ids=str)
def test_another_default_dtype_changes_nothing_of_a_watch(
    tmp_path: Path, dtype: torch.dtype, recipe: str | None
) -> None:
    """torch.set_default_dtype, as models of another precision are made: the watch's own numbers stay FP32."""
    torch.set_default_dtype(dtype)
    try:
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8))
        if recipe is not None:
            ottava.convert(model, recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with ottava.watch(model, tmp_path):
            for _ in range(12):
                nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(8, (32,))).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)
    run = Run.open(tmp_path)
    assert run.manifest["ended"] == "closed"
    assert len(run.steps["step"]) == 12
    assert not any(event["kind"] == "refused" for event in run.events)


class OwnProduct(nn.Module):
    """A module whose own code multiplies, so that the watch looks into it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(32))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


@pytest.mark.parametrize(
    ("room", "name"),
    (
        (TrainingTap, "_note_restart"),
        (TrainingTap, "_note_mode"),
        (TrainingTap, "wrote"),
        (Collector, "simulate"),
        (Collector, "finished"),
        (Collector, "drain"),
        (ModuleNames, "learn"),
        (ModuleTap, "_doors_tell"),
        (LossTap, "_as_it_was"),
        (DoorTap, "_counts"),
        (FunctionalTap, "_saw"),
        (Checks, "__call__"),
        (Recorder, "_before"),
        (Recorder, "_after"),
        (Recorder, "_check"),
        (Recorder, "_know"),
        (Watch, "_saw_loss"),
        (Watch, "_end_step"),
        (Watch, "_describe_run"),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_training_outlives_an_error_of_its_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: type, name: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("index_add_(): another dtype")

    monkeypatch.setattr(Watch, "OWN", (RuntimeError,))
    monkeypatch.setattr(room, name, broken)
    model = nn.Sequential(nn.Linear(32, 32), OwnProduct(), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    ottava.convert(model[2], "delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward = torch.autograd.backward
    with ottava.watch(None if room is ModuleNames else model, tmp_path):
        for _ in range(3):
            model(torch.randn(32, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = Run.open(tmp_path)
    assert run.manifest["ended"].startswith(
        "the watch failed: RuntimeError: index_add_(): another dtype (test_session.py"
    )
    assert "the training goes on" in str(run.events)
    assert not model._forward_hooks
    assert torch.autograd.backward is backward
    assert not torch.overrides._get_current_function_mode_stack()
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("closure", (False, True))
def test_an_error_of_a_callback_is_the_training_s_and_one_behind_a_closure_the_watch_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closure: bool
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("stop here")

    monkeypatch.setattr(Watch, "OWN", (RuntimeError,))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        return loss

    with ottava.watch(model, tmp_path) as run:
        if closure:
            monkeypatch.setattr(TrainingTap, "before", broken)
            assert optimizer.step(step) is not None
        else:
            run.on_look(broken)
            step()
            with pytest.raises(RuntimeError, match="stop here"):
                optimizer.step()
    assert Run.open(tmp_path).manifest["ended"].startswith("the watch failed") is closure
