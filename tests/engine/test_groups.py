"""Two processes that do not run the same are told which rank runs what; those that do share amaxes in any wrapper."""

from __future__ import annotations

import json
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import ottava
import warm
from ottava.engine import groups
from scaling_samples import WIDTH, loss_of, network, noise, sgd, windows


def largest(step: int, *of: int) -> float:
    return max(noise(100 * step + rank).abs().max().item() for rank in of or (0, 1))


def train(rank: int, model: nn.Module, steps: range) -> None:
    optimizer = sgd(model, lr=0.0)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, noise(100 * step + rank)).backward()
        optimizer.step()


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def other_recipes(rank: int) -> None:
    """Found when the model is wrapped, before any step."""
    for one, two, words in (
        ("delayed", "guarded", ("'0.input'", "scaling guarded", "scaling delayed")),
        ("delayed", "tensorwise", ("no predicted scale", "scaling delayed")),
        (ottava.get_recipe("delayed").override("2", "tensorwise"), "delayed", ("'2.input'", "no predicted scale")),
    ):
        model = network((one, two)[rank])
        refused(lambda model=model: DistributedDataParallel(model), "rank 0 runs", "rank 1 runs", *words)


def other_autocasts(rank: int) -> None:
    """Found at the first boundary, before the amaxes meet; wrapped before it was converted, too."""
    for early in (True, False):
        plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))).bfloat16()
        wrapped = DistributedDataParallel(network("tensorwise") if early else plain)
        if not early:
            ottava.convert(wrapped.module, ("guarded", "delayed")[rank])
        with ottava.autocast(("delayed", "guarded")[rank] if early else None):
            refused(lambda wrapped=wrapped: train(rank, wrapped, range(1)), "'0.input'", "rank 0 runs", "guarded")


def one_that_says_nothing(rank: int) -> None:
    """It is waited for as long as the group waits for its collectives, and named."""
    if rank == 0:
        doors = ("0.input",)
        spec = ottava.get_recipe("delayed").fprop.lhs
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
        refused(lambda: groups.agree(dist.group.WORLD, doors, (spec,)), "rank 1 did not say within 1 s", "delayed")
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=600), dist.group.WORLD)
    dist.barrier()
    if rank == 1:
        groups.agree(dist.group.WORLD, (), ())  # the turns stay in step


def other_wrappers(rank: int) -> None:
    """FSDP1 knows its group without a word: windows are DDP's. Flat parameters are refused."""
    reference, sharded, cpu = network(), network(), torch.device("cpu")
    train(rank, DistributedDataParallel(reference), range(3))
    assert windows(reference)[0] == [largest(2), largest(1), largest(0)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="delayed scaling")
        train(rank, FullyShardedDataParallel(sharded, use_orig_params=True, device_id=cpu), range(3))
    assert windows(sharded) == windows(reference)
    flat = FullyShardedDataParallel(network(), device_id=cpu)
    refused(lambda: train(rank, flat, range(1)), "use_orig_params=True", "fully_shard(model)")


CASES = (other_recipes, other_autocasts, one_that_says_nothing, other_wrappers)


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=600)
    )
    answers: dict[str, str] = {}
    for case in CASES:
        try:
            case(rank)
            answers[case.__name__] = ""
        except BaseException:
            answers[case.__name__] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(answers))
        if answers[case.__name__]:
            break
        dist.barrier()
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    """All cases, in processes that are started once."""
    context = warm.start_ranks(run, (str(tmp_path),), 2)
    try:
        for process in context.processes:
            process.join(600)
    finally:
        for process in context.processes:
            if process.is_alive():
                process.terminate()
    for rank in range(2):
        answers = json.loads((tmp_path / f"{rank}.json").read_text())
        assert answers == {case.__name__: "" for case in CASES}, f"rank {rank}: {[t for t in answers.values() if t]}"
