"""The tap on any PyTorch model: the operands of its GEMMs, each counted once, and a run that cannot tell."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.measure.tally import Tally
from ottava.recipe import RECIPES, Recipe
from ottava.record.schema import SlotKey
from ottava.watching.collector import Collector
from ottava.watching.config import WatchConfig
from ottava.watching.doors import DoorTap
from ottava.watching.modules import ModuleTap
from watch_samples import ALL, CHECKPOINTS, Seen, network, noise, reentrant, tapped

ONCE = Counter({(layer, tensor): 1 for layer in ("0", "2") for tensor in ("input", "weight", "grad_output")})


# --- what is seen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(16,), (6, 16), (2, 3, 16), (2, 1, 3, 16)], ids=str)
def test_hands_over_the_operands_and_results_of_the_three_gemms(shape: tuple[int, ...], bias: bool) -> None:
    """In spite of the in-place ReLU, which cuts the view that torch's linear returns out of the graph."""
    model = nn.Sequential(nn.Linear(16, 32, bias=bias), nn.ReLU(inplace=True), nn.Linear(32, 8, bias=bias))
    x = noise(*shape).requires_grad_()
    with tapped(tensors=ALL) as (seen, _):
        (y := model(x)).square().sum().backward()
    rows = x.detach().reshape(-1, 16)
    first, last = model[0].weight.detach(), model[2].weight.detach()
    hidden = nn.functional.linear(rows, first, model[0].bias).detach()
    dy = 2 * y.detach().reshape(-1, 8)
    dh = (dy @ last) * (hidden > 0)
    expected = {
        ("0", "input"): rows,
        ("0", "weight"): first,
        ("0", "output"): hidden,
        ("0", "grad_output"): dh,
        ("0", "grad_input"): dh @ first,
        ("0", "grad_weight"): dh.t() @ rows,
        ("2", "input"): hidden.relu(),
        ("2", "weight"): last,
        ("2", "output"): y.detach().reshape(-1, 8),
        ("2", "grad_output"): dy,
        ("2", "grad_input"): dy @ last,
        ("2", "grad_weight"): dy.t() @ hidden.relu(),
    }
    assert seen.counts == Counter(expected.keys())
    for place, tensor in expected.items():
        torch.testing.assert_close(seen.one(*place), tensor, msg=str(place))


def test_under_autocast_operands_have_its_dtype_and_the_weight_its_own() -> None:
    model = network()
    with tapped() as (seen, _), torch.autocast("cpu", torch.bfloat16):
        model(noise(4, 16)).sum().backward()
    dtypes = {tensor: seen.one("2", tensor).dtype for tensor in ("input", "weight", "grad_output")}
    assert dtypes == {"input": torch.bfloat16, "weight": torch.float32, "grad_output": torch.bfloat16}
    assert torch.equal(seen.one("0", "input"), noise(4, 16).bfloat16())


def test_gradients_of_input_and_weight_are_what_this_call_adds() -> None:
    """x goes into two layers and past them; one of them runs twice. The sums are torch's, the parts are seen."""
    q, k = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.ModuleDict({"q": q, "k": k})
    x = noise(4, 8).requires_grad_()
    with tapped(model=model, tensors=ALL) as (seen, _):
        (q(x) * k(x) + q(2 * x) + x).square().sum().backward()
    dk = seen.one("k", "grad_output")
    torch.testing.assert_close(seen.one("k", "grad_input"), dk @ k.weight.detach())
    parts = seen.of("q", "grad_weight")
    torch.testing.assert_close(sum(parts), q.weight.grad)
    inputs, gradients = seen.of("q", "input"), seen.of("q", "grad_output")[::-1]  # backward comes in reverse
    for part, dq, operand in zip(parts[::-1], gradients, inputs, strict=True):
        torch.testing.assert_close(part, dq.t() @ operand)


def test_weight_is_handed_over_once_a_step_whatever_the_micro_batches() -> None:
    model = network()
    seen = Seen()
    tap = ModuleTap(seen)
    for step in range(1, 3):
        tap.attach()
        for _ in range(3):
            model(noise(4, 16)).sum().backward()
        tap.detach()
        assert seen.counts == Counter({key: step * (1 if key[1] == "weight" else 3) for key in ONCE})


def test_asks_before_it_prepares_a_tensor() -> None:
    with tapped(wants=lambda layer, tensor: (layer, tensor) == ("2", "grad_output")) as (seen, _):
        network()(noise(4, 16)).sum().backward()
    assert set(seen.counts) == {("2", "grad_output")}


