"""`Trainer` in several processes; run by test_train_ranks. The witness is one process with the same microbatches.

The parent trains that one process before it starts the others; its folder stands beside theirs.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from state_scenarios import World
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ottava
from ottava.base.settings import ConfigError
from ottava.base.untrusted import read_text
from ottava.optim.engine import BOUND, group_scales, widened
from ottava.plan.fleet import Mesh, predict
from ottava.record.reader import Run
from ottava.train import ranks as faults
from ottava.train.checkpoint import _optimizer_entries, consolidate, newest_checkpoint, read_any
from ottava.train.config import TrainConfig, load_config
from ottava.train.loop import Trainer
from ottava.train.model import ByteTransformer
from ottava.train.ranks import RankError, local

TINY = (
    "model={d_model: 32, layers: 2, heads: 4, kv_heads: 4, ffn: 64}",
    "data.max_bytes=100000",
    "batch_size=8",
    "sequence_length=32",
    "steps=4",
    "checkpoint.every=4",
    "evaluation={every: 2, batches: 1}",
    "optimizer.grad_clip=1e9",  # a norm that is summed over shards may differ in its last bit
    "parallel.timeout=300",  # for a busy machine
)
LOW = "optimizer={weights: bf16, master: remainder, moments: bf16}"
EXPERTS = ("model.experts=4", "recipe=blockwise")
DEEP = ("recipe=delayed", "model.layers=4")  # for four stages, or two of two processes
STORAGES = (
    ("fp8", "fp32", "fp32"),
    ("fp8", "remainder", "fp8"),
    ("fp8", "fp32", "int8"),
    ("fp32", "null", "fp8"),
    ("fp32", "null", "int8"),
    ("bf16", "remainder", "bf16"),
)
"""Weights, masters and moments."""


def stored(weights: str, master: str, moments: str) -> str:
    return f"optimizer={{weights: {weights}, master: {master}, moments: {moments}}}"


ALONE: dict[str, tuple[str, ...]] = {
    "tensorwise": (),
    "delayed": ("recipe=delayed",),
    "low": (LOW,),
    "experts": EXPERTS,
    "deep": DEEP,
    **{f"one-{'-'.join(kinds)}": ("model.layers=4", stored(*kinds)) for kinds in STORAGES},
}
"""Runs of one process."""


def tiny(*overrides: str) -> TrainConfig:
    return load_config(None, [*TINY, *overrides])


def alone(folder: Path, size: int, names: Iterable[str] = ALONE) -> None:
    """The runs of one process, with a microbatch for each of `size` processes."""
    for name in names:
        overrides = ALONE[name]
        Trainer(tiny(*overrides, f"microbatches={size}"), folder / name).advance()


def curve(run: Path) -> list[tuple[Any, ...]]:
    """Loss and validation loss of each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["val_loss"]) for line in lines]


def witness(world: World, name: str) -> Path:
    return Path(world.folder).parent / name


def run_of(world: World, name: str, *overrides: str, steps: int | None = None, resume: bool = False) -> Trainer:
    world.meet()
    trainer = Trainer(tiny(*overrides), Path(world.folder, name), resume=resume)
    trainer.advance(steps)
    if not trainer.done:
        trainer.close()
    dist.barrier()
    return trainer


def said(call: Callable[[], object], error: type[Exception] = RankError) -> str:
    try:
        call()
    except error as caught:
        return str(caught)
    raise AssertionError(f"no {error.__name__}")


def bits_of_one_process(world: World, *cases: tuple[str, ...]) -> None:
    """With two processes a sum has one order. With four, sums of gradients differ in it, and pipelines in nothing."""
    for name, folder, *overrides in cases:
        trainer = run_of(world, folder, *overrides)
        assert [record.loss for record in trainer.history] == [loss for _, loss, _ in curve(Path(world.folder, folder))]
        expected, got = curve(witness(world, name)), curve(Path(world.folder, folder))
        if (world.size == 2 and name != "low") or "pp" in overrides[0]:
            assert got == expected, (folder, got, expected)
        else:  # gradients to a few roundings of FP32, or of BF16; a code that flips moves a number by 2**-4 of itself
            assert got[0] == expected[0]
            assert all(abs(a[1] - b[1]) < 2.0**-6 * b[1] for a, b in zip(got, expected, strict=True)), (got, expected)


