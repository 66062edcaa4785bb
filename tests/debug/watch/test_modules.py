"""The tap on any PyTorch model: the operands of its GEMMs, each counted once, and a run that cannot tell."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ottava
from ottava.debug.run.schema import SYMBOLS, SlotKey
from ottava.debug.tally import Tally
from ottava.debug.watch.collector import Collector
from ottava.debug.watch.config import WatchConfig
from ottava.debug.watch.doors import DoorTap
from ottava.debug.watch.modules import ModuleTap
from ottava.recipe import RECIPES, Recipe

ALL = tuple(SYMBOLS)


class Seen:
    """What a tap handed over."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, str, Tensor]] = []

    def __call__(self, layer: str, tensor: str, x: Tensor) -> None:
        assert x.dim() == 2
        assert not x.requires_grad
        self.tensors.append((layer, tensor, x.clone()))

    def of(self, layer: str, tensor: str) -> list[Tensor]:
        return [x for name, which, x in self.tensors if (name, which) == (layer, tensor)]

    def one(self, layer: str, tensor: str) -> Tensor:
        (x,) = self.of(layer, tensor)
        return x

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        return Counter((layer, tensor) for layer, tensor, _ in self.tensors)


@contextmanager
def tapped(**settings: Any) -> Iterator[tuple[Seen, ModuleTap]]:
    seen = Seen()
    tap = ModuleTap(seen, **settings)
    tap.attach()
    try:
        yield seen, tap
    finally:
        tap.detach()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width))


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


def keep_some(*args: Any, **kwargs: Any) -> Any:
    aten = torch.ops.aten
    saved = (aten.mm.default, aten.addmm.default, aten._to_copy.default, aten.amax.default, aten.clone.default)
    return create_selective_checkpoint_contexts(
        lambda ctx, op, *a, **k: CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE
    )


