"""What a watch notes around the casts: batches, updates, loops and modes; and that a loop without a fault is quiet."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ottava
from ottava.diagnose.compare import compare
from ottava.diagnose.diagnose import diagnose
from ottava.record.reader import Run


def run(folder: Path, **fault: Any) -> Run:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    model.train(not fault.get("eval"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ottava.watch(model, folder, every=2):
        for step in range(8):
            x, labels = torch.randn(64, 16), torch.randint(0, 4, (64,))
            x[0, 0] = float("inf") if step == fault.get("infinity") else x[0, 0]
            labels = torch.full_like(labels, -100) if step == fault.get("ignored") else labels
            torch.nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
            if fault.get("twice"):
                optimizer.step()
            if not fault.get("keep"):
                optimizer.zero_grad()
    return Run.open(folder)


def test_each_fault_of_a_loop_is_noted_and_a_clean_loop_is_quiet(tmp_path: Path) -> None:
    def noted(name: str, **fault: Any) -> set[str]:
        seen = run(tmp_path / name, **fault)
        kept = {
            column: seen.steps[column][1:].tolist() for column in ("extra_steps", "kept_gradient", "input_nonfinite")
        }
        modes = {line["training"] for line in seen.training if line["kind"] == "mode"}
        ignored = seen.steps["labels_ignored_pct"].tolist()
        return {name for name, values in kept.items() if any(values)} | {
            *(["evaluation mode"] if modes == {False} else []),
            *(["ignored"] if max(ignored) == 100 else []),
        }

    assert noted("clean") == set()
    assert noted("twice", twice=True) == {"extra_steps"}
    assert noted("keep", keep=True) == {"kept_gradient"}
    assert noted("eval", eval=True) == {"evaluation mode"}
    assert noted("infinity", infinity=3) == {"input_nonfinite"}
    assert noted("ignored", ignored=3) == {"ignored"}


def test_a_gradient_is_kept_by_the_optimizer_that_steps(tmp_path: Path) -> None:
    """Players that clear before their own turn, rounds with new models and optimizers; and one that never clears."""

    def kept(name: str, forgets: bool = False) -> list[float]:
        living: list[object] = []
        with ottava.watch(None, tmp_path / name):
            for _ in range(2):  # rounds, of which the script keeps everything
                players = [torch.nn.Linear(8, 8) for _ in range(3)]
                optimizers = [torch.optim.Adam(player.parameters()) for player in players]
                living += [players, optimizers]
                for _ in range(4):
                    for i, optimizer in enumerate(optimizers):
                        loss = sum((player(torch.randn(4, 8)).square().mean() for player in players), torch.tensor(0.0))
                        if not (forgets and i == 1):
                            optimizer.zero_grad()
                        loss.backward()  # adds to the gradients of the others
                        optimizer.step()
        values: list[float] = Run.open(tmp_path / name).steps["kept_gradient"].tolist()
        return values

    assert not any(value > 0 for value in kept("clean"))
    assert sum(value > 0 for value in kept("forgets", forgets=True)) == 2 * 3


COUNTS = (
    *("input_nonfinite", "label_nonfinite", "labels_ignored_pct", "extra_steps", "restarts", "shared_parameters"),
)
"""What a watch counts of a loop; a healthy one has 0 of each."""


def test_a_copy_that_gives_its_gradients_to_the_model_keeps_none(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ottava.watch(model, tmp_path / "run"):
        for _ in range(10):
            copied = copy.deepcopy(model)
            copied(torch.randn(8, 16)).square().mean().backward()
            for p, q in zip(model.parameters(), copied.parameters(), strict=True):
                p.grad = q.grad
            optimizer.step()
    assert not diagnose(Run.open(tmp_path / "run")).findings


@pytest.mark.parametrize("closes", [False, True])
def test_an_optimizer_that_calls_the_step_behind_its_own_steps_once(closes: bool, tmp_path: Path) -> None:
    """torch wraps `step` of each class of which an optimizer was made, and so calls hooks twice."""

    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["number"] == 4:
                raise RuntimeError("once")
            return super().step(closure)

    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = Mine(model.parameters(), lr=0.05)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        return loss

    with ottava.watch(model, tmp_path / "run"):
        for number in range(10):
            optimizer.param_groups[0]["number"] = number
            if not closes:
                closure()
            with contextlib.suppress(RuntimeError):
                optimizer.step(closure if closes else None)
    steps = Run.open(tmp_path / "run").steps
    assert (len(steps["step"]), max(steps["optimizer_steps"]), sum(steps["extra_steps"])) == (9, 1.0, 0.0)


def test_a_search_along_a_line_is_one_step(tmp_path: Path) -> None:
    """L-BFGS moves the weights between the forwards of its closure."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(16, 16), torch.randn(64, 16), torch.randn(64, 16)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=6, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    with ottava.watch(model, tmp_path / "run") as watch:
        for _ in range(8):
            optimizer.step(closure)
    assert len(Run.open(watch.folder).steps["step"]) == 8


