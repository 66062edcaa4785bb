"""Which recipe runs: nested, in threads and tasks, for one GEMM of one layer; and what compiled code gets to see."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.engine.autocast import _COMPILED_VIEW, ambient, in_tiles, made_invariant
from ottava.recipe import GEMMS, RECIPES, GemmRecipe, Recipe
from same_tensors import assert_same
from scaling_samples import two_linears as network


def data() -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def step(model: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    """y, dx and every parameter gradient."""
    x = (data() if x is None else x).requires_grad_()
    model.zero_grad()
    torch.manual_seed(4)
    y = model(x)
    torch.manual_seed(5)
    y.float().square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def ran(model: nn.Module) -> dict[str, str]:
    """{"layer.gemm": operands} of the last call."""
    return {f"{row.layer}.{row.gemm}": row.operands for row in ottava.receipt(model).rows}


def names() -> str:
    """The recipe of the innermost autocast, "" if none says one."""
    inside = ambient()
    return "off" if not inside.enabled else inside.recipe.name if inside.recipe else ""


def test_autocast_runs_the_bits_of_the_converted_recipe(recipe: Recipe) -> None:
    """Converted with one and run under another equals converted with the other, forward and backward."""
    inside, own = network("tensorwise"), network(recipe)
    with ottava.autocast(recipe):
        got = step(inside)
    assert_same(got, step(own))
    by_name = network("rowwise")
    with ottava.autocast(recipe.name):
        assert_same(step(by_name), got)


def test_off_is_torchs_own_linear(recipe: Recipe) -> None:
    """enabled=False evaluates in BF16 without touching the model, whatever else is asked for or set inside."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16()
    model = network(recipe)
    with ottava.autocast(enabled=False):
        assert_same(step(model), step(plain))
    with ottava.autocast("rowwise", enabled=False):
        assert_same(step(model), step(plain))
    with ottava.autocast("mxfp8"), ottava.autocast(enabled=False):
        assert_same(step(model), step(plain))
    assert_same(step(model), step(network(recipe)))


def test_layers_keep_their_own_recipe_where_none_is_given() -> None:
    """autocast() is the way back in: inside "off" it re-enables what each layer was converted with."""
    own = step(network("rowwise"))
    model = network("rowwise")
    with ottava.autocast():
        assert_same(step(model), own)
    with ottava.autocast(enabled=False), ottava.autocast():
        assert_same(step(model), own)


def test_contexts_nest() -> None:
    """The innermost has the word; leaving gives it back to the one around, ten deep."""
    trace = []
    with ottava.autocast("rowwise"):
        trace.append(names())
        with ottava.autocast("mxfp8"):
            trace.append(names())
            with ottava.autocast(enabled=False):
                trace.append(names())
            trace.append(names())
        trace.append(names())
    trace.append(names())
    assert trace == ["rowwise", "mxfp8", "off", "mxfp8", "rowwise", ""]

    def dive(depth: int) -> None:
        if depth:
            with ottava.autocast("rowwise" if depth % 2 else "mxfp8"):
                dive(depth - 1)
                assert names() == ("rowwise" if depth % 2 else "mxfp8")

    dive(10)
    assert names() == ""


def test_what_is_none_is_as_around() -> None:
    """Recipe, accumulator and batch invariance, each alone; what is given is changed; compiled code sees the same."""
    hopper: Any = {"accumulator": "hopper"}
    mxfp8: Any = {"recipe": "mxfp8"}
    nestings: list[tuple[list[dict[str, Any]], str]] = [
        ([mxfp8, {}], "mxfp8"),
        ([mxfp8, hopper], "mxfp8/hopper"),
        ([hopper, mxfp8], "mxfp8/hopper"),
        ([mxfp8 | hopper, {}], "mxfp8/hopper"),
        ([mxfp8 | hopper, {"recipe": "rowwise"}], "rowwise/hopper"),
        ([mxfp8 | hopper, {"recipe": "rowwise/ada"}], "rowwise/ada"),
        ([mxfp8 | hopper, {"accumulator": "ada"}], "mxfp8/ada"),
        ([mxfp8, {"group": None, "update": "autocast"}], "mxfp8"),
        ([mxfp8, {"enabled": False}], "off"),
        ([mxfp8, {"enabled": False}, {}], "mxfp8"),
        ([mxfp8 | {"batch_invariant": True}, {}], "mxfp8, invariant"),
        ([mxfp8 | {"batch_invariant": True}, {"batch_invariant": False}], "mxfp8"),
        ([mxfp8 | {"batch_invariant": True}, {"enabled": False}], "off"),
    ]
    for nesting, expected in nestings:
        with contextlib.ExitStack() as stack, warnings.catch_warnings(action="ignore"):
            for settings in nesting:
                stack.enter_context(ottava.autocast(**settings))
            assert names() + (", invariant" if ambient().batch_invariant else "") == expected, nesting
            assert compiled() is ambient()
    assert names() == ""


