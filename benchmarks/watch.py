"""What watching costs: the same training step unwatched and watched, in turn, on the demo's model.

    python benchmarks/watch.py [--steps 10] [--rounds 100] [--set model.layers=1 ...]
    python benchmarks/watch.py --diagnose RUN    # writes a run of 1,000 steps x 200 tensors, and times its diagnosis
    python benchmarks/watch.py --trainer benchmarks/results/trainer.json    # transformers' Trainer and OttavaCallback

Each mode trains in a process of its own, and the processes take turns every few steps, so that what slows the machine
down slows all of them down. Quoted is the CPU time of all steps over that of the unwatched ones, first looks included,
with the interval that 95 % of draws of the rounds give.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

import ottava
import ottava.measure.walk
from ottava.diagnose.diagnose import diagnose
from ottava.kernels.memory import keep_freed_memory
from ottava.measure.tally import Tallies, Tally
from ottava.nn import convert
from ottava.recipe import CELL_OF, get_recipe
from ottava.record.reader import Run
from ottava.record.schema import SlotKey, cast_key
from ottava.record.writer import RunWriter
from ottava.train.config import load_config
from ottava.train.data import ByteCorpus
from ottava.train.model import ByteTransformer, loss
from ottava.watching.session import watch

MODES: Mapping[str, dict[str, Any] | None] = MappingProxyType(
    {
        "unwatched": None,
        "default": {},
        "default, no shadow steps": {"shadow": 0},
        "full look every 4 steps, 1 row of 16": {"every": 4},
        "full look every step, 1 row of 16": {"every": 1},
        "full look every step, all elements": {"every": 1, "sample": 1},
    }
)


_EARLY = 10
"""Turns with the first looks and experiments; the second figure of a row leaves them out."""


def main() -> None:
    """Prints a table for a BF16 model, whose casts are simulated, and for an FP8 one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=100, help="turns of each mode")
    parser.add_argument("--modes", type=int, default=len(MODES), help="as many of the modes, from the first one")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of 128 bytes in a step")
    parser.add_argument(
        "--diagnose", type=Path, metavar="RUN", help="write such a run there, if it is not, and time diagnose"
    )
    parser.add_argument("--every", type=int, default=1, help="steps between the looks of that run")
    parser.add_argument("--keep-memory", action="store_true", help="keep freed memory, so that no step has page faults")
    parser.add_argument("--set", action="append", default=[], help="of a training's configuration: model.layers=1")
    parser.add_argument("--trainer", type=Path, metavar="JSON", help="time a Trainer with and without the callback")
    arguments = parser.parse_args()
    if arguments.trainer is not None:
        time_trainer(arguments.trainer, arguments.steps, arguments.rounds)
        return
    if arguments.diagnose is not None:
        time_diagnosis(arguments.diagnose, arguments.every)
        return
    print(f"torch {torch.__version__}, 1 thread, {arguments.rounds} turns of {arguments.steps} steps")
    for recipe in ("bf16", "tensorwise"):
        seconds = measure(recipe, arguments)
        base = np.array(seconds["unwatched"])
        print(f"\n{recipe}: {1e3 * np.median(base):.1f} ms a step unwatched")
        for mode, times in seconds.items():
            said = f"  {mode:36}"
            for first in (0, _EARLY)[: 1 + (len(base) > _EARLY)]:
                told, plain = np.array(times)[first:], base[first:]
                draws = np.random.default_rng(0).integers(0, len(plain), (2000, len(plain)))
                low, high = 100 * np.quantile(told[draws].sum(1) / plain[draws].sum(1), (0.025, 0.975)) - 100
                said += f" {100 * (told.sum() / plain.sum() - 1):+7.1f} % [{low:+.1f}, {high:+.1f}]"
            print(said)