def replicas_and_shards(world: World) -> None:
    """Each adds the same microbatches' gradients in FP32."""
    replicas = ("delayed", "dp", f"parallel.dp={world.size}", "recipe=delayed")
    bits_of_one_process(world, replicas, ("tensorwise", "shard", f"parallel.shard={world.size}"))


def same_bits_as_one_process(world: World) -> None:
    """Pipelines of every schedule; shards with BF16 weights."""
    cases = []
    for schedule in ("gpipe", "1f1b", "interleaved"):
        if schedule != "interleaved" or world.size == 2:
            pipeline = f"parallel={{pp: {world.size}, schedule: {schedule}, timeout: 300}}"
            cases.append(("deep", schedule, pipeline, f"microbatches={world.size}", *DEEP))
    bits_of_one_process(world, *cases, ("low", "low", f"parallel.shard={world.size}", LOW))


def near_runs(world: World, folder: str, name: str, *overrides: str) -> list[list[tuple[Any, ...]]]:
    """The curves of one process and of these. Four processes run the first three steps of many layouts."""
    run_of(world, folder, *overrides, steps=3 if world.size > 2 else None)
    got = curve(Path(world.folder, folder))
    return [curve(witness(world, name))[: len(got)], got]


def tensor_parallelism_stays_near_one_process(world: World) -> None:
    """The loss of the first step to a bound, later ones to the noise of FP8.

    Each of the 2 sums a layer rounds the stream's update to BF16 once more, so a logit moves by at most 4 * 2**-8 of
    the largest one; codes that flip double that. The loss moves by at most twice that.
    """
    names = [(f"parallel.tp={world.size}", "recipe=delayed")]
    if world.size == 4:
        names = [
            ("parallel={dp: 2, tp: 2}",),
            ("parallel={shard: 2, tp: 2}",),
            ("parallel={pp: 2, tp: 2}", "microbatches=4"),
        ]
        names += [("parallel={dp: 2, shard: 2}",), ("parallel={pp: 2, dp: 2}", "microbatches=2")]
        names += [("parallel={pp: 2, shard: 2}", "microbatches=2", "recipe=blockwise")]
    for overrides in names:
        folder = "tp-" + overrides[0].replace("parallel", "").strip(".={}").replace(" ", "")
        expected, got = near_runs(world, folder, "tensorwise", *overrides)
        assert abs(got[0][1] - expected[0][1]) < 2 * 2 * 4 * 2.0**-8, (overrides, got, expected)
        assert all(abs(a[1] - b[1]) < 0.1 for a, b in zip(got, expected, strict=True)), (overrides, got, expected)


def sequences_stay_near_one_process(world: World) -> None:
    """Parts of sequences with gathered keys: only attention's rounding in FP32 differs, and codes that flip by it."""
    names = [(f"parallel.cp={world.size}", f"microbatches={world.size}", "recipe=delayed")]
    if world.size == 4:
        names = [(f"parallel={{cp: 2, {other}: 2}}", "microbatches=2") for other in ("dp", "shard")]
        names += [(f"parallel={{cp: 2, {other}: 2}}", "microbatches=4") for other in ("tp", "pp")]
    for overrides in names:
        folder = "cp-" + overrides[0].replace("parallel", "").strip(".={}").replace(" ", "")
        name = "delayed" if "recipe=delayed" in overrides else "tensorwise"
        expected, got = near_runs(world, folder, name, *overrides)
        first = 2 * 2 * 4 * 2.0**-8 if "tp" in overrides[0] else 2.0**-20 * expected[0][1]
        assert abs(got[0][1] - expected[0][1]) < first, (overrides, got, expected)
        assert all(abs(a[1] - b[1]) < 0.1 for a, b in zip(got, expected, strict=True)), (overrides, got, expected)


