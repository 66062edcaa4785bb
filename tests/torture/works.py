"""What the campaign attacks: commands that write, and what must be equal when they have ended.

A work is repeatable: `words` gives the command that begins it or continues it in a folder, and `result` what it has
made, without clocks. The witness is one run that nobody disturbs.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from processes import Process

from ottava.cli import app as commands
from ottava.interop.event_file import EventWriter
from ottava.recipe import RECIPES
from ottava.record.reader import Run
from ottava.train.checkpoint import newest_checkpoint
from ottava.train.config import load_config

TINY = (
    "model={d_model: 32, layers: 1, heads: 2, kv_heads: 1, ffn: 48}",
    "data.max_bytes=100000",
    "batch_size=2",
    "sequence_length=32",
    "steps=6",
    "checkpoint.every=2",
    "evaluation={every: 3, batches: 1}",
)
FP8 = ("optimizer.weights=fp8", "optimizer.master=remainder", "optimizer.moments=fp8")
INT8 = ("optimizer.weights=fp8", "optimizer.master=fp32", "optimizer.moments=int8")
TRAINED: Mapping[str, tuple[str, ...]] = {
    **{name: (f"recipe={name}",) for name in RECIPES},
    **{f"{name}, weights in FP8, remainder": (f"recipe={name}", *FP8) for name in ("tensorwise", "mxfp8", "delayed")},
    **{f"{name}, weights in FP8, int8": (f"recipe={name}", *INT8) for name in ("blockwise", "rowwise")},
    "bf16, remainder": ("recipe=bf16", "optimizer={weights: bf16, master: remainder, moments: bf16}"),
    "bf16, stochastic": ("recipe=bf16", "optimizer={weights: bf16, stochastic_rounding: true}"),
    "int8 moments": ("optimizer.moments=int8",),
    "lion, fp8 moments": ("optimizer={name: lion, moments: fp8}",),
    "muon, bf16": ("optimizer={name: muon, weights: bf16, master: remainder}",),
    "sgd": ("optimizer={name: sgd, learning_rate: 0.05}",),
    "amax every 4": ("recipe=tensorwise", "optimizer={weights: fp8, master: remainder, amax_every: 4}"),
    "experts": ("model.experts=2", "recipe=blockwise"),
    "microbatches": ("microbatches=2", "recipe=delayed"),
    "watched": ("recipe=delayed", "watch={every: 1}"),
    "guarded by a SpikeGuard": ("recipe=delayed", "guard={every: 2}"),
}
"""Settings of each training: every recipe, and every storage."""
STORED: Mapping[str, tuple[str, ...]] = {
    "FP8, remainder": FP8,
    "FP8, int8": INT8,
    "BF16, remainder": ("optimizer={weights: bf16, master: remainder, moments: bf16}",),
    "FP32, fp8": ("optimizer.moments=fp8",),
}
"""Weights, and masters or moments, of runs that change the number of their processes."""
RANKS: Mapping[str, tuple[str, ...]] = {
    "2 replicas": ("parallel={dp: 2, timeout: 20}", "recipe=delayed"),
    "2 shards, weights in FP8": ("parallel={shard: 2, timeout: 20}", "recipe=tensorwise", *FP8),
    "2 stages": ("parallel={pp: 2, timeout: 20}", "microbatches=2", "model.layers=2", "recipe=delayed"),
    "2 tensor parallel": ("parallel={tp: 2, timeout: 20}", "model.kv_heads=2", "recipe=tensorwise"),
    "elastic replicas": ("batch_size=4", "parallel={dp: 2, timeout: 20}", "recipe=delayed"),
    "elastic shards": ("batch_size=4", "parallel={shard: 2, timeout: 20}", "recipe=tensorwise"),
    **{
        f"elastic {kind}, {name}": ("batch_size=4", f"parallel={{{key}: 2, timeout: 20}}", "recipe=tensorwise", *stored)
        for kind, key in (("replicas", "dp"), ("shards", "shard"))
        for name, stored in STORED.items()
    },
    "2 replicas, saved beside": ("parallel={dp: 2, timeout: 20}", "recipe=tensorwise", "checkpoint.asynchronous=true"),
}
STORES = ("base/files.py", "train/checkpoint.py", "train/run_folder.py", "record/writer.py", "serving/export.py")
STORES += ("record/amaxes.py", "compat/checkpoints.py")

Result = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A command that may be killed and given again."""

    name: str
    words: Callable[[Path], list[str]]
    """The command that begins or continues it in this folder."""
    result: Callable[[Path], Result]
    """What it has made there."""
    ranks: int = 1
    partial: frozenset[str] = frozenset()
    """Parts of the result of which a kill may lose entries; those that are there must be equal."""
    plant: Callable[[], None] | None = field(default=None, compare=False)
    """A fault to plant in each process but the witness."""
    source: Path | None = None
    """The checkpoint that it reads; one in the folder itself, as `source`, takes its place."""

    @property
    def makes_a_folder(self) -> bool:
        """Whether it makes a folder at once, or none."""
        return self.name.startswith(("export", "import", "join"))

    def prepare(self) -> None:
        """One thread, and the fault, in a new process."""
        torch.set_num_threads(1)
        if self.plant is not None:
            try:
                self.plant()
            except Exception as error:
                print(f"{UNPLANTED}: {error!r}")
                raise

    def run(
        self,
        folder: Path,
        log: Path,
        *,
        port: int = 0,
        rank: int = 0,
        before: Callable[[], None] | None = None,
        **options: Any,
    ) -> Process:
        """Starts it, or one rank of it."""
        words = self.words(folder)

        def work() -> None:
            if self.ranks > 1:
                os.environ |= {"WORLD_SIZE": str(self.ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self.prepare()
            if before is not None:
                before()
            commands.main(words)

        return Process(work, log, **options)

    def difference(self, folder: Path, expected: Result) -> str:
        """Where what is there differs from the witness; "" if nowhere."""
        got = self.result(folder)
        for name in expected.keys() | got.keys():
            a, b = got.get(name), expected.get(name)
            if name in self.partial and isinstance(a, dict) and isinstance(b, dict):
                b = {key: value for key, value in b.items() if key in a}
            if a != b:
                return f"{name}: {_first(a, b)}"
        return ""


def _first(a: Any, b: Any) -> str:
    """The first difference of two values, in short."""
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = sorted(a.items(), key=str), sorted(b.items(), key=str)
    if isinstance(a, list) and isinstance(b, list):
        for i, (one, other) in enumerate(zip(a, b, strict=False)):
            if one != other and isinstance(one, list | tuple | dict) and isinstance(other, list | tuple | dict):
                parts = (part if isinstance(part, dict) else list(part) for part in (one, other))
                return f"entry {i}: {_first(*parts)}"
            if one != other:
                return f"entry {i} is {str(one)[:200]}, and {str(other)[:200]} in the undisturbed run"
        return f"{len(a)} entries, and {len(b)} in the undisturbed run"
    return f"{str(a)[:200]}, and {str(b)[:200]} in the undisturbed run"


# --- trainings -------------------------------------------------------------------------------------------------------


def training(name: str, settings: Sequence[str], place: Path, ranks: int = 1) -> Work:
    """`ottava train` of these settings."""
    path = place / f"{name.replace(' ', '_').replace(',', '')}.yaml"
    text = place / "text.txt"
    if not text.exists():
        text.write_bytes(Path(heapq.__file__).read_bytes() * 3)
    config = load_config(None, [*TINY, f"data.path={text}", *settings])
    path.write_text(config.to_yaml())
    return Work(
        name=f"train {name}",
        words=lambda folder: ["train", str(path), "--resume", "--run-dir", str(folder / "run")],
        result=functools.partial(trained, steps=config.steps, watched=config.watch is not None),
        ranks=ranks,
        partial=frozenset(),
    )


def on_ranks(work: Work, count: int) -> Work:
    """The same training in 1, 2 or 4 processes; in one with the microbatches of two."""
    kind = "dp" if "replicas" in work.name else "shard"
    settings = (f"parallel={{{kind}: {count}, timeout: 20}}", f"microbatches={2 if count == 1 else 1}")
    words = [word for setting in settings for word in ("--set", setting)]
    return replace(work, ranks=count, words=lambda folder: [*work.words(folder), *words])


def trained(folder: Path, *, steps: int, watched: bool) -> Result:
    """Curve, amaxes, receipt, and every tensor of the last checkpoint; of a watched run also all statistics."""
    run = folder / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    checkpoint, _ = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    found: Result = {
        "curve": [{name: value for name, value in line.items() if name != "seconds"} for line in lines],
        "step": checkpoint.step,
        "tensors": {name: (str(t.dtype), tuple(t.shape), _bits(t)) for name, t in checkpoint.tensors.items()},
        "receipt": json.loads((run / "receipt.json").read_text()),
    }
    if (run / "amax.jsonl").exists():
        found["amaxes"] = (run / "amax.jsonl").read_text().splitlines()
    assert checkpoint.step == steps, f"the last checkpoint is of step {checkpoint.step}"
    return found | (recorded(run) if watched else {})


def _bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def recorded(run: Path) -> Result:
    """The numbers of a watch: the lines of its steps, and its rows."""
    read = Run.open(run)
    steps = read.steps
    names = sorted(set(read.steps) - {"step", "seconds"} - BETWEEN_STEPS)
    lines = {int(step): [repr(float(steps[name][i])) for name in names] for i, step in enumerate(steps["step"])}
    rows = read.table(phase=None, merge_ranks=False).dicts(*MEASURED)
    shown = {tuple(str(row[name]) for name in KEY): {name: repr(value) for name, value in row.items()} for row in rows}
    return {"steps": lines, "rows": shown}


UNPLANTED = "the fault could not be planted"
BETWEEN_STEPS = frozenset({"kept_gradient", "weights", "written"})
"""Numbers that compare a step with the one before: unknown in the first step of a process."""
MEASURED = ("amax", "mse", "underflow_pct", "cosine", "row_sqnr_p50_db")
KEY = ("step", "rank", "phase", "layer", "tensor", "direction", "recipe", "source")


# --- a watch, exports and imports ------------------------------------------------------------------------------------

SCRIPT = """
import contextlib, os, sys
from pathlib import Path
import torch
from torch import nn

folder = Path(sys.argv[1])
state = folder / "state.pt"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
done = 0
if state.exists():
    saved = torch.load(state)
    done = saved["done"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
for step in range(done, 8):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 16, generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    if step % 2:
        saved = {"done": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with contextlib.suppress(OSError, RuntimeError):  # torch's own words for a disk that refuses
            torch.save(saved, folder / "new")
            os.replace(folder / "new", state)
            (folder / "done.new").write_text(str(step + 1))
            os.replace(folder / "done.new", folder / "done")
"""
"""A user's training, which saves itself after every second step, if it can."""


def watching(place: Path) -> Work:
    """`ottava watch` of that script, which goes on from its own state."""
    script = place / "train.py"
    script.write_text(SCRIPT)

    def words(folder: Path) -> list[str]:
        done = int((folder / "done").read_text()) if (folder / "done").exists() else 0
        state = folder / "state.pt"
        if state.exists() and torch.load(state)["done"] != done:  # killed between its two files
            (folder / "done").write_text(str(done := torch.load(state)["done"]))
        options = ["--out", str(folder / "run"), "--every", "1", "--shadow", "0", "--append", "--step", str(done)]
        return ["watch", *options, "--", str(script), str(folder)]

    def result(folder: Path) -> Result:
        saved = torch.load(folder / "state.pt")["model"]
        return {"weights": {name: _bits(t) for name, t in saved.items()}, **recorded(folder / "run")}

    # a foreign script cannot tell its watch when it saves itself: a kill takes the rows that waited in memory
    return Work("watch a script", words, result, partial=frozenset({"rows"}))


def files_of(folder: Path) -> Result:
    """The hash of every file that a command wrote, by its name, but that of a report with times."""
    return {
        path.relative_to(folder / "out").as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / "out").rglob("*"))
        if path.is_file() and path.name != "export.json"
    }


