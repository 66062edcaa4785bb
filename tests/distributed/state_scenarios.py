"""What several processes do with scaling state under DistributedDataParallel; run in each of them by test_state_ddp.

Every rank has its own data. After each scenario the histories of all ranks are compared bit for bit.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ottava
from scaling_samples import (
    WIDTH,
    differences,
    door_of,
    doors,
    lengths,
    loss_of,
    network,
    noise,
    sgd,
    snapshot,
    state_of,
    windows,
    with_cells,
)

T = TypeVar("T")
_MEETINGS = itertools.count()


@dataclass(frozen=True)
class World:
    """Which of how many, and a folder that all of them see."""

    rank: int
    size: int
    folder: str

    def data(self, step: int) -> Tensor:
        """This rank's batch of a step."""
        return noise(100 * step + self.rank)

    def largest(self, step: int, *ranks: int) -> float:
        """The amax of the batches of these ranks, or of all."""
        return max(noise(100 * step + rank).abs().max().item() for rank in ranks or range(self.size))

    def once(self, make: Callable[[], T]) -> T:
        """What make() returns on rank 0, on all ranks: a witness of one process is computed by one process."""
        made = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(made)
        return made[0]  # type: ignore[return-value]

    def meet(self) -> None:
        """All processes, in a new group."""
        if dist.is_initialized():
            self.leave()
        store = dist.FileStore(f"{self.folder}/meeting-{next(_MEETINGS)}", self.size)
        limit = timedelta(seconds=600)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=limit)

    def leave(self) -> None:
        """Ends the group when all are ready, since a closed connection fails what a slower rank waits for.

        A group keeps threads, and a training keeps its groups: hundreds of threads took most of the CPU time.
        """
        store = dist.distributed_c10d._get_default_store()
        store.set(f"left {self.rank}", "")
        store.wait([f"left {other}" for other in range(self.size)])
        groups = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        gc.collect()
        del groups  # the last holders: a Reducer would join gloo's thread under the GIL that the thread waits for


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **options)


def train(world: World, model: nn.Module, steps: range, optimizer: torch.optim.Optimizer | None = None) -> None:
    """A plain loop."""
    optimizer = optimizer or sgd(model)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, world.data(step)).backward()
        optimizer.step()


def same_everywhere(world: World, *models: nn.Module) -> None:
    """All buffers of all doors, on all ranks, bit for bit."""
    for model in models:
        mine = {name: tensor.tolist() for name, tensor in state_of(model).items()}
        everybody: list[Any] = [None] * world.size
        dist.all_gather_object(everybody, mine)
        assert all(other == mine for other in everybody), [
            (name, [other.get(name) for other in everybody]) for name in mine if any(o != mine for o in everybody)
        ][:1]


def assert_same(*models: nn.Module) -> None:
    one, *others = [
        {name.replace("module.", ""): tensor for name, tensor in snapshot(model).items()} for model in models
    ]
    for other in others:
        assert differences(one, other) == []


def windows_hold_the_largest_of_all_ranks(world: World) -> None:
    """Without a word about processes: each step's entry is the largest amax of any rank."""
    model = ddp(network())
    train(world, model, range(4))
    assert windows(model)[0] == [world.largest(step) for step in (3, 2, 1, 0)]
    assert lengths(model) == [4] * 6
    same_everywhere(world, model)