def experts_stay_near_one_process(world: World) -> None:
    """Experts divided over replicas: the bits of one process forward; gradients of experts are summed in another order.

    A checkpoint has the experts whole, and a run of other processes goes on from it.
    """
    names = [(f"parallel={{dp: {world.size}, ep: {world.size}}}",)]
    if world.size == 4:
        names += [("parallel={dp: 4, ep: 2}",), ("parallel={dp: 2, pp: 2, ep: 2}", "microbatches=2")]
        names += [("parallel={dp: 2, cp: 2, ep: 4}", "microbatches=2")]
    expected = curve(witness(world, "experts"))
    for overrides in names:
        folder = "ep-" + overrides[0].replace("parallel", "").strip(".={}").replace(" ", "")
        trainer = run_of(world, folder, *EXPERTS, *overrides)
        weights = [p for name, p in trainer.model.named_parameters() if "moe.up" in name]
        assert all(local(p).shape[0] == 4 // trainer.config.parallel.ep for p in weights)
        got = curve(Path(world.folder, folder))
        first = 2.0**-20 * expected[0][1]
        assert abs(got[0][1] - expected[0][1]) < first, (overrides, got, expected)
        assert all(abs(a[1] - b[1]) < 0.1 for a, b in zip(got, expected, strict=True)), (overrides, got, expected)
    folder = "ep-parts"
    run_of(world, folder, *EXPERTS, *names[0], "checkpoint.every=2", steps=2)
    one = newest_checkpoint(witness(world, "experts") / "checkpoints")[0]
    assert one is not None
    run_of(world, folder, *EXPERTS, f"parallel.dp={world.size}", "checkpoint.every=2", resume=True)
    got = read_any(Path(world.folder, folder, "checkpoints", "step-000004"))
    assert all(got.tensors[name].shape == t.shape for name, t in one.tensors.items() if name.startswith("model."))
    assert abs(curve(Path(world.folder, folder))[-1][1] - expected[-1][1]) < 0.1


LAYOUTS = ("dp", "shard", "tp", "pp", "cp")


def checkpoints_of_any_shape(world: World) -> None:
    """Every storage of weights, masters and moments, from one process and from each layout, is read by each layout."""
    folder = Path(world.folder)
    runs = [*folder.glob("whole-*"), *folder.parent.glob("one-*"), folder.parent / "deep"]
    runs += [folder / name for name in ("shard", f"tp-tp:{world.size}", "1f1b")]
    sources = [source for run in sorted(runs) for source in (run / "checkpoints").glob("step-000004*")]
    assert len(sources) > len(STORAGES) + 2
    for source, layout in itertools.product(sources, LAYOUTS):
        if layout != "tp" or "-fp8-" not in source.parents[1].name:  # refused
            read_by(world, source, layout)


def read_by(world: World, source: Path, layout: str) -> None:
    """Processes of a layout read a checkpoint of another and save it: every tensor stays. Moments in FP8 and int8 are
    cast anew to groups of other shards, and move by a code."""
    run = source.parents[1]
    config = load_config(run / "config.yaml")
    if layout == "pp" and (config.model.layers % world.size or config.batch_size % world.size):
        return
    folder = Path(world.folder, f"read-{run.name}-{layout}")
    if world.rank == 0:
        (folder / "checkpoints").mkdir(parents=True)
        for file in ("config.yaml", "metrics.jsonl", "manifest.json"):
            shutil.copy(run / file, folder)
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / "checkpoints" / source.name)  # type: ignore[operator]
    world.meet()
    parallel = {"dp": 1, layout: world.size, "timeout": 300.0}
    changed = {"parallel": config.parallel.model_validate(parallel)}
    changed |= {"microbatches": world.size} if layout == "pp" else {"microbatches": 1}
    trainer = Trainer(config.model_copy(update=changed), folder, resume=True)
    assert trainer.step == 4
    saved = trainer.save()
    trainer.close()
    if world.rank == 0:
        found, again = newest_checkpoint(source.parent)[0], read_any(saved).tensors
        assert found is not None
        whole = dict(found.tensors)
        for parameter, state in _optimizer_entries(whole).items() if source.is_file() else ():  # codes
            whole |= {f"optimizer.{parameter}.{entry}": value for entry, value in widened(state).items()}
        for name, tensor in whole.items():
            if name.startswith(("random.", "shard.")) or name.endswith((BOUND, "saved_at", *group_scales())):
                continue  # of a process, or of its division
            got = again[name]
            if ".exp_avg" in name and run.name.endswith("8"):
                assert torch.allclose(got, tensor, rtol=0.25, atol=float(tensor.max()) / 64), (run.name, layout, name)
            else:
                assert torch.equal(as_bytes(got), as_bytes(tensor)), (run.name, layout, name)
    dist.barrier()


