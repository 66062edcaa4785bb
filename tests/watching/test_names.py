"""Full names of modules, found while they run."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ottava.watching.modules import ModuleNames, walk


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class DistributedDataParallel(Wrapper):
    """As DDP: something else is in it besides the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.logger = nn.Identity()


def test_walk_is_named_modules() -> None:
    model = nn.ModuleDict({"a": block(), "b": nn.ModuleList([block(), nn.Identity()])})
    model.again = model["a"]
    assert list(walk(model)) == list(model.named_modules())


@pytest.mark.parametrize(
    "wrap",
    [
        Wrapper,
        DistributedDataParallel,
        checkpoint_wrapper,
        torch.compile,
        lambda model: DistributedDataParallel(torch.compile(checkpoint_wrapper(model))),
        lambda model: nn.Sequential(*(checkpoint_wrapper(torch.compile(part)) for part in model)),
    ],
    ids=["wrapper", "ddp", "checkpoint", "compile", "all", "parts"],
)
def test_wrappers_leave_no_trace_in_names(wrap: type) -> None:
    model = block()
    names = ModuleNames()
    wrapped = wrap(model)
    names.learn(wrapped)
    assert (names.of(model[0]), names.of(model[2])) == ("0", "2")


def test_a_child_called_module_beside_others_keeps_its_name() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    names = ModuleNames(model := Model())
    assert names.of(model.module) == "module"


def test_layers_made_later_are_found_in_their_model() -> None:
    names = ModuleNames()
    names.learn(model := nn.ModuleDict({"first": block()}))
    model["second"] = block()
    names.learn(model["second"][0])
    assert names.of(model["second"][2]) == "second.2"


def test_a_second_model_has_its_class_in_front_where_names_are_taken() -> None:
    names = ModuleNames()
    models = [block() for _ in range(3)]
    other = nn.ModuleDict({"body": block()})
    for model in (*models, other):
        names.learn(model)
    assert [names.of(model[0]) for model in models] == ["0", "Sequential.0", "Sequential 2.0"]
    assert names.of(other["body"][0]) == "body.0"


def test_a_model_that_is_gone_frees_its_names() -> None:
    names = ModuleNames()
    for _ in range(3):
        model = block()
        names.learn(model)
        assert names.of(model[0]) == "0"
        del model
        gc.collect()


def test_with_a_model_given_others_have_no_names() -> None:
    model, other = block(), block()
    names = ModuleNames(model)
    for module in (other, other[0], nn.ReLU(), model):
        names.learn(module)
        assert names.knows(module)
    assert names.of(other[0]) is None
    assert names.of(model[0]) == "0"
    model.append(other)  # now it is part of it
    names.learn(late := nn.Linear(2, 2))
    model.append(late)
    gc.collect()
    assert names.of(late) is None or names.of(late) == "4"


def test_each_module_is_told_once() -> None:
    told: list[str] = []
    model = block()
    names = ModuleNames(found=lambda name, module: told.append(name))
    for module in (model, model[0], model):
        names.learn(module)
    assert told == ["Sequential", "0", "1", "2"]


def test_a_layer_alone_is_named_after_its_class() -> None:
    names = ModuleNames()
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    names.learn(first)
    names.learn(second)
    assert (names.of(first), names.of(second)) == ("Linear", "Linear 2")


def test_knows_what_is_compiled() -> None:
    model = nn.Sequential(block(), block(), block())
    model[0] = torch.compile(model[0])
    model[1].compile()
    names = ModuleNames(model)
    assert list(names.compiled()) == [model[0], model[1]]


def test_learning_costs_nothing_to_the_forward() -> None:
    x = torch.ones(2, 4)
    model = block()
    y: Tensor = model(x)
    ModuleNames().learn(model)
    assert torch.equal(model(x), y)


def test_the_holder_of_a_parameter_is_a_layer_where_one_holds_it() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "norm": nn.LayerNorm(2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    names = ModuleNames(model)
    for _ in range(2):  # looked up, and remembered
        assert names.holder(model["head"].weight) == (model["head"], "head", "weight")
        assert names.holder(model["norm"].bias) == (model["norm"], "norm", "bias")
        assert names.holder(nn.Parameter(torch.ones(2))) is None
