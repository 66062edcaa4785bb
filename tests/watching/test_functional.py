"""GEMMs without a layer: what they multiply is read right, and the mode that shows them is on nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ottava.record.reader import Run
from ottava.watching.functional import FunctionalTap, Origin, calls_compiled, origin, product
from ottava.watching.session import watch
from watch_samples import ALL, CHECKPOINTS, noise, tapped

E, N, K = 3, 8, 4
ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)  # the expert in the middle gets nothing


class Own(nn.Module):
    """Multiplies with parameters of its own."""

    def __init__(self, forward: Callable[[Tensor, nn.Parameter], Tensor], *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(noise(*shape, seed=2))
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.w)


def each_expert(x: Tensor, w: Tensor) -> Tensor:
    parts = [x[:2], x[2:2], x[2:7]]
    return torch.cat([nn.functional.linear(part, w[torch.tensor(e)]) for e, part in enumerate(parts) if len(part)])


SINGLE: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "linear": (lambda x, w: nn.functional.linear(x, w), (N, K), lambda w: w),
    "linear of a cast": (lambda x, w: nn.functional.linear(x.double(), w.double()), (N, K), lambda w: w),
    "operator": (lambda x, w: x @ w, (K, N), lambda w: w.t()),
    "matmul of a transpose": (lambda x, w: torch.matmul(x, w.t()), (N, K), lambda w: w),
    "weight on the left": (lambda x, w: (w @ x.flatten(0, -2).t()).t(), (N, K), lambda w: w),
    "addmm": (lambda x, w: torch.addmm(torch.ones(N), x.flatten(0, -2), w), (K, N), lambda w: w.t()),
    "einsum": (lambda x, w: torch.einsum("bsk,nk->bsn", x, w), (N, K), lambda w: w),
    "heads": (lambda x, w: torch.einsum("bsk,khd->bshd", x, w), (K, 2, 4), lambda w: w.flatten(1).t()),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_product_is_read_as_the_linear_that_it_is(name: str) -> None:
    run, shape, upright = SINGLE[name]
    model, x = Own(run, *shape), noise(2, 5, K).requires_grad_()
    with tapped(tensors=ALL) as (seen, tap):
        y = model(x)
        y.square().sum().backward()
    rows, w = x.detach().reshape(-1, K), upright(model.w.detach())
    expected = {
        "input": rows,
        "weight": w,
        "output": y.detach().reshape(-1, N).float(),
        "grad_output": 2 * y.detach().reshape(-1, N).float(),
        "grad_input": x.grad.reshape(-1, K),
        "grad_weight": upright(model.w.grad),
    }
    assert set(seen.counts) == {("Own.w", tensor) for tensor in expected}
    for tensor, value in expected.items():
        torch.testing.assert_close(seen.one("Own.w", tensor).float(), value, msg=lambda text, t=tensor: f"{t}: {text}")
    assert tap.coverage()[0]["shape"] == [N, K]


GROUPED: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "a loop": (each_expert, (E, N, K)),
    "grouped": (lambda x, w: nn.functional.grouped_mm(x, w.mT, offs=ENDS), (E, N, K)),
    "grouped, kept the other way": (lambda x, w: nn.functional.grouped_mm(x, w, offs=ENDS), (E, K, N)),
}


@pytest.mark.parametrize("name", GROUPED)
def test_experts_are_linears_of_their_own(name: str) -> None:
    run, shape = GROUPED[name]
    model, x = Own(run, *shape), noise(7, K).requires_grad_()
    with tapped(tensors=ALL) as (seen, tap):
        y = model(x)
        y.square().sum().backward()
    w = model.w.detach() if shape == (E, N, K) else model.w.detach().mT
    dw = model.w.grad if shape == (E, N, K) else model.w.grad.mT
    for e, (start, stop) in enumerate([(0, 2), (2, 2), (2, 7)]):
        layer = f"Own.w.{e}"
        if start == stop:
            assert all(tensor == "weight" for where, tensor in seen.counts if where == layer)
            continue
        assert torch.equal(seen.one(layer, "input"), x.detach()[start:stop])
        assert torch.equal(seen.one(layer, "weight"), w[e])
        torch.testing.assert_close(seen.one(layer, "grad_output"), 2 * y.detach()[start:stop])
        torch.testing.assert_close(seen.one(layer, "grad_weight"), dw[e])
        if name != "a loop":  # there X is a part of x, whose gradient ends there
            torch.testing.assert_close(seen.one(layer, "grad_input"), x.grad[start:stop])
    assert {entry["name"]: entry["shape"] for entry in tap.coverage() if entry["seen"]}["Own.w.0"] == [N, K]
    assert "Own.w" not in {entry["name"] for entry in tap.coverage()}


@pytest.mark.parametrize(
    "run",
    [
        lambda x, w: torch.bmm(x, w.mT),
        lambda x, w: torch.baddbmm(torch.ones(E, 5, N), x, w.mT),
        lambda x, w: torch.einsum("esk,enk->sen", x, w).transpose(0, 1),
        lambda x, w: x @ w.mT,
        lambda x, w: (w @ x.mT).mT,
    ],
    ids=["bmm", "baddbmm", "einsum", "matmul", "weight on the left"],
)
def test_batches_are_experts(run: Callable[..., Tensor]) -> None:
    model, x = Own(run, E, N, K), noise(E, 5, K)
    with tapped() as (seen, _):
        y = model(x)
        y.square().sum().backward()
    for e in range(E):
        assert torch.equal(seen.one(f"Own.w.{e}", "input"), x[e])
        assert torch.equal(seen.one(f"Own.w.{e}", "weight"), model.w.detach()[e])
        torch.testing.assert_close(seen.one(f"Own.w.{e}", "grad_output"), 2 * y.detach()[e])


def test_one_matrix_expanded_over_a_batch_is_one_linear() -> None:
    model, x = Own(lambda x, w: torch.bmm(x, w.expand(E, K, N)), K, N), noise(E, 5, K)
    with tapped() as (seen, _):
        model(x).sum().backward()
    assert torch.equal(seen.one("Own.w", "input"), x.reshape(-1, K))


def test_all_experts_may_get_all_of_x() -> None:
    model, x = Own(lambda x, w: torch.matmul(x, w.mT), E, N, K), noise(5, K)
    with tapped() as (seen, _):
        model(x).sum().backward()
    assert all(torch.equal(seen.one(f"Own.w.{e}", "input"), x) for e in range(E))
    assert all(seen.one(f"Own.w.{e}", "grad_output").shape == (5, N) for e in range(E))


@pytest.mark.parametrize("checkpointing", CHECKPOINTS)
def test_recomputed_products_count_once(checkpointing: str) -> None:
    model = Own(each_expert, E, N, K)
    with tapped() as (seen, _):
        CHECKPOINTS[checkpointing](model, noise(7, K).requires_grad_()).sum().backward()
    assert set(seen.counts.values()) == {1}
    assert len(seen.counts) == 6


def test_autocast_reaches_linear_and_not_grouped_mm() -> None:
    for run, dtype in ((each_expert, torch.bfloat16), (GROUPED["grouped"][0], torch.float32)):
        model = Own(run, E, N, K)
        with tapped() as (seen, _), torch.autocast("cpu", torch.bfloat16):
            model(noise(7, K)).float().square().sum().backward()
        assert {x.dtype for _, tensor, x in seen.tensors if tensor != "weight"} == {dtype}


def test_products_of_two_activations_or_of_two_weights_are_no_linears() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(noise(N, 2)), nn.Parameter(noise(2, K))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT) @ x + (self.a @ self.b).sum()

    with tapped() as (seen, _):
        Two()(noise(2, 5, K)).sum().backward()
    assert not seen.counts


def test_a_parameter_of_three_dimensions_that_no_gemm_takes_is_said() -> None:
    model = nn.ModuleDict({"experts": Own(lambda x, w: x + w.sum(), E, N, K), "conv": nn.Conv1d(2, 3, 3)})
    with tapped(model=model) as (_, tap):
        model["experts"](noise(2, K)).sum().backward()
    (entry,) = tap.coverage()
    assert (entry["name"], entry["seen"], entry["shape"]) == ("experts.w", False, [E, N, K])
    assert "the watch saw no GEMM with it" in entry["why"]


def test_gathered_matrices_are_said_not_to_be_seen() -> None:
    model = Own(lambda x, w: torch.bmm(w[torch.tensor([0, 2, 2])], x[..., None]), E, N, K)
    with tapped() as (seen, tap):
        model(noise(3, K)).sum().backward()
    assert not seen.counts
    assert "one matrix for each token" in tap.coverage()[0]["why"]


def test_origins() -> None:
    w = nn.Parameter(noise(E, N, K))
    for operand, first in ((w, 0), (w[1], 1), (w[-1].bfloat16(), 2), (w.bfloat16()[1].t(), 1), (w.unbind()[2], 2)):
        assert origin(operand) == Origin(w, first), operand.shape
    assert origin(w.bfloat16().unbind()[1]) == Origin(w, 1)
    for other in (w * 2, nn.functional.embedding(torch.tensor([1]), nn.Parameter(noise(4, 4))), noise(2, 2)):
        assert origin(other) is None
    with torch.no_grad():
        assert origin(w[2].t()) == Origin(w, 2)


def test_what_is_no_product_of_two_tensors_is_passed_over() -> None:
    x = torch.ones(2, 2)
    calls: list[tuple[str, tuple[Any, ...]]] = [("relu", (x,)), ("matmul", (x, torch.ones(2)))]
    calls += [
        ("einsum", ("ij,jk,kl->il", x, x, x)),
        ("einsum", ("...i,ij->...j", x, x)),
        ("einsum", ("ii,ij->j", x, x)),
    ]
    assert [product(name, args, {}) for name, args in calls] == [None] * len(calls)


def test_a_gemm_outside_of_the_owner_is_named(tmp_path: Path) -> None:
    """As where the embedding is the head, without a layer of its own."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc, self.pos = nn.Embedding(5, K), nn.Linear(K, K), nn.Parameter(noise(K))

        def forward(self, ids: Tensor) -> Tensor:
            return self.fc(self.embed(ids) + self.pos) @ self.embed.weight.t()

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, tmp_path / "run", every=1) as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.tensor([1, 2])).square().sum().backward()
            optimizer.step()
    (skipped,) = Run.open(seen.folder).manifest["coverage"]["skipped"]
    assert skipped == {
        "name": "embed",
        "why": "a GEMM outside of its module uses it, where the watch sees no calls",
    }
    assert "embed (Embedding): a GEMM outside of its module" in str(caught[-1].message)