def a_run_in_parts(world: World) -> None:
    """Resumed with the same processes, and with others, a run has the curve of an uninterrupted one."""
    own = (f"parallel.dp={world.size}", "recipe=delayed", "checkpoint.every=2")
    run_of(world, "parts", *own, "checkpoint.asynchronous=true", steps=3)  # the third step is done again
    trainer = run_of(world, "parts", *own, resume=True)
    assert trainer.done
    assert curve(Path(world.folder, "parts")) == curve(Path(world.folder, "dp"))
    run_of(world, "others", f"parallel.dp={world.size}", "checkpoint.every=2", steps=2)
    run_of(world, "others", f"parallel.shard={world.size}", "checkpoint.every=2", resume=True)
    if world.size == 2:
        assert curve(Path(world.folder, "others")) == curve(witness(world, "tensorwise"))


def every_storage_is_resumed_to_the_bit(world: World) -> None:
    """Every storage in every division that takes it: half a run and the rest are the whole run, tensor for tensor. A
    flipped bit in a shard is noticed, and the older one taken. Four processes take the first storage."""
    storages = STORAGES if world.size == 2 else STORAGES[:1]
    for layout, (weights, master, moments) in itertools.product(("tp", "pp", "dp", "shard"), storages):
        if layout == "tp" and weights == "fp8":  # refused
            continue
        own = (f"parallel.{layout}={world.size}", "recipe=tensorwise", "checkpoint.every=2")
        own += (stored(weights, master, moments),)
        own += (f"microbatches={world.size}", "model.layers=4") if layout == "pp" else ()
        name = f"{layout}-{weights}-{master}-{moments}"
        run_of(world, f"whole-{name}", *own)
        run_of(world, f"half-{name}", *own, "checkpoint.asynchronous=true", steps=2)
        run_of(world, f"half-{name}", *own, resume=True)
        last = Path("checkpoints", "step-000004")
        whole, resumed = (read_any(Path(world.folder, f"{part}-{name}") / last).tensors for part in ("whole", "half"))
        assert whole.keys() == resumed.keys()
        for key, tensor in whole.items():
            assert torch.equal(as_bytes(tensor), as_bytes(resumed[key])), (name, key)
    dist.barrier()  # the others may still read
    if world.rank == 0:
        file = sorted((Path(world.folder, f"half-{name}") / last).glob("shard-*"))[-1]
        data = bytearray(file.read_bytes())
        data[-9] ^= 4
        file.write_bytes(data)
    dist.barrier()
    trainer = Trainer(tiny(*own), Path(world.folder, f"half-{name}"), resume=True)
    assert trainer.step == 2
    trainer.close()
    dist.barrier()


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def all_ranks_are_on_record(world: World) -> None:
    run_of(
        world,
        "watched",
        f"parallel.pp={world.size}",
        f"microbatches={world.size}",
        *DEEP,
        "watch={every: 2}",
    )
    folder = Path(world.folder, "watched")
    run = Run.open(folder)
    assert sorted(run.ranks) == list(range(world.size))
    layers = set(run.table(merge_ranks=False)["layer"])
    assert len(layers) == 17, layers  # each of 4 blocks has 4, whatever stage holds them; and the head
    receipt = json.loads((folder / "receipt.json").read_text())
    assert len(receipt["ranks"]) == world.size
    assert len((folder / "amax.jsonl").read_text().splitlines()) == 1 + 4
    header = json.loads((folder / "amax.jsonl").read_text().splitlines()[0])
    assert len(header["tensors"]) == 3 * 16


def one_file_of_a_folder(world: World) -> None:
    if world.rank == 0:
        source = Path(world.folder, "low", "checkpoints", "step-000004")
        target = Path(world.folder, "whole")
        consolidate(source, target, keep=False)
        from safetensors.torch import load_file

        whole = {name.removeprefix("model."): t for name, t in read_any(source).tensors.items() if "model." in name}
        found = load_file(target / "model.safetensors")
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        text = read_text(source / "ottava.json")
        assert "step" in text
    dist.barrier()


def refusals(world: World) -> None:
    """Each is a sentence, in every process, and nothing is written."""
    told = said(
        lambda: Trainer(tiny(f"parallel.dp={2 * world.size}", "batch_size=16"), Path(world.folder, "no")), ConfigError
    )
    assert f"needs {2 * world.size} processes" in told
    assert f"there are {world.size}" in told
    told = said(lambda: Trainer(tiny(f"parallel.dp={world.size}", f"steps={5 + world.rank}"), Path(world.folder, "no")))
    assert "steps differs: rank 0 has 5, rank 1 has 6" in told
    kind = ConfigError if world.rank == 0 else RankError
    told = said(lambda: Trainer(tiny(f"parallel.dp={world.size}"), Path(world.folder, "dp")), kind)
    assert "is not empty" in told
    assert not Path(world.folder, "no").exists()


