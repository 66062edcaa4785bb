"""A recorded step runs again with its casts, without them and with some; an ablation finds those that hurt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.experiments.bisect import Ablation
from ottava.experiments.casts import casts_of, only_without
from ottava.experiments.program import AS_IT_RAN, Gradients, Operation, Player, Program, Recorder
from ottava.experiments.snapshot import Kept, NotReplayableError, random_now

CALLS = ["fc1", "fc2"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(64, 96), nn.Linear(96, 64), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(torch.relu(self.fc1(x))))


def network(recipe: str = "tensorwise") -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    if recipe:
        ottava.convert(model, recipe)
    return model


def recorded(model: nn.Module, x: Tensor, parts: int = 1) -> Program:
    """One step, with its gradients in `p.grad`; in so many micro-batches."""
    recorder = Recorder([model])
    for part in x.chunk(parts):
        loss = (model(part) - part).square().mean() / parts
        recorder.backward(loss, loss, None, False)
        loss.backward()
    return recorder.finish()


def batch(rows: int = 128) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def names_of(model: nn.Module) -> Callable[[nn.Module], str]:
    names = {id(module): name for name, module in model.named_modules()}
    return lambda module: names[id(module)]


def apart(found: Gradients, wanted: Gradients) -> float:
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    assert pairs
    lost = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    return float(lost / torch.stack([b.norm() for _, b in pairs]).norm())


@pytest.mark.parametrize("recipe", ["", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_is_repeated_bit_by_bit(recipe: str, parts: int) -> None:
    """The same dropout, the same loss, the same gradients, whether the loss is repeated or its gradients came back."""
    model = network(recipe)
    program = recorded(model, batch(), parts)
    parameters = list(model.parameters())
    ran = [p.grad.clone() for p in parameters if p.grad is not None]
    for tail in (True, False):
        again = Player(program, parameters).run(AS_IT_RAN, tail=tail)
        assert all(torch.equal(a, b) for a, b in zip(again.gradients, ran, strict=True) if a is not None)
        assert len(again.losses) == (parts if tail else 0)
    assert all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(parameters, ran, strict=True))


def test_two_halves_of_a_batch_say_how_noisy_its_gradient_is() -> None:
    """Twice the gradient of half the samples less the whole is zero for equal halves, and not for others."""
    same = batch(64).repeat(2, 1)
    for x, noisy in ((same, False), (batch(), True)):
        model = network("")
        model.eval()  # dropout would part the halves
        found = Player(recorded(model, x), list(model.parameters())).run(AS_IT_RAN, tail=True, halves=True)
        assert found.noise is not None
        size = apart([n + g for n, g in zip(found.noise, found.gradients, strict=True)], found.gradients)  # type: ignore[operator]
        assert (size > 0.1) if noisy else (size < 1e-5)


def test_casts_are_switched_off_layer_by_layer() -> None:
    model = network().eval()
    program = recorded(model, batch())
    player = Player(program, list(model.parameters()))
    casts = casts_of(program.modules, names_of(model), "tensorwise")
    assert casts is not None
    assert (casts.mode, casts.recipe, casts.bits, sorted(casts.layers)) == ("real", "tensorwise", 8, CALLS)
    exact = player.run(casts.without, tail=True).gradients
    plain = network("").eval()
    recorded(plain, batch())
    wanted = [p.grad for p in plain.parameters()]
    assert apart(exact, wanted) < 0.02  # the GEMMs in BF16, against FP32
    errors = {}
    for off in ([], ["fc1"], ["fc2"], CALLS):
        way = only_without(casts, {(name, gemm) for name in off for gemm in ("fprop", "dgrad", "wgrad")})
        errors[len(off), *off] = apart(player.run(way, tail=True).gradients, exact)
    assert errors[2, "fc1", "fc2"] == 0.0
    assert 0 < max(errors[1, "fc1"], errors[1, "fc2"]) < errors[0,] < 0.2


def test_a_model_that_does_not_cast_is_simulated_and_stays_as_it_is() -> None:
    model = network("")
    program = recorded(model, batch())
    casts = casts_of(program.modules, names_of(model), "mxfp8")
    assert casts is not None
    assert (casts.mode, casts.recipe, sorted(casts.layers)) == ("simulated", "mxfp8", CALLS)
    player = Player(program, list(model.parameters()))
    error = apart(player.run(casts.with_casts, tail=True).gradients, player.run(casts.without, tail=True).gradients)
    assert 0 < error < 0.2
    assert [type(layer) for layer in (model.fc1, model.fc2)] == [nn.Linear, nn.Linear]
    assert casts_of([nn.ReLU()], lambda module: "", "mxfp8") is None


def test_an_ablation_finds_the_operand_that_hurts() -> None:
    """Outliers in a few rows of fc2's weight flush all other weights of its tensor to zero, in fprop and dgrad."""
    model = network()
    model.eval()
    with torch.no_grad():
        model.fc2.weight[:2, :2] *= 1e6
        model.fc2.weight[:2, 2:] = 0
    x = batch()
    recorder = Recorder([model])
    loss = (model(x) - x)[:, 2:].square().mean()
    recorder.backward(loss, loss, None, False)
    loss.backward()
    program = recorder.finish()
    casts = casts_of(program.modules, names_of(model), "tensorwise")
    assert casts is not None
    player = Player(program, list(model.parameters()))
    exact = player.run(casts.without, tail=True).gradients
    error = apart(player.run(casts.with_casts, tail=True).gradients, exact)
    assert error > 0.15
    found = Ablation(player, casts, exact, error, tail=True).facts()
    assert found is not None
    assert found["complete"]
    assert {entry["layer"] for entry in found["set"]} == {"fc2"}
    assert {entry["operand"] for entry in found["set"]} <= {"weight", "both"}
    assert found["error_after"] < error / 2


def test_what_the_training_has_overwritten_cannot_be_repeated() -> None:
    large = torch.zeros(600, 600)  # too large for a copy
    kept = Kept(large)
    assert kept.value().sum() == 0
    large += 1
    with pytest.raises(NotReplayableError, match=r"overwritten a tensor \(600, 600\)"):
        kept.value()


def test_a_program_has_what_its_backwards_need_and_no_more() -> None:
    model = network("")
    recorder = Recorder([model])
    y = model(batch())
    shown = y.detach().abs().mean()
    loss = y.square().mean()
    recorder.backward(loss, loss, None, False)
    loss.backward()
    program = recorder.finish()
    assert float(shown) > 0
    named = [
        [e.function.__name__ for e in es if isinstance(e, Operation)] for es in (program.entries, program.needed())
    ]
    assert {"abs", "square"} <= {*named[0]}
    assert named[1] == ["square", "mean"]
    assert not program.broken


def test_random_states_come_back() -> None:
    torch.manual_seed(3)
    set_back = random_now()
    first = torch.rand(2)
    set_back()
    assert torch.equal(torch.rand(2), first)


class OneSided(torch.autograd.Function):
    """A loss that tells nothing about one of its inputs: torch calls that tensor's hooks with None."""

    @staticmethod
    def forward(ctx: Any, ignored: Tensor, x: Tensor) -> Tensor:
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0].expand(2, 4)


def test_an_output_without_a_gradient_is_passed_over() -> None:
    """As in the backward of a compiled model, which gave an error to the training."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    recorder = Recorder([first, second])
    x = torch.ones(2, 4)
    loss = OneSided.apply(first(x), second(x))
    loss.backward()
    ignored, read = recorder.finish().forwards
    assert (len(ignored.gradients), len(read.gradients)) == (0, 1)