def test_an_accumulator_inside_of_a_recipe_changes_the_sums_only() -> None:
    """Bits of a layer under both at once, whichever is named first."""
    with ottava.autocast("mxfp8", accumulator="hopper"):
        expected = step(network())
    with ottava.autocast("mxfp8"), ottava.autocast(accumulator="hopper"):
        assert_same(step(network()), expected)
    with ottava.autocast(accumulator="hopper"), ottava.autocast("mxfp8"):
        assert_same(step(network()), expected)


def test_a_thread_sees_an_autocast_through_a_copied_context_only() -> None:
    """The sentence of autocast's docstring, and its remedy."""
    seen: list[str] = []

    def function() -> None:
        seen.append(names())

    with ottava.autocast("mxfp8"):
        for thread in (
            threading.Thread(target=function),
            threading.Thread(target=contextvars.copy_context().run, args=(function,)),
        ):
            thread.start()
            thread.join()
    assert seen == ["", "mxfp8"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_leaves_every_context(error: type[BaseException]) -> None:
    """Whatever unwinds, the outer recipe is back, for eager and for compiled code."""

    def fail() -> None:
        with ottava.autocast("rowwise"), ottava.autocast("mxfp8"):
            raise error

    with ottava.autocast("blockwise"):
        with pytest.raises(error):
            fail()
        assert names() == "blockwise"
    assert names() == ""


def test_unknown_names_are_refused_and_change_nothing() -> None:
    """The nearest name is given; the context around stays in force."""
    with ottava.autocast("rowwise"):
        with pytest.raises(ValueError, match="did you mean 'mxfp8'"), ottava.autocast("mxfp9"):
            pass
        with pytest.raises(TypeError, match="needs a Recipe or the name of one"), ottava.autocast(8):  # type: ignore[arg-type]
            pass
        assert names() == "rowwise"


def test_backward_belongs_to_its_forward() -> None:
    """Backward outside, or inside quite another context, uses the recipe that its forward ran."""
    expected = step(network("rowwise"))
    for around in (None, "mxfp8", "off"):
        model, x = network("tensorwise"), data().requires_grad_()
        with ottava.autocast("rowwise"):
            y = model(x)
        if around is None:
            y.float().square().sum().backward()
        else:
            with ottava.autocast(enabled=False) if around == "off" else ottava.autocast(around):
                y.float().square().sum().backward()
        assert x.grad is not None
        assert_same([y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)], expected)


@pytest.mark.parametrize("gemm", GEMMS)
def test_one_gemm_of_one_layer_can_be_switched(gemm: str) -> None:
    """Five GEMMs as before, the sixth in BF16; the others keep their bits."""
    model = network()
    with ottava.autocast(ottava.RECIPES["tensorwise"].override("2", **{gemm: None})):
        got = step(model)
    operands = ran(model)
    assert [name for name, text in operands.items() if "bfloat16" in text] == [f"2.{gemm}"]
    plain = step(network())
    assert not all(map(torch.equal, got, plain))
    if gemm == "wgrad":  # leaves everything else alone: y, dx, dw of layer 0, both db
        assert [torch.equal(a, b) for a, b in zip(got, plain, strict=True)] == [True, True, True, True, False, True]