reentrant = partial(checkpoint, use_reentrant=True)
plainly = partial(checkpoint, use_reentrant=False)
CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "none": lambda model, x: model(x),
    "reentrant": reentrant,
    "non-reentrant": plainly,
    "to the end": partial(checkpoint, use_reentrant=False, early_stop=False),
    "reentrant in reentrant": lambda model, x: reentrant(lambda x: reentrant(model, x), x),
    "reentrant in non-reentrant": lambda model, x: plainly(lambda x: reentrant(model, x), x),
    "non-reentrant in reentrant": lambda model, x: reentrant(lambda x: plainly(model, x), x),
    "non-reentrant in non-reentrant": lambda model, x: plainly(lambda x: plainly(model, x), x),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=keep_some),
}


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

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    with tapped() as (seen, tap):
        torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, noise(4, 16))
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
    failures: list[BaseException] = []

    def train(model: nn.Module) -> None:
        try:
            for _ in range(5):
                model(noise(4, 16)).sum().backward()
        except BaseException as error:
            failures.append(error)

    with tapped() as (seen, _):
        threads = [threading.Thread(target=train, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
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

DETERMINISTIC = [
    recipe for recipe in RECIPES.values() if recipe.fprop.quantized and "stochastic" not in str(recipe.dgrad.lhs)
]


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


@pytest.mark.parametrize("recipe", DETERMINISTIC, ids=lambda recipe: recipe.name)
def test_the_same_tallies_as_the_doors(recipe: Recipe) -> None:
    model = nn.Sequential(nn.Linear(160, 144), nn.ReLU(inplace=True), nn.Linear(144, 136, bias=False)).bfloat16()
    ottava.convert(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step() -> None:
        for seed in range(2):
            model(noise(3, 48, 160, seed=seed).bfloat16().requires_grad_()).square().sum().backward()
        optimizer.step()

    for at_doors, outside in both_taps(model, recipe, step, steps=3 if recipe.fprop.lhs.predicted else 1):
        assert at_doors.keys() == outside.keys()
        assert len(at_doors) >= 4
        for key, tally in at_doors.items():
            assert tally == outside[key], key


@pytest.mark.parametrize("forward", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_the_same_tallies_as_the_doors_under_checkpointing_and_autocast(
    forward: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    if forward is CHECKPOINTS["selective"]:
        pytest.skip("what this policy keeps, the casts write to")
    if forward is CHECKPOINTS["non-reentrant in reentrant"]:
        pytest.skip("the doors count the second recomputation")
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


# --- training is bit for bit what it is unwatched --------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm attention by hand and a gated MLP, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + nn.functional.dropout(self.proj(mixed.transpose(1, 2).flatten(2)), 0.1)
        h = self.norm2(x)
        return x + nn.functional.dropout(self.down(nn.functional.silu(self.gate(h)) * self.up(h)), 0.1)


class Transformer(nn.Module):
    """Tied embedding and head."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.block = Block(32)
        self.run_block = forward

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.run_block(self.block, self.embed(tokens)))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant", "selective"])
def test_training_is_bit_identical(checkpointing: str, autocast: bool) -> None:
    def train(watched: bool) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(3)
        model = Transformer(CHECKPOINTS[checkpointing])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        collector = Collector(WatchConfig(recipes="nvfp4", fine=False, tensors=ALL))
        tap = ModuleTap(collector.simulate, tensors=ALL, wants=collector.wants)
        losses = []
        for step in range(3):
            collector.looking = step != 1
            if watched:
                tap.attach()
            for part in range(2):
                tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(2 * step + part))
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                losses.append(loss.detach())
            tap.detach()
            tallies, _ = collector.drain()
            assert len(tallies) == 48 if watched and step != 1 else not tallies
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *(p.detach() for p in model.parameters())], torch.get_rng_state()

    (with_tap, after), (without, after_without) = train(True), train(False)
    assert torch.equal(after, after_without)
    for a, b in zip(with_tap, without, strict=True):
        assert torch.equal(a, b)


# --- compiled code --------------------------------------------------------------------------------------------------


def compiled(model: nn.Module, how: str, count: Any) -> Callable[[Tensor], Tensor]:
    if how == "function":
        return torch.compile(lambda x: model(x), backend=count)
    if how == "module":
        model.compile(backend=count)
        return model
    if how == "wrapper":
        return torch.compile(model, backend=count)
    model[0] = torch.compile(model[0], backend=count)
    return model


@pytest.fixture
def counter() -> Iterator[Any]:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield CompileCounter()
    torch._dynamo.reset()


@pytest.mark.parametrize("between", [True, False], ids=["some steps", "every step"])
@pytest.mark.parametrize("watched_first", [True, False], ids=["watched first", "compiled first"])
@pytest.mark.parametrize("given", [True, False], ids=["model", "process"])
@pytest.mark.parametrize("how", ["wrapper", "function", "module", "part"])
def test_compiled_layers_are_reported_and_never_recompiled(
    how: str, given: bool, watched_first: bool, between: bool, counter: Any
) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 8))
    run = compiled(model, how, counter)
    seen = Seen()
    tap = ModuleTap(seen, model=model if given else None)
    said = []
    if not watched_first:
        run(noise(4, 8)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frames = []
        for _ in range(4):
            tap.attach()
            run(noise(4, 8)).sum().backward()
            tap.detach()
            said.append(tap.looked())
            if between:
                run(noise(4, 8)).sum().backward()
            frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert len(set(frames)) == 1, "a look made Dynamo compile again"
    assert frames[0] <= 2
    visible = {"1"} if how == "part" else set()
    assert {layer for layer, _ in seen.counts} == visible
    assert [text is not None for text in said] == [False, True, False, False]
    assert "compiled='eager'" in said[1]
    assert [str(w.message) for w in caught if "watch:" in str(w.message)] == [said[1]]
    hidden = [entry for entry in tap.coverage() if entry["name"] not in visible]
    total = 2 if how == "part" else 3
    # where nothing calls a hook, only a model that was given is known
    assert len(hidden) == (0 if how in ("function", "module") and not given else total)
    assert all("compiled" in entry["why"] and not entry["seen"] for entry in hidden)


@pytest.mark.parametrize("how", ["wrapper", "function", "module", "part"])
def test_looked_at_eagerly_compiled_layers_are_all_seen(how: str, counter: Any) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 8))
    run = compiled(model, how, counter)
    run(noise(4, 8)).sum().backward()
    frames = torch._dynamo.utils.counters["frames"]["total"]
    with tapped() as (seen, _), torch.compiler.set_stance("force_eager"):
        run(noise(4, 8)).sum().backward()
    run(noise(4, 8)).sum().backward()
    assert torch._dynamo.utils.counters["frames"]["total"] == frames
    places = {(layer, t) for layer in ("0.0", "0.2", "1") for t in ("input", "weight", "grad_output")}
    assert seen.counts == Counter(places)


def test_torch_does_not_grumble_about_our_hooks(counter: Any) -> None:
    model = torch.compile(network(), backend=counter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tapped():
            model(noise(4, 16)).sum().backward()


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
    assert tap.coverage()[0]["why"] == "dY: is 8 wide, the weight needs 4: gathered or split inside"


def test_double_precision_is_seen_as_single() -> None:
    with tapped() as (seen, _):
        nn.Linear(4, 4).double()(noise(2, 4).double()).sum().backward()
    assert {x.dtype for *_, x in seen.tensors} == {torch.float32}
    assert len(seen.tensors) == 3
