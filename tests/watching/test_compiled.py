"""Compiled code under a tap: seen where it can be, reported where not, and never compiled again for it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ottava.watching.modules import ModuleTap
from watch_samples import Seen, network, noise, tapped


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


@pytest.mark.parametrize("watched_first", [True, False], ids=["watched first", "compiled first"])
@pytest.mark.parametrize("given", [True, False], ids=["model", "process"])
@pytest.mark.parametrize("how", ["wrapper", "function", "module", "part"])
def test_compiled_layers_are_reported_and_never_recompiled(
    how: str, given: bool, watched_first: bool, counter: Any
) -> None:
    """By a look at every step, and at every second one."""
    between = given == watched_first
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
    assert frames[0] <= 3  # the three hooks, where Dynamo does not trace what calls them
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