def test_a_weight_that_takes_another_s_place_ends_as_it_began(tmp_path: Path) -> None:
    """The optimizer is older than the second layer. A frozen copy has the same names, and ends as it began, too."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    copied = copy.deepcopy(net).requires_grad_(False)
    with ottava.watch(None, tmp_path / "run") as watch:
        for step in range(10):
            copied(torch.randn(4, 8))
            if step == 3:
                net[1] = torch.nn.Linear(8, 8)
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    assert Run.open(watch.folder).manifest["unmoved"] == ["1.bias", "1.weight"]


def test_a_zero_is_written_where_it_was_counted(tmp_path: Path) -> None:
    """Where no optimizer was seen, none of its mistakes was looked for, and nothing is written."""
    clean = run(tmp_path / "clean")
    assert {name: set(clean.steps[name][1:]) for name in COUNTS} == {name: {0.0} for name in COUNTS}
    model = torch.nn.Linear(16, 4)
    with ottava.watch(model, tmp_path / "unseen") as session:
        for _ in range(3):
            model(torch.randn(8, 16)).square().mean().backward()
            session.step()
    unseen = Run.open(tmp_path / "unseen")
    assert not {"extra_steps", "restarts", "shared_parameters"} & unseen.steps.keys()


def test_equal_batches_have_equal_hashes_and_others_not(tmp_path: Path) -> None:
    one, again = run(tmp_path / "one").steps, run(tmp_path / "again").steps
    assert one["input_hash"].tolist() == again["input_hash"].tolist()
    assert one["label_hash"].tolist() == again["label_hash"].tolist()
    assert len(set(one["input_hash"])) == 8
    good, other = Run.open(tmp_path / "one"), run(tmp_path / "other", infinity=3)
    assert compare(good, Run.open(tmp_path / "again")).data == {"step": None, "what": "", "share_pct": 0.0}
    found = compare(good, other)
    assert (found.data or {})["step"] == 4
    assert "inputs differ from step 4 on" in found.verdict


class Reader(torch.nn.Module):
    """Words through equal blocks; a parameter of its own, an additive mask as an input, a side branch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(16, 32), torch.nn.Linear(32, 16, bias=False)
        self.shift = torch.nn.Parameter(torch.zeros(32, 2).fill_diagonal_(1.0))
        block = torch.nn.Linear(32, 32)
        self.blocks = torch.nn.ModuleList(copy.deepcopy(block) for _ in range(2))
        self.side = torch.nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, *, cut: bool = False) -> torch.Tensor:
        x = self.words(ids) + self.shift.sum(1) + mask.exp().mean()
        for block in self.blocks:
            x = torch.relu(block(x))
        side = self.side(x)
        return self.head(x + (side.detach() if cut else side))


def read(folder: Path, fault: str = "") -> Run:
    torch.manual_seed(0)
    model = Reader()
    if fault == "copied head":
        model.head.weight.data.copy_(model.words.weight.data)
    ottava.convert(model, "tensorwise", filter=lambda name, layer: name != "side")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ottava.watch(model, folder, every=2):
        for _ in range(8):
            ids = torch.randint(0, 16, (4, 8))
            labels = {"leak": ids, "constant": torch.ones_like(ids)}.get(fault, (3 * ids) % 16)
            mask = torch.zeros(4, 8).masked_fill(torch.arange(8) > 5, float("-inf"))
            logits = model(ids, mask, cut=fault == "cut")
            logits = logits.softmax(-1) if fault == "softmax" else logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return Run.open(folder)