# --- the mode ------------------------------------------------------------------------------------------------------


class Other(TorchFunctionMode):
    """Of the user."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(len(_get_current_function_mode_stack()))
        if x.shape[0] == 13:
            raise ValueError("13")
        return x


class Parent(nn.Module):
    """Calls a child in the middle of its own products, within a mode of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.child, self.kept = nn.Parameter(noise(K, K)), Child(), Other()

    def forward(self, x: Tensor) -> Tensor:
        with self.kept:
            x = self.child(x @ self.w)
            stack = _get_current_function_mode_stack()
            assert stack[-1] is self.kept
        return x @ self.w


def test_the_mode_is_off_in_other_modules_and_goes_where_it_was() -> None:
    model = Parent()
    with Other() as outer, tapped() as (seen, _):
        model(noise(2, K)).sum().backward()
        with pytest.raises(ValueError, match="13"):
            model(noise(13, K))
        assert _get_current_function_mode_stack() == [outer]
        model(noise(2, K)).sum().backward()
        assert _get_current_function_mode_stack() == [outer]
    assert model.child.modes == [2, 2, 2]  # the outer one and the parent's
    assert seen.counts["Parent.w", "grad_output"] == 4
    assert _get_current_function_mode_stack() == []


def test_modules_that_call_compiled_functions_are_left_alone() -> None:
    model = Own(each_expert, E, N, K)
    assert not calls_compiled(model)
    model.run = torch.compile(each_expert, backend="eager")
    assert calls_compiled(model)
    with tapped() as (seen, tap):
        model(noise(7, K)).sum().backward()
    assert not seen.counts
    assert "compiled" in tap.coverage()[0]["why"]
    model.run = torch.compiler.disable(each_expert)
    assert not calls_compiled(model)


