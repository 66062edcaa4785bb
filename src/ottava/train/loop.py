"""One training run: `Trainer` builds it, trains step by step, evaluates, writes checkpoints and resumes.

Every step has the same order: batch, forward and backward, clip, AdamW, scaling state; then, if due, evaluation, the
line in metrics.jsonl, and the checkpoint. Wherever a process is killed, metrics.jsonl holds at least the steps of the
newest checkpoint. The resumed run cuts metrics.jsonl back to that checkpoint.

Precision: parameters (the master weights), gradients and moments are FP32, unless `config.optimizer` sets another
storage. Operators compute in BF16 under torch.autocast, and the GEMMs of converted layers under the recipe.
"""

from __future__ import annotations

import contextlib
import logging
import math
import platform
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ottava.base import __version__
from ottava.base.errors import PoisonError
from ottava.base.settings import ConfigError, flatten
from ottava.base.text import listed
from ottava.base.untrusted import read_text
from ottava.engine.autocast import autocast
from ottava.engine.state import ScalingState
from ottava.nn.calibrate import calibrate
from ottava.nn.convert import ConversionReport
from ottava.nn.receipt import receipt
from ottava.optim.engine import rewarm_factor
from ottava.record.amaxes import AmaxLog
from ottava.remedy.fallback import Fallback, Proposal, Verdict, by_gradient
from ottava.remedy.guard import SpikeGuard
from ottava.train.checkpoint import (
    Checkpoint,
    ShardWriter,
    as_checkpoint_error,
    collect_shards,
    collect_state,
    find_checkpoint,
    newest_of_run,
    read_any,
    remove_temporary_files,
    restore_optimizer,
    restore_shards,
    restore_state,
    restore_weights,
    save_checkpoint,
)
from ottava.train.config import TrainConfig
from ottava.train.data import find_device, gather
from ottava.train.llama import is_weights, read_weights
from ottava.train.model import ByteTransformer, loss, make_optimizer, store
from ottava.train.parallel import Microbatches, Pipeline, split
from ottava.train.ranks import SPLITS, Ranks, explain_divergence, explained
from ottava.train.run_folder import RunFolder, StepRecord
from ottava.watching.session import Watch, watch
from ottava.weights.checkpoint import poisoned

_CALIBRATION_BATCHES = 16  # a whole window of the registered recipes
_log = logging.getLogger(__name__)


