"""What a training does beside its steps: it saves and copies models, trains others, in threads, and goes on later."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from typer.testing import CliRunner

import ottava
import warm
from ottava.base.settings import ConfigError
from ottava.cli.app import app
from ottava.diagnose.diagnose import diagnose
from ottava.record.reader import Run
from ottava.watching.session import Watch


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def train(model: nn.Module, steps: int, rate: float = 0.1) -> list[Tensor]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=rate), []
    for step in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        losses.append(loss := model(x).square().mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_watched_model_is_saved_and_copied_without_its_watch(tmp_path: Path) -> None:
    """Also in the steps that are recorded for experiments; a pickle may be read where nobody has ottava."""
    model, saved, copies = network(), [], []
    with ottava.watch(model, tmp_path):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(7):
            y = model(torch.randn(8, 16))
            saved.append(pickle.dumps(model))
            copies.append(copy.deepcopy(model))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(Run.open(tmp_path).steps["step"]) == 7
    x = torch.randn(2, 16)
    for one, other in zip(saved, copies, strict=True):
        assert b"ottava" not in one
        # our pickle of this moment, so nothing of it is foreign
        loaded = pickle.loads(one)
        assert torch.equal(loaded(x), other(x))
        pickle.dumps(other)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_a_run_goes_on_behind_its_last_record(tmp_path: Path) -> None:
    for append, seen in ((False, 3), (True, 6)):
        with ottava.watch(model := network(), tmp_path / "run", append=append):
            train(model, 3)
        assert Run.open(tmp_path / "run").steps["step"].tolist() == [*range(1, seen + 1)]
    with ottava.watch(model, tmp_path / "run", append=True, step=1):  # it says so
        train(model, 1)
    assert Run.open(tmp_path / "run").steps["step"].tolist() == [1, 2]
    for step in (-1, 10**20):
        with pytest.raises(ConfigError, match=f"step is {step}; needs the optimizer steps done so far"):
            ottava.watch(network(), tmp_path / "other", step=step)
    assert not (tmp_path / "other").exists()


def test_the_command_goes_on_behind_the_last_record_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(2):\n    model(torch.ones(4, 8)).sum().backward()\n    optimizer.step()\n"
    )
    words = ["watch", "--out", str(tmp_path / "run")]
    for more, steps in (([], 2), (["--append"], 4), (["--append", "--step", "0"], 2)):
        ended = CliRunner().invoke(app, [*words, *more, "--", str(script)])
        assert ended.exit_code == 0, ended.output
        assert len(Run.open(tmp_path / "run").steps["step"]) == steps
    ended = CliRunner().invoke(app, [*words, "--append", "--step", "99999999999999999999", "--", str(script)])
    assert isinstance(ended.exception, ConfigError)
    assert len(Run.open(tmp_path / "run").steps["step"]) == 2


def test_a_model_without_a_layer_is_watched_and_said_to_be(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(16), nn.ReLU())
    with ottava.watch(model, tmp_path / "run"):
        train(model, 2)
    run = Run.open(tmp_path / "run")
    assert len(run.steps["step"]) == 2
    assert "the model has no layer with a GEMM" in str(run.events)
    with ottava.watch(nn.ReLU(), tmp_path / "empty"):
        pass


@pytest.mark.parametrize("given", [True, False], ids=["one model", "every model"])
def test_a_watch_follows_one_thread(given: bool, tmp_path: Path) -> None:
    """The one that trains the given model; without one, the first whose optimizer steps."""
    model, other = network(), network()
    alone = train(copy.deepcopy(model), 12)
    with ottava.watch(model if given else None, tmp_path):
        if not given:
            train(model, 1, rate=0.0)
        thread = threading.Thread(target=train, args=(other, 12))
        thread.start()
        losses = train(model, 12)
        thread.join()
    assert all(map(torch.equal, losses, alone))
    run = Run.open(tmp_path)
    assert run.manifest["ended"] == "closed"
    assert len(run.steps["step"]) == 13 - given
    seen = torch.tensor(run.steps["loss"][1 - given :], dtype=torch.float32)
    assert torch.equal(seen[1:], torch.stack(losses).detach()[1:])  # the first is read before anybody has stepped


def test_a_watch_moves_to_the_next_thread(tmp_path: Path) -> None:
    with ottava.watch(None, tmp_path):
        for _ in range(2):
            thread = threading.Thread(target=train, args=(network(), 3))
            thread.start()
            thread.join()
    assert len(Run.open(tmp_path).steps["step"]) == 6
    assert not torch.overrides._get_current_function_mode_stack()  # this thread began a trace, which another one ended


def test_a_second_model_in_the_first_step_has_written_nothing(tmp_path: Path) -> None:
    """A GAN's discriminator runs before its generator is known."""
    first, second = nn.Linear(4, 1), nn.Linear(2, 4)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    with ottava.watch(None, tmp_path):
        for _ in range(3):
            loss = first(torch.randn(8, 4)).mean() - first(second(torch.randn(8, 2)).detach()).mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss = first(second(torch.randn(8, 2))).mean()
    steps = Run.open(tmp_path).steps
    assert steps["optimizer_steps"].tolist() == [1.0] * 6