def gradient_accumulation(world: World) -> None:
    """With no_sync and without: three micro-batches are one step."""
    plain, lazy = ddp(network()), ddp(network())
    for model in (plain, lazy):
        optimizer = sgd(model)
        for step in range(3):
            for i in range(3):
                with model.no_sync() if model is lazy and i < 2 else nullcontext():
                    loss_of(model, world.data(3 * step + i)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert lengths(model) == [3] * 6
        assert windows(model)[0][0] == max(world.largest(step) for step in (6, 7, 8))
        same_everywhere(world, model)


def identical_models_by_turns(world: World) -> None:
    """TE #814 as it was reported: two identical models in one DDP script, alternating, and one after the other."""
    alone, one, two, later = (ddp(network()) for _ in range(4))
    train(world, alone, range(4))
    optimizers = [sgd(one), sgd(two)]
    for step in range(4):
        for model, optimizer in zip((one, two), optimizers, strict=True):
            train(world, model, range(step, step + 1), optimizer)
    train(world, later, range(4))
    assert_same(alone, one, two, later)
    same_everywhere(world, alone, later)


def copies(world: World) -> None:
    """A deep copy (EMA) is left alone while its original trains, and trains in its turn, in a wrapper of its own.

    Without learning: gloo adds the gradients of three ranks in the order that a wrapper's buckets give.
    """
    model = ddp(network())
    train(world, model, range(2))
    twin = copy.deepcopy(model.module)
    before = snapshot(twin)
    train(world, model, range(2, 4), sgd(model, lr=0.0))
    assert differences(snapshot(twin), before) == []
    train(world, ddp(twin), range(2, 4), sgd(twin, lr=0.0))
    assert differences(state_of(model.module), state_of(twin)) == []
    same_everywhere(world, twin)


def reset_re_arms(world: World) -> None:
    """After reset() scales move again, on all ranks."""
    model = ddp(network())
    train(world, model, range(2))
    ottava.ScalingState(model).reset()
    assert lengths(model) == [0] * 6
    train(world, model, range(2, 4))
    assert windows(model)[0] == [world.largest(3), world.largest(2)]
    same_everywhere(world, model)


class Recomputed(nn.Module):
    """A network whose second half is recomputed, reentrantly or not, or nested."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.model, self.way = network(layers=3), way

    def forward(self, x: Tensor) -> Tensor:
        """(M, WIDTH) -> (M, WIDTH)."""
        x = self.model[:2](x)
        if self.way == "plain":
            return self.model[2:](x)
        if self.way == "nested":
            inner = partial(checkpoint, self.model[3:], use_reentrant=False)
            return checkpoint(lambda x: inner(self.model[2](x)), x, use_reentrant=False)
        return checkpoint(self.model[2:], x, use_reentrant=self.way == "reentrant")


def recomputation(world: World) -> None:
    """Reentrant, non-reentrant and nested: the bits of no checkpointing."""
    models = [ddp(Recomputed(way)) for way in ("plain", "reentrant", "non-reentrant", "nested")]
    for model in models:
        train(world, model, range(3))
    assert_same(*models)
    same_everywhere(world, *models)


def pipeline_order(world: World) -> None:
    """1F1B through a model under no_sync, gradients reduced at the end: the bits of micro-batch after micro-batch."""
    results = []
    for schedule in ("F0 B0 F1 B1 F2 B2 F3 B3", "F0 F1 B0 F2 B1 F3 B2 B3"):
        model = ddp(network())
        optimizer = sgd(model)
        for step in range(2):
            losses: dict[str, Tensor] = {}
            with model.no_sync():
                for action, i in schedule.split():
                    if action == "F":
                        losses[i] = loss_of(model, world.data(4 * step + int(i)))
                    else:
                        losses.pop(i).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
        same_everywhere(world, model)
        results.append(model)
    assert_same(*results)


class Experts(nn.Module):
    """A shared layer and one per expert, of which a rank may run none."""

    def __init__(self, recipe: str = "delayed", by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = partial(ottava.nn.Linear, recipe=recipe) if by_hand else nn.Linear
        self.shared = make(WIDTH, WIDTH)
        self.experts = nn.ModuleList(make(WIDTH, WIDTH) for _ in range(2))
        self.bfloat16()
        if not by_hand:
            ottava.convert(self, recipe)

    def forward(self, x: Tensor, experts: tuple[int, ...]) -> Tensor:
        """shared(x) plus what the experts say."""
        y: Tensor = self.shared(x)
        for i in experts:
            y = y + self.experts[i](x)
        return y


def route(world: World, step: int) -> tuple[int, ...]:
    """Rank 0 runs expert 0 always and expert 1 in step 2; the others run expert 1 only in step 1, or nothing."""
    if world.rank == 0:
        return (0, 1) if step == 2 else (0,)
    return (1,) if step == 1 else ()


def train_experts(world: World, model: Experts, recipe: str | None = None, update: Any = "step") -> None:
    wrapped = ddp(model, find_unused_parameters=True)
    optimizer = sgd(wrapped, lr=0.0)
    for step in range(4):
        optimizer.zero_grad()
        with ottava.autocast(recipe, update=update):
            loss = loss_of(partial(wrapped, experts=route(world, step)), world.data(step))
        loss.backward()
        optimizer.step()
    others = tuple(range(1, world.size))
    assert [len(w) for w in windows(model)] == [4, 4, 2]
    assert windows(model)[1] == [world.largest(step, 0) for step in (3, 2, 1, 0)]
    assert windows(model)[2] == [world.largest(2, 0), world.largest(1, *others)]
    same_everywhere(world, model)


def idle_on_one_rank(world: World) -> None:
    """Also in the very first step: no hang, and an expert's history is that of the ranks on which it ran."""
    train_experts(world, Experts())


def idle_on_one_rank_in_te_timing(world: World) -> None:
    """Boundaries at the exit and in the backward have a place for every door too."""
    train_experts(world, Experts(), update="autocast")


def idle_layers_made_by_hand(world: World) -> None:
    """Never converted: what DDP wraps is the model, and has one state."""
    model = Experts(by_hand=True)
    train_experts(world, model)
    assert len({model.shared.scaling_state, *(e.scaling_state for e in model.experts)}) == 1


def idle_before_its_buffers_are_made(world: World) -> None:
    """Converted with a recipe without histories, run under one with: the ranks make the buffers together."""
    train_experts(world, Experts("tensorwise"), recipe="delayed")


def calibration_with_an_idle_layer(world: World) -> None:
    """Calibrated in DDP: the largest of all ranks, and the same scales everywhere."""
    model = Experts()
    wrapped = ddp(model, find_unused_parameters=True)
    train_batches = [(world.data(step), route(world, step)) for step in range(4)]
    ottava.calibrate(wrapped, train_batches, loss=lambda m, b: loss_of(partial(m, experts=b[1]), b[0]))
    assert [len(w) for w in windows(model)] == [4, 4, 2]
    assert windows(model)[0] == [world.largest(step) for step in (3, 2, 1, 0)]
    same_everywhere(world, model)


def exceptions(world: World) -> None:
    """In a forward, in a backward, and inside TE's timing, where leaving must not start a collective."""
    model = ddp(network())
    optimizer = sgd(model)
    train(world, model, range(2), optimizer)
    before = state_of(model), [door.staged.clone() for door in doors(model).values()]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for hook in (model.module[2].register_forward_pre_hook, model.module[0].register_full_backward_hook):
        for update in ("step", "autocast"):
            handle = hook(interrupt)
            try:
                with model.no_sync(), ottava.autocast(update=update):  # type: ignore[arg-type]
                    loss_of(model, world.data(9)).backward()
                raise AssertionError("nothing was raised")
            except KeyboardInterrupt:
                handle.remove()
            assert differences(state_of(model), before[0]) == []
            assert all(map(torch.equal, [door.staged for door in doors(model).values()], before[1]))
    train(world, model, range(2, 4), optimizer)
    assert windows(model)[0][:2] == [world.largest(3), world.largest(2)]
    same_everywhere(world, model)


def evaluation_on_one_rank(world: World) -> None:
    """Rank 0 validates between forward and backward and between steps; the others do not. Not a bit differs."""
    plain, evaluated = ddp(network()), ddp(network())
    optimizers = [sgd(plain), sgd(evaluated)]
    for step in range(3):
        train(world, plain, range(step, step + 1), optimizers[0])
        optimizers[1].zero_grad()
        loss = loss_of(evaluated, world.data(step))
        for _ in range(2 if world.rank == 0 else 0):
            with torch.no_grad(), ottava.autocast(with_cells("delayed", amax_history_len=3)):
                evaluated.module(100 * noise(77))
        loss.backward()
        optimizers[1].step()
    assert_same(plain, evaluated)
    same_everywhere(world, evaluated)


def nonfinite_on_one_rank(world: World) -> None:
    """The last rank overflows: its amax is left out and counted on all ranks; the others' entries stand."""
    model = ddp(network())
    optimizer = sgd(model, lr=0.0)
    x = world.data(0) * (math.inf if world.rank == world.size - 1 else 1)
    loss_of(model, x).backward()
    optimizer.step()
    assert windows(model)[0] == [world.largest(0, *range(world.size - 1))]
    assert [int(door_of(model.module, i).nonfinite_count) for i in (0, 2)] == [1, 1]  # y has NaN where x is infinite
    same_everywhere(world, model)


def another_window_in_the_middle(world: World) -> None:
    """Converted again inside its wrapper: the newest entries stay, the group is remembered."""
    model = ddp(network())
    optimizer = sgd(model)
    train(world, model, range(3), optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ottava.convert(model.module, with_cells("guarded", amax_history_len=2))
    train(world, model, range(3, 4), optimizer)
    assert windows(model)[0] == [world.largest(3), world.largest(2)]
    same_everywhere(world, model)


def two_recipes(world: World) -> None:
    """By override, with a layer that keeps no history in between."""
    recipe = ottava.get_recipe("delayed").override("2", "tensorwise").override("4", "guarded")
    model = ddp(network(recipe, layers=3))
    train(world, model, range(3))
    assert [len(w) for w in windows(model)] == [3, 3]
    same_everywhere(world, model)


def threads(world: World) -> None:
    """Two models in two threads, each with a group of its own: as one after the other."""
    expected = [ddp(network(seed=seed)) for seed in (1, 2)]
    for model in expected:
        train(world, model, range(4))
    groups = [dist.new_group() for _ in range(2)]
    models = [ddp(network(seed=seed), process_group=g) for seed, g in zip((1, 2), groups, strict=True)]
    for model in models:
        ottava.ScalingState(model)  # torch notes the DDP that runs for the process, not for the thread
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda model: train(world, model, range(4)), models))
    for got, model in zip(models, expected, strict=True):
        assert_same(got, model)
    same_everywhere(world, *models)


def second_backward(world: World) -> None:
    """retain_graph: the same amaxes again."""
    model = ddp(network())
    optimizer = sgd(model)
    for step in range(2):
        loss = loss_of(model, world.data(step))
        with model.no_sync():
            loss.backward(retain_graph=True)
        staged = {name: door.staged.clone() for name, door in doors(model).items()}
        loss.backward()
        assert all(torch.equal(door.staged, staged[name]) for name, door in doors(model).items())
        optimizer.step()
    assert lengths(model) == [2] * 6
    same_everywhere(world, model)