class Trainer:
    """A training run in a folder.

    Several trainers can take turns in one process. Each keeps its own state of torch's random generators, so each
    trains as if it were alone.

    Args:
        config: all settings.
        run_dir: the folder of the run; see run_folder.py.
        resume: continue from the newest readable checkpoint. Without a checkpoint the run starts from its first step,
            and the log says so.

    Raises:
        ConfigError: the folder is in use, its run had other settings, or the run cannot fit into memory.
        DataError: there is no text, or too little.
        CheckpointError: no checkpoint is readable, the checkpoint belongs to another run or text, or `config.init`
            does not fit the model.
        DeviceError: the machine has no such device.
        None of these errors writes anything.

    Example:
        >>> import tempfile
        >>> from ottava.train.config import load_config
        >>> config = load_config(None, ["steps=2", "model.layers=1", "batch_size=2", "evaluation.batches=1"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = Trainer(config, Path(folder))
        ...     [record.step for record in trainer.advance()], trainer.done
        ([1, 2], True)
    """

    step: int
    """Optimizer steps done."""
    history: list[StepRecord]
    """All steps so far, also from before a resumption."""
    diverged: bool
    """Whether a loss or gradient was not finite. The record of that step is the last of the history. Its update was not
    applied: `step` does not count it, and the model is unchanged. Also whether `poison` ended the run."""
    poison: str
    """The weights or states that were not finite when a checkpoint of them was due, in words; "" otherwise. The update
    of the last step was applied, and no checkpoint of it was written."""
    model: ByteTransformer
    conversion: ConversionReport
    """The report of `convert`."""

    def __init__(self, config: TrainConfig, run_dir: Path, *, resume: bool = False) -> None:
        self.config = config
        self.device = find_device(config.device)
        self.ranks = Ranks(config.parallel, self.device)
        self._compute = partial(torch.autocast, self.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")
        _, self.corpus = self.ranks.together(lambda: gather(config))
        self._text = self.corpus.digest()
        self.ranks.agree(
            {**flatten(config.model_dump(mode="json")), "resume": resume, "text": self._text, **_versions()}
        )
        self.folder = self.ranks.together(lambda: RunFolder(run_dir, config, resume=resume, writes=self.ranks.first))
        with self.folder.released_on_error():
            self._begin(resume=resume)

    def _begin(self, *, resume: bool) -> None:
        config = self.config
        with self._random_generators():
            torch.manual_seed(config.seed)
            self.model = ByteTransformer(config.model, config.sequence_length).to(self.device)
            if self.ranks.rank:  # for casts that round stochastically
                torch.manual_seed(config.seed + self.ranks.rank)
            self._random = _random_states(self.device)
        self.conversion = self.ranks.together(lambda: store(self.model, config.build_recipe(), config.optimizer))
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._make_optimizer()
        self._first_step = 0
        self._amaxes: AmaxLog | None = None
        checkpoint = self._newest() if resume else None
        first, records, started = 0, list[StepRecord](), dict[str, Any]()
        if config.init and not checkpoint:
            first, records, started = self.ranks.together(self._start)
        self._share(checkpoint)
        self.step = checkpoint.step if checkpoint else first
        self._first_step = int(checkpoint.metadata.get("start", "0")) if checkpoint else first
        facts = {
            "parameters": parameters,
            "text": {"source": self.corpus.source, "sha256": self._text},
            "device": _device_name(self.device),
            "conversion": self.conversion.to_dict(),
            "init": started,
            "optimizer": f"{type(self._optimizer).__module__}.{type(self._optimizer).__name__}",
        }
        done = self.step if checkpoint else 0
        kept = checkpoint.metadata if checkpoint else {}
        self.history = self.ranks.together(lambda: self.folder.cut_history(done, kept.get("curve")))
        self._amaxes = self.ranks.together(
            lambda: AmaxLog(self.folder.path, step=self.step, digest=kept.get("amaxes")) if self.ranks.first else None
        )
        self.diverged, self.poison = False, ""
        self._watch: Watch | None = None
        self.folder.begin(self.step, facts)
        if started:
            for record in records:
                self._keep_record(record)
            self._fill_records(self.step)
            self.save()  # a resumption must not need the other run again
        self._watch = self._make_watch()
        self._fallback = self._make_fallback()
        self._guard = self._make_guard()

    def _make_optimizer(self) -> None:
        self._scaling = ScalingState(self.model, None if self.ranks.mesh is None else self.ranks.of_stage)
        self._scaling.listen()
        self._optimizer = make_optimizer(self.model, self.config.optimizer)

    def _start(self) -> tuple[int, list[StepRecord], dict[str, Any]]:
        """Loads the parts of `config.init` that `config.carry` names, calibrates predicted scales, and logs both.

        Returns:
            Optimizer steps that count as done, their records if the other run has all, and facts for the manifest.
        """
        config = self.config
        assert config.init is not None
        continues = config.carry == "optimizer"
        if alone := is_weights(config.init):
            if continues:
                raise ConfigError(
                    f"{config.init}: holds weights alone, without states of an optimizer; take carry=weights"
                )
            checkpoint, problems = read_weights(config.init, config.model), list[str]()
        else:
            checkpoint, problems = find_checkpoint(config.init)
        for problem in problems:
            _log.warning("skipped a checkpoint: %s", problem)
        weights = restore_weights(checkpoint, self.model)
        if continues:
            if checkpoint.step >= config.steps:
                raise ConfigError(
                    f"{checkpoint.path}: is of step {checkpoint.step}, but this run ends at steps={config.steps}; set "
                    "more"
                )
            restore_optimizer(checkpoint, self.model, self._optimizer, weights)
            said = (
                "continues from step %(step)d of %(path)s with its weights, optimizer states and step count, but "
                "without its scaling histories; masters start from its weights in the highest precision that it holds"
            )
        elif alone:
            said = "starts from the weights of %(path)s; FP8 codes among them are decoded to FP32"
        else:
            said = (
                "starts from the weights of %(path)s (step %(step)d), without its optimizer states, scaling histories "
                "and step count"
            )
        _log.info(said, {"path": checkpoint.path, "step": checkpoint.step})
        step = checkpoint.step if continues else 0
        batches = _CALIBRATION_BATCHES if self._scaling.predicts else 0
        if batches:
            calibrate(self.model, map(self.batch, range(step + 1, step + batches + 1)), loss=self.loss_of)
            self._scaling.take_amax()  # drop the amaxes of calibration
            _log.info("calibrated the predicted scales on the first %d batches, in high precision", batches)
        if config.rewarm:
            _log.info("the learning rate rises to its schedule in %d steps", config.rewarm)
        facts = {"from": str(checkpoint.path), "step": checkpoint.step, "calibration_batches": batches}
        facts |= {"carried": ["weights", "optimizer", "step"] if continues else ["weights"]}
        return step, _records_of(checkpoint) if continues else [], facts

    def _share(self, checkpoint: Checkpoint | None) -> None:
        """Splits the model over the processes, and fills this process's part from the checkpoint."""
        config, ranks = self.config, self.ranks
        running, self._orders = ranks.together(lambda: split(self.model, config.model, ranks))
        self._writer: ShardWriter | None = None
        if ranks.size > 1:
            self._make_optimizer()  # for the shards
            settings, folder = config.checkpoint, self.folder.checkpoints
            self._writer = ShardWriter(folder, ranks, keep=settings.keep, asynchronous=settings.asynchronous)
        self._passes: Microbatches | Pipeline
        if config.parallel.pp > 1:
            tokens = config.sequence_length // config.parallel.cp
            shape = config.batch_size // ranks.readers // config.microbatches, tokens
            self._passes = Pipeline(self.model, self._compute, config.microbatches, ranks, shape)
        else:
            self._passes = Microbatches(running, self._compute, config.microbatches, ranks)
        if checkpoint:
            ranks.together(lambda: self._restore(checkpoint))
        self.ranks.compare(self.model)

    @property
    def done(self) -> bool:
        """Whether training is over: all steps are done, or the run diverged."""
        return self.diverged or self.step >= self.config.steps

    def advance(self, steps: int | None = None) -> list[StepRecord]:
        """Trains at most that many more steps; None trains to the end.

        Writes metrics.jsonl, evaluates and writes checkpoints as the config says, and always at the last step. The last
        step also writes receipt.json. Stops at a loss or gradient that is not finite, before the update of the weights.

        Edge cases: after an exception (KeyboardInterrupt too) this trainer cannot continue. Make a new one with
            `resume` on the same folder.
        """
        last = self.config.steps if steps is None else min(self.step + steps, self.config.steps)
        records: list[StepRecord] = []
        with self._random_generators():
            _set_random_states(self._random, self.device)
            while self.step < last and not self.diverged:
                start = self.step
                with explained(self.ranks, self.model, lambda: f"step {self.step + 1}"):
                    self._train_step(start + 1)
                    if _due(self.config.parallel.verify_every, self.step, 0):
                        self.ranks.compare(self.model)
                since = self.history[-(self.step - start + 1) :]
                records = [*(r for r in records if r.step <= start), *(r for r in since if r.step > start)]
                if not self.diverged and _due(self.config.checkpoint.every, self.step, self.config.steps):
                    self._random = _random_states(self.device)
                    try:
                        self.save()
                    except PoisonError as error:
                        if self.ranks.first:
                            _log.error("%s", error)
                        if self._guard is None:  # else it rewinds the run
                            self.diverged, self.poison = True, str(error)
                            self.folder.write_json("receipt.json", self._receipt())
                            self._end_watch()
            self._random = _random_states(self.device)
        if self.done:
            if self._writer is not None:
                self._writer.wait()
            self.folder.release()
        return records

    def evaluate(self, *, high_precision: bool = False) -> float:
        """Mean loss in nats per byte on the fixed validation batches, under the recipe of training.

        It changes nothing in the run: random generators, gradients and scaling histories stay as they are.

        Args:
            high_precision: evaluate without FP8: this tests the weights alone.
        """
        settings = self.config
        total = 0.0
        with self._random_generators(), torch.no_grad(), contextlib.ExitStack() as stack:
            if high_precision:
                stack.enter_context(autocast("bf16"))
            torch.manual_seed(settings.seed)
            for inputs, targets in self.corpus.validation_batches(
                batches=settings.evaluation.batches, batch_size=settings.batch_size, length=settings.sequence_length
            ):
                total += self.ranks.mean(self._passes.loss(*self._mine(inputs, targets)))
        return total / settings.evaluation.batches

    def save(self) -> Path:
        """Writes a checkpoint of this step and returns its path. Every process of the run must call it.

        Raises:
            PoisonError: in all processes, if a weight or a state of the optimizer is not finite in one of them. The
                message names the tensors and ranks. Nothing was written.
        """
        self.folder.sync()
        if self._watch is not None:
            self._watch.flush()
        if self._writer is not None:
            values = collect_shards(self.model, self._optimizer, self._orders, self._random, self.ranks.rank)
            self._refuse_poison(values)
            return self._writer.save(self.step, values, self._identity())
        tensors = collect_state(self.model, self._optimizer)
        self._refuse_poison(tensors)
        tensors |= {f"random.{name}": state for name, state in self._random.items()}
        path = save_checkpoint(
            self.folder.checkpoints, self.step, tensors, self._identity(), keep=self.config.checkpoint.keep
        )
        _log.debug("saved %s", path)
        return path

    def _refuse_poison(self, values: Mapping[str, Any]) -> None:
        state = {name.removeprefix("model."): value for name, value in values.items()}
        found = self.ranks.tell(poisoned(self.model, state, "optimizer."))
        if names := {name: [rank for rank, own in enumerate(found) if name in own] for own in found for name in own}:
            where = f" on ranks {sorted(set().union(*names.values()))}" if self.ranks.size > 1 else ""
            raise PoisonError(
                f"step {self.step}: {listed(names, 3)} {'is' if len(names) == 1 else 'are'} not finite{where}: no "
                "checkpoint is written. The one before it stays: lower optimizer.learning_rate, then start from it "
                "with --init"
            )

    def close(self) -> None:
        """Ends the watch and releases the folder. The last step does both; call `close` if you end a run earlier."""
        self._end_watch()
        if self._writer is not None:
            self._writer.wait()
        self.folder.release()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _make_guard(self) -> SpikeGuard | None:
        settings = self.config.guard
        if settings is None:
            return None
        guard = SpikeGuard(
            self.model,
            self._optimizer,
            self._update,
            **settings.model_dump(),
            fallback=None if self._fallback is None else self._fallback.on_spike,
            log=None if self._watch is None else self._watch.writer,
            on_rewind=self._cut_back,
        )
        guard.step = self.step
        return guard

    def _make_fallback(self) -> Fallback | None:
        if self.config.auto_fallback == "off" or self._watch is None:
            return None

        def verify(model: nn.Module, proposal: Proposal) -> Verdict:
            return by_gradient(self.batch(proposal.step), self.loss_of)(model, proposal)

        fallback = Fallback(self.model, mode=self.config.auto_fallback, verify=verify, log=self._watch.writer)
        self._watch.on_look(fallback.on_look)
        return fallback

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The training batch of a step, on the CPU."""
        settings = self.config
        return self.corpus.batch(
            seed=settings.seed, step=step, batch_size=settings.batch_size, length=settings.sequence_length
        )

    def _mine(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """This process's part of a batch, on its device."""
        return self.ranks.rows(inputs).to(self.device), self.ranks.rows(targets).to(self.device)

    def loss_of(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a batch, computed as in training. The model must be on the trainer's device."""
        with self._compute():
            return loss(model, batch[0].to(self.device), batch[1].to(self.device))

    def _make_watch(self) -> Watch | None:
        if self.config.watch is None:
            return None
        session = watch(self.model, self.folder.path, self.config.watch, step=self.step, append=True)
        session.describe(config=flatten(self.config.model_dump(mode="json", exclude={"watch"})))
        return session

    def _train_step(self, step: int) -> None:
        """One step; a guard may rewind or skip it."""
        if self._guard is None:
            self._update(step)
            return
        self._guard(step)
        self._fill_records(step)
        self.diverged, self.step = False, step

    def _update(self, step: int) -> tuple[float, float]:
        """Forward, backward, optimizer and the record. A function of the step and the trainer's state.

        Returns:
            The loss and the norm of the gradient. If one is not finite, nothing was updated.
        """
        settings = self.config
        started = time.perf_counter()
        inputs, targets = self.batch(step)
        tokens = targets.numel()
        learning_rate = settings.optimizer.learning_rate * settings.schedule.factor(step, settings.steps)
        learning_rate *= rewarm_factor(step - 1 - self._first_step, settings.rewarm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        value = self.ranks.mean(self._passes.train(*self._mine(inputs, targets)))
        norm = self.ranks.clip(self.model.parameters(), settings.optimizer.grad_clip).item()
        loss_value, grad_norm = _finite(value), _finite(norm)
        if self._watch is not None:
            self._watch.log(loss=value, grad_norm=norm, lr=learning_rate, tokens=tokens)
        self.diverged = math.isnan(loss_value) or math.isnan(grad_norm)
        if not self.diverged:
            self._optimizer.step()  # predicted scales move at this boundary, too
            self.step = step
            amaxes = self.ranks.everything(self._scaling.take_amax())
            if self._amaxes is not None:
                with as_checkpoint_error(self._amaxes.path):
                    self._amaxes.append(step, amaxes)
        else:
            if self.ranks.size > 1:
                again = partial(self._passes.loss, *self._mine(inputs, targets))
                _log.error("step %d: %s", step, explain_divergence(self.ranks, self.model, again))
            if self._watch is not None:
                self._watch.step()
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - started
        if self.done:  # before the evaluation: a later receipt would show its forwards
            self.folder.write_json("receipt.json", self._receipt())
            self._end_watch()
        evaluates = not self.diverged and _due(settings.evaluation.every, step, settings.steps)
        self._fill_records(step - 1)
        record = StepRecord(
            step=step,
            loss=loss_value,
            grad_norm=grad_norm,
            lr=learning_rate,
            tokens=tokens,
            seconds=seconds,
            val_loss=self.evaluate() if evaluates else None,
        )
        self._keep_record(record)
        return loss_value, grad_norm

    def _receipt(self) -> dict[str, Any]:
        """The receipt of this process; with several processes also those of all of them, whose layers may differ."""
        values = receipt(self.model).to_dict()
        ranks = {} if self.ranks.size == 1 else {"ranks": self.ranks.tell(values)}
        return {"schema_version": 1, **values, **ranks}

    def _keep_record(self, record: StepRecord) -> None:
        self.history.append(record)
        self.folder.append(record)

    def _fill_records(self, step: int) -> None:
        """Adds a record without a loss for each batch that the guard skipped."""
        for missing in range((self.history[-1].step if self.history else 0) + 1, step + 1):
            self._keep_record(StepRecord(missing, math.nan, math.nan, 0.0, 0, 0.0, None))

    def _cut_back(self, step: int) -> None:
        """Cuts the records back after the guard has rewound the model."""
        self.step, self.diverged = step, False
        self.history = self.folder.cut_history(step)
        self._amaxes = AmaxLog(self.folder.path, step=step)
        if self._watch is not None:
            self._watch.rewind(step)

    def _random_generators(self) -> AbstractContextManager[None]:
        """Restores torch's global random generators when the block ends."""
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])

    def _identity(self) -> dict[str, str]:
        """Hashes that a checkpoint must match, and facts that its bits may depend on."""
        return {
            "config": self.config.digest(),
            "text": self._text,
            "start": str(self._first_step),
            **_versions(),
            "threads": str(torch.get_num_threads()),
            "device": _device_name(self.device),
            "parallel": " x ".join(f"{name} {getattr(self.config.parallel, name)}" for name in SPLITS),
            "microbatches": str(self.config.microbatches),
            "curve": self.folder.curve,
            **({} if self._amaxes is None else {"amaxes": self._amaxes.digest}),
        }

    def _newest(self) -> Checkpoint | None:
        """The newest checkpoint whose every byte is right. The first process looks for it; the others take the same."""
        ranks = self.ranks

        def find() -> Checkpoint | None:
            remove_temporary_files(self.folder.checkpoints)
            older = self.config.older_digests()
            return newest_of_run(self.folder.checkpoints, self._identity(), whole=ranks.size == 1, older=older)

        found = ranks.together(lambda: find() if ranks.first else None)
        path = ranks.tell(None if found is None else found.path)[0]
        if ranks.first or path is None:
            return ranks.together(lambda: found)
        return ranks.together(lambda: read_any(path, whole=False, every_byte=False))

    def _restore(self, checkpoint: Checkpoint) -> None:
        identity, model = self._identity(), self.model
        if self.ranks.size > 1:
            states = restore_shards(
                checkpoint,
                model,
                self._optimizer,
                self._orders,
                self.ranks.rank,
                same_division=checkpoint.metadata.get("parallel") == identity["parallel"],
            )
            self._random = states or self._random
        else:
            restore_state(checkpoint, model, self._optimizer)
            self._random = checkpoint.part("random.")
        for name in ("torch", "ottava", "threads", "device", "parallel", "microbatches"):
            if self.ranks.first and checkpoint.metadata.get(name, identity[name]) != identity[name]:
                _log.warning(
                    "%s was %s and is %s now: the run continues, but its bits may differ from an uninterrupted run",
                    name,
                    checkpoint.metadata.get(name),
                    identity[name],
                )
        if self.ranks.first:
            _log.info("resumed from %s", checkpoint.path)


def _due(every: int, step: int, steps: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)


def _finite(number: float) -> float:
    """The number, or NaN for an infinity: JSON has neither, and both mean divergence."""
    return number if math.isfinite(number) else math.nan


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU"


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "ottava": __version__}


def _random_states(device: torch.device) -> dict[str, Tensor]:
    """States of the global generators of a run on this device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _records_of(checkpoint: Checkpoint) -> list[StepRecord]:
    """The steps of the other run, if the checkpoint lies in its folder."""
    path = checkpoint.path.parent.parent / "metrics.jsonl"
    try:
        lines = read_text(path, most=1 << 30).splitlines()[: checkpoint.step]
        records = [StepRecord.from_json(line) for line in lines]
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.warning("%s: cannot be read (%s): the curve of this run begins at its own first step", path, error)
        return []
    return records if [record.step for record in records] == list(range(1, checkpoint.step + 1)) else []