def test_overrides_of_the_context_replace_those_of_the_model(torch_first: None) -> None:
    """A recipe given by autocast is the whole recipe: the model's own overrides do not leak into it."""
    own = ottava.get_recipe("tensorwise").override("0", "bf16")
    model = network(own)
    with ottava.autocast("rowwise"):
        step(model)
    assert all("E4M3[row" in text for text in ran(model).values())
    with ottava.autocast(ottava.get_recipe("rowwise").override("2", "bf16")):
        step(model)
    assert {name.split(".")[0] for name, text in ran(model).items() if text == "high precision"} == {"2"}


def test_each_thread_sees_its_own() -> None:
    """Two threads inside different contexts at the same moment, and a third with none while the main one is in one."""
    barrier = threading.Barrier(3)
    seen: dict[str, tuple[str, bool]] = {}
    expected = {name: step(network(name or "tensorwise")) for name in ("rowwise", "mxfp8", "")}
    models = {name: network() for name in expected}  # made here: threads share torch's random numbers

    def work(name: str) -> None:
        with ottava.autocast(name) if name else contextlib.nullcontext():
            barrier.wait()
            seen[name] = (names(), all(map(torch.equal, step(models[name]), expected[name])))
            barrier.wait()

    with ottava.autocast("blockwise"):
        with ThreadPoolExecutor() as threads:
            list(threads.map(work, expected))
        assert names() == "blockwise"
    assert seen == {name: (name, True) for name in expected}


def test_as_a_decorator_it_is_entered_at_every_call() -> None:
    """Also recursively, and from inside another context."""
    model = network()

    @ottava.autocast("rowwise")
    def forward(depth: int) -> str:
        model(data())
        inner = forward(depth - 1) if depth else ""
        return f"{inner} {names()}"

    with ottava.autocast("mxfp8"):
        assert forward(2).split() == ["rowwise"] * 3
        assert names() == "mxfp8"
    assert "E4M3[row" in ran(model)["0.fprop"]


def test_a_context_inside_a_generator_lasts_until_it_is_left() -> None:
    """As with every context variable (and torch.no_grad) a suspended generator's context is its caller's too."""

    def batches() -> Iterator[str]:
        with ottava.autocast("rowwise"):
            yield names()
            yield names()

    with ottava.autocast("mxfp8"):
        assert list(batches()) == ["rowwise", "rowwise"]
        assert names() == "mxfp8"
        generator = batches()
        next(generator)
        assert names() == "rowwise"
        generator.close()
        assert names() == "mxfp8"
    assert names() == ""


def compiled() -> object:
    """What compiled code would see now."""
    return _COMPILED_VIEW.ambient


def test_threads_that_overlap_leave_nothing_behind() -> None:
    """A enters, B enters, A leaves, B leaves: restoring what B had found would leave A's recipe to compiled code."""
    turn = [threading.Event() for _ in range(3)]

    def a() -> None:
        with ottava.autocast("rowwise"):
            turn[0].set()
            turn[1].wait()
        turn[2].set()

    thread = threading.Thread(target=a)
    thread.start()
    turn[0].wait()
    with ottava.autocast("mxfp8"):
        turn[1].set()
        turn[2].wait()
    thread.join()
    assert (names(), compiled()) == ("", ambient())