def test_forwards_without_products_are_not_looked_into_for_ever() -> None:
    class Embedding(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(len(_get_current_function_mode_stack()))
            return super().forward(x)

    modes: list[int] = []
    embedding = Embedding(4, 4)
    with tapped():
        for _ in range(20):
            embedding(torch.tensor([1]))
    assert (modes[0], modes[-1]) == (1, 0)


def test_leaving_what_was_never_entered_does_nothing() -> None:
    tap = FunctionalTap(lambda found, parts: None)
    module = nn.Linear(2, 2)
    tap.leave(module)
    tap.enter(module, looks=False)
    tap.leave(module)
    assert _get_current_function_mode_stack() == []


@pytest.mark.parametrize("watched_layers", [("*.2",), ("other",)])
def test_layers_that_nobody_asks_for_are_not_handed_over(watched_layers: tuple[str, ...]) -> None:
    from ottava.watching.config import matches

    model = nn.ModuleDict({"experts": Own(GROUPED["grouped"][0], E, N, K)})
    with tapped(model=model, wants=lambda layer, tensor: matches(layer, watched_layers)) as (seen, _):
        model["experts"](noise(7, K)).square().sum().backward()
    assert {layer for layer, _ in seen.counts} == ({"experts.w.2"} if watched_layers == ("*.2",) else set())