def test_sees_nothing_when_detached_and_leaves_no_hook() -> None:
    hooks = torch.nn.modules.module
    before = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    model = network()
    with tapped() as (seen, _):
        y = model(noise(4, 16))
    y.sum().backward()  # the gradient comes too late: its step has ended
    model(noise(4, 16)).sum().backward()
    assert {tensor for _, tensor in seen.counts} == {"input", "weight"}
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == before


# --- each forward of training counts once ---------------------------------------------------------------------------


@pytest.mark.parametrize("forward", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_checkpointing_counts_each_tensor_once_and_keeps_every_bit(
    forward: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    def gradients(tap: bool) -> list[Tensor]:
        torch.manual_seed(0)
        # no in-place operation: selective checkpointing forbids to write to what it keeps
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        with tapped(model=model, tensors=ALL) if tap else nullcontext() as watched:
            for seed in range(2):
                forward(model, noise(4, 16, seed=seed).requires_grad_()).square().sum().backward()
        if tap:
            seen = watched[0]
            twice = {(layer, tensor): 2 for layer in ("0", "2") for tensor in ALL if tensor != "weight"}
            assert seen.counts == Counter(twice | {("0", "weight"): 1, ("2", "weight"): 1})
        return [p.grad for p in model.parameters()]

    for watched, alone in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(watched, alone)


def test_one_layer_both_plainly_and_checkpointed_in_one_forward() -> None:
    layer = nn.Linear(8, 8)
    with tapped() as (seen, _):
        reentrant(layer, layer(noise(4, 8))).sum().backward()
    assert seen.counts == Counter({("Linear", "input"): 2, ("Linear", "weight"): 1, ("Linear", "grad_output"): 2})


def test_evaluation_is_not_counted_and_coverage_says_so() -> None:
    model = network()
    with tapped() as (seen, tap):
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                model(noise(4, 16))
    assert not seen.tensors
    assert {entry["why"] for entry in tap.coverage()} == {"ran without gradients only"}


def test_an_exception_in_a_forward_leaves_no_trace() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise ValueError("odd")
            return x

    model = nn.Sequential(nn.Linear(16, 16), Breaks(), nn.Linear(16, 8))
    with tapped() as (seen, _):
        with pytest.raises(ValueError, match="odd"):
            model(noise(3, 16))
        seen.tensors.clear()
        model(noise(4, 16)).sum().backward()
    assert seen.counts == ONCE - Counter({("0", "weight"): 1})


def test_inside_transforms_of_torch_func_nothing_is_read() -> None:
    model = network()
    parameters = dict(model.named_parameters())
    gradient = torch.func.grad(lambda own, x: torch.func.functional_call(model, own, (x,)).sum())
    with tapped() as (seen, tap):
        torch.func.vmap(gradient, (None, 0))(parameters, noise(4, 16))
    assert not seen.tensors
    assert all("torch.func" in entry["why"] for entry in tap.coverage())


def test_meta_and_empty_tensors_are_passed_over() -> None:
    model = network().to("meta")
    with tapped() as (seen, tap):
        model(torch.empty(4, 16, device="meta")).sum().backward()
        nn.Linear(4, 4)(torch.empty(0, 4)).sum().backward()
    assert set(seen.counts) == {("Linear", "weight")}
    assert "meta" in tap.coverage()[0]["why"]


def test_threads_do_not_mix_up_their_models() -> None:
    models = [network() for _ in range(3)]  # made here: threads share torch's random numbers

    def train(model: nn.Module) -> None:
        for _ in range(5):
            model(noise(4, 16)).sum().backward()

    with tapped() as (seen, _), ThreadPoolExecutor(3) as threads:
        list(threads.map(train, models))
    assert len(seen.counts) == 18
    assert set(seen.counts.values()) == {1, 5}


def test_nothing_is_kept_alive() -> None:
    model = network()
    seen: list[weakref.ref[Tensor]] = []
    tap = ModuleTap(lambda layer, tensor, x: seen.append(weakref.ref(x)), tensors=ALL)
    tap.attach()
    x = noise(4, 16).requires_grad_()
    x_lives, model_lives = weakref.ref(x), weakref.ref(model)
    model(x).sum().backward()
    del x
    gc.collect()
    assert x_lives() is None, "the graph is kept"
    assert len(seen) == 12
    assert not any(ref() is not None for ref in seen)
    del model
    gc.collect()
    assert model_lives() is None
    tap.detach()


def test_copies_made_while_it_watches_are_models_of_their_own() -> None:
    model = network()
    with tapped() as (seen, _):
        model(noise(4, 16)).sum().backward()
        copy.deepcopy(model)(noise(4, 16)).sum().backward()
    assert seen.counts == ONCE + Counter({(f"Sequential.{layer}", tensor): 1 for layer, tensor in ONCE})


# --- the same numbers as at the doors -------------------------------------------------------------------------------


def both_taps(
    model: nn.Module, recipe: Recipe, step: Callable[[], None], steps: int = 1
) -> list[tuple[dict[SlotKey, Tally], dict[SlotKey, Tally]]]:
    collectors = [Collector(WatchConfig(sample=1, recipes=(recipe,))) for _ in range(2)]
    doors = DoorTap(collectors[0], model)
    modules = ModuleTap(collectors[1].simulate, model=model, own=True, wants=collectors[1].wants)
    result = []
    for _ in range(steps):
        for collector in collectors:
            collector.looking = True
        doors.attach()
        modules.attach()
        try:
            step()
        finally:
            modules.detach()
            doors.detach()
        here, there = (collector.drain()[0] for collector in collectors)
        result.append((here, {key._replace(source="door"): tally for key, tally in there.items()}))
    return result


@pytest.mark.parametrize("forward", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_the_same_tallies_as_the_doors_under_checkpointing_and_autocast(
    forward: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    if forward is CHECKPOINTS["selective"]:
        pytest.skip("what this policy keeps, the casts write to")
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    ottava.convert(model, "rowwise")

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(model, noise(4, 64).requires_grad_()).float().square().sum()
        loss.backward()

    ((at_doors, outside),) = both_taps(model, RECIPES["rowwise"], step)
    assert at_doors == outside
    assert len(at_doors) == 12


def test_layers_of_ottava_are_left_to_their_doors_unless_these_stay_shut() -> None:
    model = network(64).bfloat16()
    ottava.convert(model, "tensorwise")
    x = noise(4, 64).bfloat16()
    with tapped() as (seen, tap):
        model(x).sum().backward()
        assert not seen.tensors
        assert tap.coverage() == []
        with ottava.autocast(enabled=False):  # high precision: nothing is cast, so the tap shows what would be
            model(x).sum().backward()
    assert seen.counts == ONCE


# --- what is said of layers that are not seen ------------------------------------------------------------------------


def test_layers_without_a_sample_are_named_once_after_two_looks() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.idle = nn.Linear(8, 4)
    seen = Seen()
    tap = ModuleTap(seen, model=model)
    for look in range(4):
        tap.attach()
        model[1](model[0](noise(2, 8))).sum().backward()
        tap.detach()
        if look == 1:
            with pytest.warns(UserWarning, match=r"1 of 3 linear layers gave no sample in 2 .*\n  idle \(Linear\): "):
                assert tap.looked() is not None
        else:
            assert tap.looked() is None
    entries = {entry.pop("name"): entry for entry in tap.coverage()}
    assert entries["idle"]["shape"] == [4, 8]
    assert not entries["idle"]["seen"]
    assert entries["0"] == {
        "type": "Linear",
        "kind": "linear",
        "shape": [8, 8],
        "seen": True,
        "tensors": ["input", "weight", "grad_output"],
        "why": "",
        "package": "torch",
        "recipe": "",
        "casts": {},
    }


def test_weights_that_are_no_floats_are_passed_over_and_said_to_be() -> None:
    class Packed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight[:, 0:1].float().expand(4, 4))

    layer = Packed(4, 4)
    layer.weight = nn.Parameter(torch.ones(4, 2, dtype=torch.uint8), requires_grad=False)
    with tapped() as (seen, tap):
        layer(noise(2, 4).requires_grad_()).sum().backward()
    assert set(seen.counts) == {("Packed", "input"), ("Packed", "grad_output")}
    assert tap.coverage()[0]["why"] == "W: is uint8, not a float of 16 or 32 bits"


def test_what_does_not_fit_the_weight_is_not_taken_for_an_operand() -> None:
    """A layer that gathers its output over ranks, or splits its input: what is outside is not what its GEMM has."""

    class ColumnParallelLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(noise(4, 8))

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            y = x @ self.weight.t()
            return torch.cat([y, y], -1), None

    with tapped() as (seen, tap):
        ColumnParallelLinear()(noise(2, 8))[0].sum().backward()
    assert {tensor for _, tensor in seen.counts} == {"input", "weight"}
    assert tap.coverage()[0]["why"] == "dY: is 8 wide, but the weight needs 4: the layer gathers or splits it"


def test_double_precision_is_seen_as_single() -> None:
    with tapped() as (seen, _):
        nn.Linear(4, 4).double()(noise(2, 4).double()).sum().backward()
    assert {x.dtype for *_, x in seen.tensors} == {torch.float32}
    assert len(seen.tensors) == 3