def exporting(source: Path, shards: Path) -> Iterator[Work]:
    """`ottava export` of a run, and imports of a checkpoint, of a pickle and of TensorBoard's files."""

    def of(name: str, command: str, place: Path, hashed: bool = False) -> Work:
        def words(folder: Path) -> list[str]:
            own = folder / "source"
            return [command, str(own if own.exists() else place), str(folder / "out")]

        return Work(name, words, files_of, source=place if hashed else None)

    yield of("export a run", "export", source / "run", hashed=True)
    hf = source / "hf"
    hf_export = ["export", str(source / "run"), str(hf)]
    commands.app(hf_export, standalone_mode=False)
    yield of("import a folder", "import", hf)
    torch.manual_seed(0)
    torch.save({"up_proj.weight": torch.randn(64, 64), "norm.weight": torch.ones(64)}, source / "foreign.pt")
    yield of("import a pickle", "import", source / "foreign.pt")
    yield of("join shards", "consolidate", shards, hashed=True)
    writer = EventWriter(source / "events")
    for step in range(20):
        writer.scalars(step, {"loss": 1.0 / (step + 1), "layers.0.fc1_activation_cur_amax": 2.0 + step})
    writer.close()
    words = ["import", str(source / "events")]
    yield Work(
        "import TensorBoard", lambda folder: [*words, str(folder / "out")], lambda folder: recorded(folder / "out")
    )