def test_models_that_follow_each_other_without_an_optimizer(tmp_path: Path) -> None:
    """Also where a watch with a budget looks at few steps: nobody but the model tells when the next one begins."""
    with ottava.watch(None, tmp_path, max_overhead=0.001):
        for _ in range(2):
            model = nn.Linear(16, 4)
            for _ in range(30):
                model.zero_grad()
                model(torch.randn(8, 16)).square().mean().backward()
                for p in model.parameters():
                    p.data.sub_(p.grad, alpha=0.1)
    assert len(Run.open(tmp_path).steps["step"]) >= 58  # of the last step of each model nothing tells


LONELY = """
import random, sys
import torch
import ottava
import warm

random.seed(0)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.LazyLinear(32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
step = torch.compile(lambda: optimizer.step(), backend="aot_eager") if "compiled" in sys.argv else optimizer.step
watch = ottava.watch(model, sys.argv[2]) if sys.argv[1] == "watched" else None
for _ in range(6):
    model(torch.randn(8, 16)).square().mean().backward()
    step()
    optimizer.zero_grad()
if watch:
    watch.close()
print(random.random(), torch.rand(()).item(), *(p.detach().double().sum().item().hex() for p in model.parameters()))
"""


@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_lazy_layers_compiled_steps_and_pythons_random(how: str, tmp_path: Path) -> None:
    """A process of its own: rich draws from `random` when it is imported. Dynamo must not trace what a step tells."""
    script = tmp_path / "train.py"
    script.write_text(LONELY)
    runs = [warm.run([str(script), word, str(tmp_path / "run"), how]) for word in ("unwatched", "watched")]
    assert [run.returncode for run in runs] == [0, 0], runs[1].stderr
    assert runs[0].stdout == runs[1].stdout
    assert len(Run.open(tmp_path / "run").steps["step"]) >= 5  # of a compiled step the next forward tells


def test_a_dict_of_parameters_is_what_the_model_runs_with(tmp_path: Path) -> None:
    model = network()
    held = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(held.values(), lr=1e-2)
    with ottava.watch(model, tmp_path):
        for _ in range(12):
            x = torch.randn(8, 16)
            (torch.func.functional_call(model, held, (x,)) - x[:, :4]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert diagnose(Run.open(tmp_path)).findings == []


def test_warnings_that_are_errors_and_a_script_that_leaves_in_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "OWN", (UserWarning,))
    model = nn.Linear(16, 4)
    with warnings.catch_warnings(), ottava.watch(model, tmp_path / "warned") as seen:
        warnings.simplefilter("error")
        seen.modules.looked = lambda: warnings.warn("of the watch's own", stacklevel=1)  # type: ignore[method-assign]
        train(model, 4)
    assert "the watch failed: UserWarning" in Run.open(tmp_path / "warned").manifest["ended"]

    class Counted(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 8:
                raise SystemExit
            return super().forward(x)

    with ottava.watch(model := Counted(16, 4), tmp_path / "counted"):
        train(model, 7)
    assert len(Run.open(tmp_path / "counted").steps["step"]) == 7


def test_selective_checkpointing_counts_no_operation_of_the_watch(tmp_path: Path) -> None:
    """A dispatch mode, in which the hooks of a block run, too."""

    def policy(_: object, operation: object, *__: object, **___: object) -> CheckpointPolicy:
        saved = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def run(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        first, block = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        optimizer = torch.optim.SGD([*first.parameters(), *block.parameters()], lr=0.05)
        with ottava.watch(None, tmp_path) if watched else nullcontext():
            for _ in range(7):
                contexts = partial(create_selective_checkpoint_contexts, policy)
                y = checkpoint(block, first(torch.randn(8, 16)), use_reentrant=False, context_fn=contexts)
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in block.parameters()]

    assert all(map(torch.equal, run(True), run(False)))
    run_of = Run.open(tmp_path)
    assert (run_of.manifest["ended"], len(run_of.steps["step"])) == ("closed", 7)