def a_rank_that_drifted_is_named(world: World) -> None:
    trainer = Trainer(tiny(f"parallel={{dp: {world.size}, verify_every: 2}}"), Path(world.folder, "drift"))
    trainer.advance(1)
    if world.rank == 1:
        with torch.no_grad():
            trainer.model.norm.weight[0] += 1.0
    told = str(said(trainer.advance, RuntimeError))
    assert "parameter norm.weight differs: rank 0 has" in told
    assert "rank 1 has" in told
    trainer.close()


def the_plan_counts_what_is_sent_and_held(world: World) -> None:
    """Bytes of a step and of a rank, against `ottava.plan.fleet`, to 2 %. Collectives of a few bytes are not in the
    plan."""
    own = ("batch_size=8", "sequence_length=64", "evaluation={every: 0, batches: 1}", "checkpoint.every=0")
    meshes = [{name: world.size} for name in ("dp", "shard", "tp", "pp")]
    meshes += [{"shard": 2, "tp": 2}, {"dp": 2, "shard": 2}] if world.size == 4 else []
    for mesh in meshes:
        parts = world.size if "pp" in mesh else 1
        layers = 4 if "pp" in mesh else 2
        sizes = f"model={{d_model: 128, layers: {layers}, heads: 4, kv_heads: 4, ffn: 384}}"
        config = tiny(sizes, *own, f"parallel={json.dumps({**mesh, 'verify_every': 0})}", f"microbatches={parts}")
        folder = Path(world.folder, "planned-" + "-".join(mesh))
        world.meet()
        trainer = Trainer(config, folder)
        trainer.advance(1)
        with Counted() as sent:
            trainer.advance(1)
        held = sum(local(p).nbytes + local(p).numel() * 4 for p in trainer.model.parameters())
        states = [t for state in trainer._optimizer.state.values() for t in state.values() if t.dim()]
        held += sum(local(t).nbytes for t in states)
        trainer.close()
        tokens = 8 * 64 // trainer.ranks.readers
        found = world.once(partial(prediction, config, Mesh(**mesh, microbatches=parts), tokens))
        kinds = {
            name: sum(getattr(wire, name) for wire in found.wires.values()) for name in ("gathered", "summed", "sent")
        }
        for kind, planned in kinds.items():
            # a stage in the middle of a pipeline sends both ways
            most = max(trainer.ranks.tell(sent.bytes[kind]))
            assert abs(most - planned) <= 0.02 * planned + 4096, (mesh, kind, sent.bytes, found.wires)
        most = max(trainer.ranks.tell(held))
        assert abs(found.state - most) <= 0.02 * most, (mesh, found.state, most)


def prediction(config: TrainConfig, mesh: Mesh, tokens: int) -> Any:
    """What `ottava.plan.fleet` says of that run."""
    with torch.device("meta"):
        whole = ByteTransformer(config.model, config.sequence_length)
        ottava.convert(whole, "tensorwise")
    memory = ottava.memory(whole, torch.optim.AdamW(whole.parameters()), tokens=tokens)
    return predict(whole, memory, mesh, tokens=tokens, stream=4, logits=2 * 256)