def test_labels_ties_and_cut_branches_are_told_from_what_only_looks_like_them(tmp_path: Path) -> None:
    def noted(fault: str) -> set[str]:
        seen = read(tmp_path / (fault or "clean"), fault)
        about = {p["name"]: p["held"] for p in seen.manifest["parameters"]}
        return {
            *(["leak"] if (seen.steps["labels_ahead_0_pct"] == 100).all() else []),
            *(["constant"] if (seen.steps["labels_equal_pct"] == 100).all() else []),
            *(["cut"] if not about["side.weight"]["gradient"] else []),
            *(["copied head"] if [tie for tie in seen.manifest["tied"] if tie["apart"]] else []),
            *(["softmax"] if seen.manifest["softmax_twice"] else []),
        }

    for fault in ("leak", "constant", "cut", "copied head", "softmax"):
        assert noted(fault) == {fault}
    assert noted("") == set(), "equal blocks are no tie, a mask of 0 and -inf is no broken batch"
    clean = Run.open(tmp_path / "clean")
    assert clean.manifest["classes"] == 16
    layers = {layer["name"]: layer.get("dtypes") for layer in clean.manifest["layers"]}
    assert layers["blocks.0"] == dict.fromkeys(("input", "weight", "grad_output"), "float32")
    assert "shift" in next(line for line in clean.training if line["kind"] == "updates")["parameters"]


def test_trainings_by_torch_func_are_watched_and_go_on(tmp_path: Path) -> None:
    """An evolution strategy and gradients of each sample: no backward, and tensors that end with a transform."""

    def train(way: str) -> Run:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        labels = torch.randint(0, 4, (16,))

        def loss(held: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            scores = torch.func.functional_call(model, held, (x,))
            return torch.nn.functional.cross_entropy(scores.reshape(-1, 4), y.reshape(-1))

        with ottava.watch(None, tmp_path / way):
            for _ in range(7):
                x, held = torch.randn(16, 8), dict(model.named_parameters())
                if way == "samples":
                    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
                    found = {n: g.mean(0) for n, g in each({n: p.detach() for n, p in held.items()}, x, labels).items()}
                else:
                    noise = {n: torch.randn(6, *p.shape) for n, p in held.items()}
                    moved = {n: p + 0.1 * noise[n] for n, p in held.items()}
                    worth = torch.func.vmap(loss, (0, None, None))(moved, x, labels).detach()
                    found = {n: torch.einsum("k,k...->...", worth - worth.mean(), e) for n, e in noise.items()}
                for n, p in held.items():
                    p.grad = found[n]
                optimizer.step()
        return Run.open(tmp_path / way)

    for way in ("samples", "population"):
        run = train(way)
        assert run.manifest["ended"] == "closed", way
        assert len(run.steps["step"]) >= 6, way


def test_what_is_traced_derived_forward_or_stepped_by_hand_is_watched(tmp_path: Path) -> None:
    """TorchScript, torch.jit.trace under a watch, Jacobians, torch.autograd.grad without an optimizer."""
    layers = torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return copy.deepcopy(torch.nn.Sequential(*layers))

    def square(net: Any) -> torch.Tensor:
        return net(torch.randn(6, 32)).square().mean()

    def directions(net: torch.nn.Module) -> torch.Tensor:
        x = torch.randn(6, 32)
        jvp = torch.func.jvp(lambda z: net(z), (x,), (torch.ones_like(x),))
        return sum((part.square().mean() for part in jvp), torch.tensor(0.0))

    def jacobian(net: torch.nn.Module) -> torch.Tensor:
        return torch.func.vmap(torch.func.jacrev(lambda z: net(z)))(torch.randn(5, 32)).square().mean()

    def train(way: str) -> torch.Tensor:
        net: Any = model()
        net = torch.jit.script(net) if way == "scripted" else net
        net = torch.jit.trace(net, torch.randn(6, 32)) if way == "traced" else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        lossy = {"directions": directions, "jacobian": jacobian}.get(way, square)
        for _ in range(7):
            if way == "by hand":
                for p, g in zip(net.parameters(), torch.autograd.grad(square(net), [*net.parameters()]), strict=True):
                    p.data -= 0.1 * g
                continue
            optimizer.zero_grad()
            lossy(net).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    for way in ("scripted", "traced", "directions", "jacobian", "by hand"):
        alone = train(way)
        with ottava.watch(None, tmp_path / way):
            # TorchScript itself has other last bits in a second run
            torch.testing.assert_close(train(way), alone, rtol=0, atol=1e-6 if way in ("scripted", "traced") else 0)
        run = Run.open(tmp_path / way)
        assert run.manifest["ended"] == "closed", way
        assert len(run.steps["step"]) >= 6, way