# --- what would otherwise be silent ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_an_autocast_that_did_nothing_says_so_when_it_ends(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was not converted hears nothing; the line to add is named. Where layers of ours were compiled in
    this process, calibration is still told."""
    monkeypatch.setattr(_COMPILED_VIEW, "traced", compiled)
    plain = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    for options, effect, line in (
        ({"recipe": "delayed", "calibrating": True, "enabled": False}, "it filled no history", '(model, "delayed")'),
        ({"calibrating": True}, "it filled no history", '(model, "delayed")'),
        ({"recipe": "mxfp8"}, "nothing ran in FP8", '(model, "mxfp8")'),
        ({}, "nothing ran in FP8", '(model, "tensorwise")'),
    )[: 2 if compiled else 4]:
        with pytest.warns(UserWarning, match="no ottava layer ran in it") as said, ottava.autocast(**options):  # type: ignore[arg-type]
            plain(data()).sum().backward()
        (one,) = said
        assert effect in str(one.message)
        assert str(one.message).endswith(f"ottava.convert{line}")
        assert one.filename == __file__
    unpredicted = pytest.warns(UserWarning, match="filled no history: no layer that ran has predicted scales")
    with unpredicted, ottava.autocast(calibrating=True):
        network("tensorwise")(data()).sum().backward()


def test_an_autocast_that_was_heard_or_asks_for_nothing_is_silent() -> None:
    """High precision is what a plain model runs; an inner autocast counts for the outer; an error speaks for itself."""
    plain, model = nn.Sequential(nn.Linear(64, 64)).bfloat16(), network("tensorwise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"enabled": False}, {"recipe": "bf16"}, {"recipe": "rowwise", "enabled": False}):
            with ottava.autocast(**options):  # type: ignore[arg-type]
                plain(data())
        with ottava.autocast("rowwise"), ottava.autocast(enabled=False):
            model(data())
        with ottava.autocast("delayed", calibrating=True):
            model(data()).sum().backward()
        with pytest.raises(KeyError), ottava.autocast("rowwise"):
            raise KeyError


def test_compiled_layers_ask_nobody_when_they_run() -> None:
    """The second run of a compiled graph is not taken for silence."""
    model = torch.compile(network("tensorwise"), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2):
            with ottava.autocast("rowwise"):
                model(data())


def test_functions_whose_body_runs_later_are_not_decorated() -> None:
    """A call of a generator or coroutine function runs nothing of it: the autocast would have ended."""

    def generator() -> Iterator[str]:
        yield names()

    async def coroutine() -> str:
        return names()

    async def both() -> AsyncIterator[str]:
        yield names()

    class Owner:
        def method(self) -> Iterator[str]:
            yield names()

    for function in (generator, coroutine, both, Owner().method, functools.partial(generator)):
        with pytest.raises(TypeError, match=r"generator or coroutine function.*inside its body"):
            ottava.autocast("rowwise")(function)
    assert ottava.autocast("rowwise")(lambda: names())() == "rowwise"


# --- batch invariance ---


def test_recipes(recipe: Recipe) -> None:
    """A recipe is refused exactly if rows share a scale or random bits, and the message names the cell."""
    lhs = [getattr(recipe, gemm).lhs for gemm in ("fprop", "dgrad")]
    shares = any(
        spec.granularity.rows != 1
        or spec.scale_format == "e4m3"
        or spec.rounding == "stochastic"
        or spec.transform is not None
        for spec in lhs
        if spec is not None
    )
    if shares:
        with pytest.raises(
            ValueError, match=rf"recipe '{recipe.name}' cannot be batch invariant: (fprop|dgrad)\.lhs is"
        ):
            made_invariant(recipe)
        return
    made = made_invariant(recipe)
    assert made.casts
    assert made.quantized is recipe.quantized
    for gemm in GEMMS:
        one, other = getattr(made, gemm), getattr(recipe, gemm)
        assert (one.lhs, one.rhs, one.batch_invariant) == (other.lhs, other.rhs, True)
        assert GemmRecipe.from_dict(one.to_dict()) == one
    assert made_invariant(recipe) is made
    assert Recipe.from_dict(made.to_dict()) == made


def test_tiles_hide_the_place_of_a_row() -> None:
    """Where torch computes the ends of a tensor by other code than its middle, tiles do not."""
    torch.manual_seed(0)
    differs = False
    for width in (1, 64, 100, 128, 384, 40_000):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(23, width).to(dtype)
            for f in (torch.exp, torch.nn.functional.silu, torch.nn.functional.gelu, torch.cos):
                whole = in_tiles(f, x)
                assert torch.allclose(whole.float(), f(x).float(), rtol=2.0**-7, atol=2.0**-20)
                for a, b in ((0, 1), (5, 9), (22, 23)):
                    assert torch.equal(in_tiles(f, x[a:b]), whole[a:b]), (f, width, dtype)
                    differs |= not torch.equal(f(x[a:b]), f(x)[a:b])
    assert in_tiles(torch.exp, torch.ones(0, 64)).shape == (0, 64)
    assert in_tiles(torch.add, torch.ones(2, 3, 64), torch.ones(2, 3, 64)).shape == (2, 3, 64)
    assert RECIPES["rowwise"].fprop.batch_invariant is False
    assert differs or not torch.backends.cpu.get_cpu_capability().startswith("AVX")