class Counted(TorchDispatchMode):
    """Bytes that this process puts into collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"gathered": 0, "summed": 0, "sent": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")):
            functional = not name.startswith("c10d.")
            kinds = {"gather": "gathered", "reduce": "summed", "send": "sent"}
            kind = next((kind for word, kind in kinds.items() if word in name), None)
            given = args[1] if not functional and ("gather" in name or "scatter" in name) else args[0]
            given = given if isinstance(given, list | tuple) else [given]
            if kind is not None:
                self.bytes[kind] += sum(t.nbytes for one in given for t in (one if isinstance(one, list) else [one]))
        return func(*args, **(kwargs or {}))


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def not_a_number_on_one_rank(world: World) -> None:
    trainer = Trainer(tiny(f"parallel.dp={world.size}"), Path(world.folder, "nan"))
    trainer.advance(1)
    if world.rank == 1:
        trainer.model.layers[1].mlp.register_forward_hook(lambda module, given, made: made * float("nan"))
    kept = _Kept()
    logging.getLogger("ottava.train.loop").addHandler(kept)
    trainer.advance()
    logging.getLogger("ottava.train.loop").removeHandler(kept)
    assert trainer.diverged
    assert any(
        "step 2: rank 1: the output of layers.1.mlp is the first that is not finite" in line for line in kept.lines
    )
    assert trainer.step == 1


def poison_on_one_rank_is_not_saved(world: World) -> None:
    """A state that is infinite on rank 1 alone; the loss of the step was finite."""
    for split in ("dp", "shard"):
        folder = Path(world.folder, f"poison-{split}")
        trainer = Trainer(tiny(f"parallel.{split}={world.size}", "checkpoint.every=2"), folder)
        trainer.advance(3)
        if world.rank == 1:
            (weight,) = (p for name, p in trainer.model.named_parameters() if name == "layers.1.mlp.down_proj.weight")
            local(trainer._optimizer.state[weight]["exp_avg_sq"]).fill_(float("inf"))
        kept = _Kept()
        logging.getLogger("ottava.train.loop").addHandler(kept)
        trainer.advance()
        logging.getLogger("ottava.train.loop").removeHandler(kept)
        assert (trainer.step, trainer.diverged, trainer.done) == (4, True, True)
        says = "step 4: optimizer.layers.1.mlp.down_proj.weight.exp_avg_sq is not finite on ranks [1]: no checkpoint"
        assert trainer.poison.startswith(says), trainer.poison
        assert any(says in line for line in kept.lines) == (world.rank == 0)
        dist.barrier()
        assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-000002"]


def wait_less() -> None:
    """From here on collectives end after 8 s; no start and no first step, which may be slow on a busy machine.

    Notes of the other processes are waited for, however slow these are.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=8), group)
    faults.PATIENCE = 200.0


def a_rank_that_skips_a_layer_is_named(world: World) -> None:
    """Its collectives meet those of other layers, until sizes differ or one waits for nothing."""
    trainer = Trainer(tiny(f"parallel.tp={world.size}"), Path(world.folder, "skipped"))
    trainer.advance(1)
    wait_less()
    if world.rank == 1:
        trainer.model.layers[1].mlp.forward = torch.zeros_like
    told = said(trainer.advance)
    assert "All processes must run the same layers in the same order" in told, told
    assert "step 2" in told, told
    assert "layers." in told or "norm" in told or "lm_head" in told, told
    trainer.folder.release()


def a_rank_that_fails_is_named(world: World) -> None:
    """It raises its own error; the others say which rank failed, where, and with what."""
    trainer = Trainer(tiny(f"parallel.tp={world.size}"), Path(world.folder, "failed"))
    trainer.advance(1)
    wait_less()
    if world.rank == 1:

        def fail(module: nn.Module, given: Any) -> None:
            raise ArithmeticError("out of order")

        trainer.model.layers[1].mlp.gate_up_proj.register_forward_pre_hook(fail)
        assert "out of order" in said(trainer.advance, ArithmeticError)
    else:
        told = said(trainer.advance)
        assert "rank 1 failed (step 2, forward of layers.1.mlp.gate_up_proj): ArithmeticError: out of order" in told, (
            told
        )
        assert f"rank {world.rank} waited for it (step 2, forward of layers.1.mlp.gate_up_proj" in told, told


QUICK: tuple[Callable[[World], None], ...] = (
    replicas_and_shards,
    a_run_in_parts,
    refusals,
    a_rank_that_drifted_is_named,
    not_a_number_on_one_rank,
    poison_on_one_rank_is_not_saved,
)
MOST: tuple[Callable[[World], None], ...] = (
    replicas_and_shards,
    same_bits_as_one_process,
    tensor_parallelism_stays_near_one_process,
    sequences_stay_near_one_process,
    experts_stay_near_one_process,
    every_storage_is_resumed_to_the_bit,
    checkpoints_of_any_shape,
    all_ranks_are_on_record,
    one_file_of_a_folder,
    the_plan_counts_what_is_sent_and_held,
)
TWO = (*MOST, a_rank_that_skips_a_layer_is_named)
"""What two processes do beside QUICK. Each of the last scenarios waits for 8 s, so two and four share them."""
FOUR = (*MOST, *QUICK[1:], a_rank_that_fails_is_named)