def measure(recipe: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per step of every round, by mode: a process for each mode, which train in turn."""
    context = torch.multiprocessing.get_context("spawn")
    pipes = {}
    for mode in list(MODES)[: arguments.modes]:
        pipes[mode], there = context.Pipe()
        given = (there, MODES[mode], recipe, arguments)
        context.Process(target=train, args=given, daemon=True).start()
    seconds: dict[str, list[float]] = {mode: [] for mode in pipes}
    for number in range(arguments.rounds):
        for mode in sorted(pipes, reverse=bool(number % 2)):  # a machine drifts
            pipes[mode].send(arguments.steps)
            seconds[mode].append(pipes[mode].recv())
    for pipe in pipes.values():
        pipe.send(0)
    return seconds


def train(pipe: Connection, settings: dict[str, Any] | None, recipe: str, arguments: argparse.Namespace) -> None:
    """Trains as many steps as are asked for, again and again, and answers with the CPU seconds of one."""
    torch.set_num_threads(1)
    if arguments.keep_memory:
        keep_freed_memory()
    config = load_config(None, [f"batch_size={arguments.batch_size}", *arguments.set])
    corpus = ByteCorpus.load(config.data)
    torch.manual_seed(0)
    model = ByteTransformer(config.model, config.sequence_length)
    if recipe != "bf16":
        convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sizes = {"batch_size": config.batch_size, "length": config.sequence_length}
    batches = [corpus.batch(seed=0, step=step, **sizes) for step in range(1, 17)]
    with ExitStack() as stack:
        seen, ended = None, time.perf_counter()
        if settings is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            seen = stack.enter_context(watch(model, Path(folder) / "run", settings))
        while count := pipe.recv():
            if seen is not None:  # shares are of the training's time, and the turns of the others are none of it
                waited = time.perf_counter() - ended
                seen._started, seen._mark = seen._started + waited, seen._mark + waited
                seen.laboratory._started += waited
            started = time.process_time()
            for step in range(count):
                with torch.autocast("cpu", torch.bfloat16):
                    value = loss(model, *batches[step % len(batches)])
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
            pipe.send((time.process_time() - started) / count)
            ended = time.perf_counter()


def time_trainer(target: Path, steps: int, rounds: int) -> None:
    """Whole trainings of a Llama of 2 layers, 256 wide, in turn: plain, and with the callback at its defaults."""
    import transformers as hf

    from ottava.doors.trainer import OttavaCallback
    from ottava.doors.transformers import OttavaConfig

    sizes = {"vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512}

    def train(count: int, callback: OttavaCallback | None, folder: str) -> float:
        torch.manual_seed(0)
        config = hf.LlamaConfig(num_hidden_layers=2, **sizes)
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        OttavaConfig("delayed").convert(model)
        data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 512, (64, 128))]
        settings = {"max_steps": count, "logging_steps": 10, "per_device_train_batch_size": 4, "save_strategy": "no"}
        args = hf.TrainingArguments(folder, use_cpu=True, disable_tqdm=True, report_to=[], **settings)
        run = hf.Trainer(model, args, train_dataset=data, callbacks=[callback] if callback else [])
        run.remove_callback(hf.PrinterCallback)
        started = time.process_time()
        run.train()
        return time.process_time() - started

    measured: list[dict[str, float]] = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        train(5, OttavaCallback(), f"{folder}/first")
        for number in range(rounds):
            callback, one = OttavaCallback(f"{folder}/run{number}"), {}
            for kind in ("plain", "callback") if number % 2 else ("callback", "plain"):  # a machine drifts
                one[kind] = train(steps, callback if kind == "callback" else None, f"{folder}/{kind}{number}")
            kept = Run.open(f"{folder}/run{number}")
            one |= {"looks": len(set(kept.table()["step"].tolist())), "shadows": len(kept.experiments)}
            measured.append(one | {"facts": int(np.isfinite(kept.steps["lr"]).sum())})
            print(measured[-1], flush=True)
    ratios = [one["callback"] / one["plain"] - 1 for one in measured]
    told = {"torch": torch.__version__, "transformers": hf.__version__, "threads": 1, "date": str(date.today())}
    told |= {"steps": steps, "seconds": "CPU time of the process", "rounds": measured}
    told |= {"median_overhead": statistics.median(ratios)}
    target.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    low, middle, high = (f"{100 * one:+.2f} %" for one in (min(ratios), statistics.median(ratios), max(ratios)))
    print(f"{steps} steps: {middle}, from {low} to {high}")


def write_run(folder: Path, steps: int = 1000, layers: int = 40, every: int = 1) -> None:
    """A recorded run of 5 casts a layer; the numbers of a real cast, of an amax that drifts."""
    generator = torch.Generator().manual_seed(0)
    recipe = get_recipe("tensorwise")
    kinds = ("q_proj", "o_proj", "fc1", "fc2")
    cells = (("input", "row"), ("input", "col"), ("weight", "row"), ("grad_output", "row"), ("grad_output", "col"))
    names = [f"blocks.{i // 4}.{kinds[i % 4]}" for i in range(layers)]
    with RunWriter(folder) as writer:
        shapes = [{"name": name, "source": "door", "seen": True, "shape": [512, 512]} for name in names]
        seen = {"linear": layers, "seen": layers, "skipped": []}
        writer.describe(layers=shapes, coverage=seen, recipes={recipe.name: recipe.to_dict()}, ended="closed")
        for step in range(1, steps + 1):
            writer.step(
                step, loss=4 * step**-0.2 + 0.02 * float(torch.randn((), generator=generator)), lr=1e-3, grad_norm=1.0
            )
            if (step - 1) % every:
                continue
            if step == 1 or step % 50 == 0:  # a cast is measured now and then; its numbers are written at each look
                casts: dict[SlotKey, Tally] = {}
                for name in names:
                    for tensor, direction in cells:
                        gemm, side = CELL_OF[tensor, direction]
                        spec = getattr(getattr(recipe, gemm), side)
                        x = torch.randn(64, 128, generator=generator) * (1 + step / steps)
                        key = cast_key(name, tensor, direction, recipe.name, spec, "door")
                        casts[key] = ottava.measure.walk.measure(x, ottava.quantize(x, spec))
                tallies = Tallies.of(casts)
            writer.tallies(step, tallies)
        writer.flush()


def time_diagnosis(folder: Path, every: int) -> None:
    """Writes the run, if the folder is not there, and prints the time of three diagnoses of it."""
    if not folder.exists():
        write_run(folder, every=every)
    for _ in range(3):
        started, processor = time.perf_counter(), time.process_time()
        found = diagnose(Run.open(folder))
        print(
            f"{time.perf_counter() - started:.2f} s ({time.process_time() - processor:.2f} s of CPU): {found.sentence}"
        )


if __name__ == "__main__":
    main()
