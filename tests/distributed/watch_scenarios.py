"""What several processes do while they are watched; run in each of them by test_watch_ranks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from state_scenarios import World
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor as sent
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.record.reader import Run
from ottava.watching.modules import ModuleTap

TENSORS = ("input", "weight", "grad_output", "grad_input", "grad_weight")


class Model(nn.Module):
    """Two linears, the second one checkpointed."""

    in_place = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.relu(self.up(x), inplace=self.in_place)
        return checkpoint(self.down, h, use_reentrant=False)


Wrap = Callable[[nn.Module], nn.Module]


def train(model: nn.Module, *, watched: bool) -> tuple[list[tuple[str, str, Tensor]], list[Tensor], ModuleTap]:
    """Two steps of two micro-batches; what was seen, and the losses and weights after it."""
    seen: list[tuple[str, str, Tensor]] = []
    tap = ModuleTap(lambda layer, tensor, x: seen.append((layer, tensor, x.clone())), tensors=TENSORS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    results = []
    for step in range(2):
        if watched:
            tap.attach()
        for part in range(2):
            x = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(10 * step + part + 100 * dist.get_rank()))
            loss = model(x.requires_grad_()).square().mean()
            loss.backward()
            results.append(loss.detach())
        tap.detach()
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        local = parameter.detach()
        results.append(local.to_local() if hasattr(local, "to_local") else local)
    return seen, results, tap


def check(wrap: Wrap) -> tuple[list[tuple[str, str, Tensor]], ModuleTap]:
    """Names are the model's, each tensor counts once, and training is bit for bit what it is unwatched."""
    model = Model()
    seen, watched, tap = train(wrap(copy.deepcopy(model)), watched=True)
    _, alone, _ = train(wrap(copy.deepcopy(model)), watched=False)
    for a, b in zip(watched, alone, strict=True):
        assert torch.equal(a, b)
    expected = {(layer, t): 2 if t == "weight" else 4 for layer in ("up", "down") for t in TENSORS}
    counts = Counter((layer, tensor) for layer, tensor, _ in seen)
    assert counts == Counter(expected), counts
    assert [entry["name"] for entry in tap.coverage()] == ["up", "down"]
    return seen, tap


def shapes(seen: list[tuple[str, str, Tensor]]) -> dict[tuple[str, str], tuple[int, ...]]:
    return {(layer, tensor): tuple(x.shape) for layer, tensor, x in seen}


def ddp(world: World) -> None:
    """DistributedDataParallel."""
    seen, _ = check(DistributedDataParallel)
    first = next(x for layer, tensor, x in seen if (layer, tensor) == ("up", "input"))
    mine = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(100 * dist.get_rank())).reshape(-1, 16)
    assert torch.equal(first, mine)


def fsdp(world: World) -> None:
    """fully_shard on every layer and on the model: in forward the weight is whole."""

    def wrap(model: nn.Module) -> nn.Module:
        model.in_place = False  # fully_shard loses its own hook on the view that a linear returns
        for layer in (model.up, model.down):
            fully_shard(layer)
        return fully_shard(model)

    seen, tap = check(wrap)
    assert shapes(seen)["up", "weight"] == (32, 16)
    assert shapes(seen)["up", "grad_weight"] == (32, 16)
    assert all(entry["why"] == "" for entry in tap.coverage())


def fsdp_in_bf16(world: World) -> None:
    """What is seen has the dtype that the GEMM gets."""
    seen, _ = check(lambda model: fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    assert {x.dtype for _, _, x in seen} == {torch.bfloat16}


def tensor_parallel(world: World) -> None:
    """Weights sharded over ranks: this rank's shard, and said to be."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Model(), mesh, plan)
    model.in_place = False  # torch allows none on what a sharded layer returns
    seen, _, tap = train(model, watched=True)
    size = dist.get_world_size()
    found = shapes(seen)
    assert found["up", "weight"] == (32 // size, 16)
    assert found["down", "weight"] == (16, 32 // size)
    assert found["up", "input"] == (12, 16)
    whys = {entry["name"]: entry["why"] for entry in tap.coverage()}
    assert "W: is this rank's shard" in whys["up"], whys


def idle_layers(world: World) -> None:
    """A layer that only some ranks run: watching waits for nobody."""
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    seen: list[str] = []
    tap = ModuleTap(lambda layer, tensor, x: seen.append(layer), model=model)
    tap.attach()
    model[dist.get_rank() % 2](torch.ones(2, 8)).sum().backward()
    tap.detach()
    assert set(seen) == {str(dist.get_rank() % 2)}


def shadow_steps(world: World) -> None:
    """DDP and FSDP2: a shadow step in the same step on every rank; every bit of the training stays. A forward that
    sends nothing is asked for its logic, too."""

    def sharded(model: nn.Module) -> nn.Module:
        for layer in (model.up, model.down):
            fully_shard(layer)
        return fully_shard(model)

    for name, wrap, end, mixes in (
        ("ddp", DistributedDataParallel, lambda y: y.cumsum(1), False),
        ("fsdp", sharded, lambda y: y.cumsum(1), None),
        ("mixing", DistributedDataParallel, lambda y: (y - y.mean(0)).cumsum(1), True),
        ("sending", DistributedDataParallel, lambda y: y + sent(y.detach(), 0, dist.group.WORLD).mean(0), None),
    ):
        after = []
        for watched in (True, False):
            model = Wide(end)
            ottava.convert(model, "tensorwise")
            model = wrap(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            folder = Path(world.folder) / f"shadow-{name}"
            watch = ottava.watch(None, folder) if watched else nullcontext()
            with watch:
                for step in range(6):
                    x = torch.randn(16, 4, 64, generator=torch.Generator().manual_seed(10 * step + world.rank))
                    (model(x) - x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            after.append([p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))
        if world.rank == 0:
            (line,) = Run.open(folder).experiments
            assert (line["kind"], line["step"], line["tail"]) == ("shadow", 5, "replayed"), line
            assert 0.005 < line["error"] < 0.15, line
            assert line["loss"] != line["loss_without"]
            assert line.get("mixes") is mixes, line


class Wide(nn.Module):
    """Two linears that a recipe takes."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.end = nn.Linear(64, 128), nn.Linear(128, 64), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.down(nn.functional.gelu(self.up(x))))
