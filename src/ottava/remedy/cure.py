"""Tries a remedy by training: makes the change from outside while a script runs, and trains a run again with it.

A remedy of `diagnose` that a watch can make has `trial`, settings of `watching.config.Cure`. `retrain` runs the command
of a run folder once more under a watch with them, from the start, and compares the losses. Data, labels, masks and code
are nobody's to change from outside: their remedies have no trial, and the answer says so.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from torch.optim.optimizer import Optimizer

from ottava.base.untrusted import read_text
from ottava.engine.functional import QuantizedLayer
from ottava.experiments.casts import is_torchao, torchs_linear
from ottava.experiments.handmade import Exact, derivatives
from ottava.measure.layer_names import matches
from ottava.recipe import GEMMS, get_recipe
from ottava.record.reader import Run

_LAST = 10  # losses whose median is that of the end
_GAP = 0.2  # of the distance to the good run that may remain
_APART = 0.02  # of the good run's loss: runs that are nearer are not told apart by it


class Cures:
    """Makes the changes of a `Cure` in a running training.

    Args:
        cure: the settings, as a mapping.
        models: gives the models that have run.
    """

    def __init__(self, cure: Mapping[str, Any], models: Callable[[], Iterable[nn.Module]]) -> None:
        self._cure, self._models = cure, models
        self._stack = ExitStack()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._changed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._furthest = 0
        self._before: list[dict[str, Any]] = []
        self._exact: Exact | None = None
        if cure["sites"] or cure["derivatives"]:
            # the derivative of a cast is zero nearly everywhere
            self._exact = Exact(None if cure["derivatives"] else cure["sites"])
            self._stack.enter_context(self._exact)
            if cure["derivatives"]:
                self._stack.enter_context(derivatives(self._exact.codes, {}))
        if cure["load"]:
            load = nn.Module.load_state_dict
            nn.Module.load_state_dict = _renaming(load)  # type: ignore[method-assign]
            self._stack.callback(setattr, nn.Module, "load_state_dict", load)

    def close(self) -> None:
        """Makes no more changes; those of layers stay."""
        self._stack.close()

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        cure, groups = self._cure, optimizer.param_groups
        if cure["hold"] and optimizer in self._optimizers:
            held = {id(p) for o in self._optimizers for group in o.param_groups for p in group["params"]}
            own = {id(p): p for m in self._models() for p in m.parameters() if p.requires_grad and p.grad is not None}
            if lost := [p for i, p in own.items() if i not in held]:
                # no group of their own: a schedule has as many rates as there were groups
                max(groups, key=lambda group: sum(p.numel() for p in group["params"]))["params"] += lost
        self._optimizers.add(optimizer)
        self._before = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        wanted: Any = None
        factor = cure["lr"]
        if cure["schedule"]:
            # a new optimizer goes on where one has stepped before, as behind a resume; two that begin together do not
            first = self._furthest if self._furthest > 1 else 0
            self._steps[optimizer] = step = self._steps.get(optimizer, first) + 1
            self._furthest = max(self._furthest, step)
            wanted, largest = cure["schedule"][min(step, len(cure["schedule"])) - 1], max(g["lr"] for g in groups)
            factor = wanted / largest if largest > 0 and isinstance(wanted, float) else None
        for i, group in enumerate(groups):
            new: Any = wanted[min(i, len(wanted) - 1)] if isinstance(wanted, (list, tuple)) else wanted
            group["lr"] = new if factor is None else group["lr"] * factor
            betas = list(group.get("betas", ()))
            for name, value in cure["settings"].items():
                if name.startswith("beta") and betas:
                    betas[int(name[4:]) - 1] = value
                    group["betas"] = tuple(betas)
                elif name in group:
                    group[name] = value

    def after(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        for group, before in zip(optimizer.param_groups, self._before, strict=False):
            group.update(before)
        self._before = []
        if self._cure["clear"]:
            optimizer.zero_grad(set_to_none=True)
        if self._exact is not None:
            self._exact.forget()
        for model in self._models():
            if self._cure["train"]:
                model.train()
            if self._cure["recipe"] is not None:
                self._recast(model)

    def _recast(self, model: nn.Module) -> None:
        recipe = get_recipe(self._cure["recipe"])
        for name, module in model.named_modules():
            if module in self._changed or not matches(getattr(module, "name", "") or name, self._cure["layers"]):
                continue
            self._changed.add(module)
            if isinstance(module, QuantizedLayer):
                layer: Any = module
                layer.adopt(recipe, layer.name or name)
            elif is_torchao(module) and not any(getattr(recipe, gemm).quantized for gemm in GEMMS):
                vars(module)["forward"] = torchs_linear(module)


def _renaming(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load_state_dict` that gives a checkpoint the model's names, where they differ by a prefix."""

    @functools.wraps(load)
    def renamed(module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        own = [name for name, _ in module.named_parameters()]
        if own and not {*own} & {*state_dict}:
            longer = next((name for name in state_dict if name.endswith(f".{own[0]}")), "")
            prefix = longer.removesuffix(own[0])
            state_dict = {name.removeprefix(prefix): x for name, x in state_dict.items()}
        return load(module, state_dict, *args, **kwargs)

    return renamed


@dataclass(frozen=True)
class Retrained:
    """What came of a training with a remedy."""

    bad: float
    """Loss at the end of the run."""
    cure: float
    """The same with the remedy."""
    good: float
    """That of the good run; NaN without."""

    @property
    def cured(self) -> bool | None:
        """Whether four fifths of the gap to the good run are gone; None without a gap, unless a loss is not finite."""
        if not math.isfinite(self.cure):
            return False
        if math.isnan(self.good):
            return None if math.isfinite(self.bad) else True
        gap = self.bad - self.good
        if gap <= _APART * abs(self.good):  # what the user complains about is another number
            return None
        return self.cure <= self.good + _GAP * gap if math.isfinite(gap) else self.cure <= (1 + _GAP) * self.good

    def __str__(self) -> str:
        good = "" if math.isnan(self.good) else f", that of the good run {self.good:.4g}"
        cured = {None: "", True: " It cures.", False: " It does not cure."}[self.cured]
        if self.cured is None and not math.isnan(self.good):
            cured = " The loss does not tell the two runs apart, so it shows no cure."
        return f"Trained again with it: the loss at the end is {self.cure:.4g}, it was {self.bad:.4g}{good}.{cured}"


def last_loss(run: Run) -> float:
    """The median of a run's last ten losses; infinite where one is not finite.

    Example:
        >>> import tempfile
        >>> from ottava.record.writer import RunWriter
        >>> with tempfile.TemporaryDirectory() as folder, RunWriter(f"{folder}/run") as writer:
        ...     for step in range(1, 21):
        ...         writer.step(step, loss=21.0 - step)
        ...     writer.flush()
        ...     last_loss(Run.open(f"{folder}/run"))
        5.5
    """
    losses = [math.inf if not math.isfinite(x) else float(x) for x in run.steps.get("loss", [])[-_LAST:]]
    return statistics.median(losses) if losses else math.nan


def retrain(run: Run, remedy: Mapping[str, Any], folder: Path, good: Run | None = None) -> Retrained:
    """Trains a run again, with a remedy.

    Args:
        run: whose command runs again, in the folder in which it ran.
        remedy: one of a finding.
        folder: for the new run. One that tried this remedy is read; beside one of another, or without a step, the name
            gets a number.
        good: a run to compare with.
    Raises:
        ValueError: nobody can make the change from outside, or the command is not known or fails; the message says so.
    """
    if not (trial := remedy.get("trial")):
        raise ValueError("not retrained: only a person can make this change")
    command = [str(word) for word in run.manifest.get("command") or ()]
    if "watch" not in command[1:2] or "--" not in command:
        raise ValueError("not retrained: the run was not made by `ottava watch SCRIPT`, so its command is not known")
    words, where = command[command.index("--") + 1 :], Path(str(run.manifest.get("cwd") or "."))
    text, first = yaml.safe_dump({"cure": trial, "shadow": 0}), folder
    for number in itertools.count(2):
        settings, made = folder.with_name(f"{folder.name}.yaml"), (folder / "watch.json").is_file()
        same = settings.is_file() and read_text(settings) == text
        if not made or (same and len(Run.open(folder).steps["step"])):
            break
        folder = first.with_name(f"{first.name}-{number}")
    if not made:
        folder.mkdir(parents=True, exist_ok=True)
        settings.write_text(text, encoding="utf-8")
        ranks = int((run.manifest.get("host") or {}).get("world_size") or 1)
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        again = [sys.executable, *launcher, "-m", "ottava", "watch", "--out", str(folder.resolve())]
        again += ["--config", str(settings.resolve()), "--", *words]
        done = subprocess.run(again, cwd=where, capture_output=True, text=True)
        if done.returncode and not (folder / "watch.json").is_file():
            raise ValueError(f"not retrained: {' '.join(words)} failed: {done.stderr.strip()[-300:]}")
    new = Run.open(folder)
    if not len(new.steps["step"]):
        raise ValueError(f"not retrained: {' '.join(words)} ended before its first step: {new.manifest.get('ended')}")
    if new.manifest.get("ended") not in ("", "closed", run.manifest.get("ended")) and math.isfinite(last_loss(new)):
        raise ValueError(f"not retrained: {' '.join(words)} did not end: {new.manifest.get('ended')}")
    return Retrained(last_loss(run), last_loss(new), math.nan if good is None else last_loss(good))
