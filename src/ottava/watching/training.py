"""Notes the training around the casts: each step's batch, gradient and update, and the modes of its forwards.

Most trouble that is blamed on FP8 comes from data, learning rate or the loop. This tap records what tells them apart:

    every step      hash and size of inputs and labels, share of ignored labels, of samples and tokens that are alike,
                    gradient norm, learning rate, optimizer steps without a backward, optimizers that began anew
    full looks      for each parameter the update over the weight, the share of weights that did not move, the gradient,
                    the spread of the weight, and the share of weights that something else wrote after an earlier step
    once            dtypes, optimizer settings, parameters that no optimizer holds, equal parameters, modes of forwards

All numbers stay on their device until the step's other numbers are read.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ottava.engine.layer import QuantizedLayer
from ottava.watching.operands import plain, unobserved

_PRIME = 16_777_213  # fp32, in which numbers come from a GPU, holds every whole number below it
_HASHED = 65_536  # elements of a tensor that are hashed
_SAMPLED = 1024  # elements of a parameter whose update is measured
_SEARCH = 32  # nodes of the graph behind a loss in which its labels may be
_SHAPES = ("View", "Reshape", "UnsafeView", "ToCopy", "Slice", "Transpose", "Permute", "Clone", "Alias", "Squeeze")
_BATCH = ("hash", "nonfinite", "amax", "square", "count")
_CHECKED = 4  # parameters whose gradient is looked at before a backward
_SAMPLES, _TOKENS = 64, 4096  # of a batch, to find those that are alike
_RANDOM = ("Dropout", "BatchNorm", "DropPath", "StochasticDepth")


UPDATES = ("ratio", "still", "gradient", "weight", "spread", "written")
"""The sums of `Updates`."""


class Updates(NamedTuple):
    """Sums over the samples of all parameters, on the device."""

    names: tuple[str, ...]
    sums: Tensor
    """fp32 (6, parameters): update over weight; share of weights that did not move although they have a gradient;
    rms of gradient; rms of weight; its standard deviation over that; share of weights that something other than an
    optimizer changed after an earlier look, NaN if unknown."""


class TrainingTap:
    """Collects these numbers until `drain`.

    Args:
        model: the model; None: those that `adopt` gets.
        batches: whether to hash inputs and labels.
        report: gets the facts of an event.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> tap = TrainingTap(model, report=lambda kind, **facts: None)
        >>> _ = model(torch.ones(3, 4))
        >>> numbers, _ = tap.drain()
        >>> tap.close()
    """

    def __init__(
        self, model: nn.Module | None, *, batches: bool = True, report: Callable[..., None] = lambda kind, **facts: None
    ) -> None:
        self._batches, self._report = batches, report
        self._roots: list[weakref.ref[nn.Module]] = []
        self._handles: list[Any] = []
        self._numbers: dict[str, Tensor] = {}
        self._inputs: list[Tensor] = []
        self._backwards = self._micro = 0
        self._stepped_at: dict[int, int] = {}
        self._extra_steps = 0
        self._lr = math.nan
        self._held: dict[int, tuple[weakref.ref[Tensor], dict[str, Any]]] = {}
        self._steppers: dict[int, tuple[weakref.ref[Optimizer], float]] = {}
        self._restarts = self._shared = 0
        self._before: tuple[list[Tensor], Tensor] | None = None
        self._left: tuple[list[Tensor], Tensor] | None = None
        self._written: tuple[list[Tensor], Tensor] | None = None
        self._updates: Updates | None = None
        self._modes: set[tuple[Any, ...]] = set()
        self._dtypes: dict[str, set[str]] = {}
        self._equal: list[tuple[str, str]] = []
        self._classes: int | None = None
        self._softmax: bool | None = None
        self.looking = self.active = False
        """Whether the running step gets a full look; whether any step is watched."""
        if model is not None:
            self.adopt(model)

    def adopt(self, root: nn.Module) -> None:
        """Adds a model."""
        if any(known() is root for known in self._roots):
            return
        self._roots.append(weakref.ref(root))
        # blocks and averaged copies begin as equals, too, and should part; an embedding and a head should not
        tables = {id(m.weight) for m in root.modules() if isinstance(m, nn.Embedding)}
        lookups: set[str] = set()
        found: dict[Any, list[str]] = {}
        for name, p in root.named_parameters(remove_duplicate=False):
            lookups |= {name} if id(p) in tables else set()
            if p.dim() == 2 and plain(p)[0] is not None:
                sample = _samples([p])
                if bool((sample != sample[0]).any()):
                    found.setdefault((tuple(p.shape), tuple(sample.tolist())), []).append(name)
        pairs = [(group[0], other) for group in found.values() for other in group[1:]]
        self._equal += [pair for pair in pairs if len(lookups & set(pair)) == 1 or self._is_one(root, pair)]
        self._handles.append(root.register_forward_hook(self._forwarded, with_kwargs=True))

    @staticmethod
    def _is_one(root: nn.Module, pair: tuple[str, str]) -> bool:
        one, other = map(root.get_parameter, pair)
        return one is other

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    # --- the forward ----------------------------------------------------------------------------------------------

    def _forwarded(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1 or not self.active:
            return
        trains = torch.is_grad_enabled()
        self._note_mode(module, trains)
        if not (trains and self._batches):
            return
        inputs = {f"input {i}": x for i, x in enumerate(args)} | dict(kwargs)
        for name, x in inputs.items():
            if isinstance(x, Tensor) and not x.requires_grad and x.numel() and x.layout == torch.strided:
                self._dtypes.setdefault("inputs", set()).add(str(x.dtype).removeprefix("torch."))
                self._note("label" if name in ("labels", "targets", "target") else "input", x)
        self._micro += 1

    def _note_mode(self, module: nn.Module, trains: bool) -> None:
        """Reports each combination of modes once: whether gradients are on, `training`, and the recipe that ran."""
        layer = next((x for x in module.modules() if isinstance(x, QuantizedLayer) and x.resolved.casts), None)
        call = None if layer is None else layer.last_call
        recipe = "" if layer is None else "high precision" if call is None else str(call.recipe.name)
        mode = (trains, module.training, recipe)
        if mode in self._modes or not module._modules:
            return
        self._modes.add(mode)
        kinds = {
            type(m).__name__ for m in module.modules() if getattr(m, "p", 1.0) and type(m).__name__.startswith(_RANDOM)
        }
        drops = [float(m.p) for m in module.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        facts = {"gradients": trains, "training": module.training, "recipe": recipe, "random": sorted(kinds)}
        facts |= {"dropout": max(drops)} if drops else {}
        self._report("mode", **facts)

    def _note(self, name: str, x: Tensor, ignore: int | None = None) -> None:
        """Adds a tensor of the batch to its numbers: `_BATCH`, and the share of ignored labels."""
        with unobserved(x):
            x = x.detach()
            flat = x.reshape(-1)
            flat = flat[:: -(-flat.numel() // _HASHED)]
            place = torch.arange(1, flat.numel() + 1, device=x.device)
            if x.is_floating_point():
                flat32 = flat.to(torch.float32)
                whole = (flat32.view(torch.int32).to(torch.int64) % _PRIME * place % _PRIME).sum() % _PRIME
                rest = _sizes(x, flat32)
            else:
                whole = (flat.to(torch.int64) * place % _PRIME).sum() % _PRIME
                none = torch.zeros((), device=x.device)
                rest = [none, (flat != flat[0]).any(), none, none]
            numbers = torch.stack([whole.to(torch.float32), *(r.to(torch.float32) for r in rest)])
            if ignore is not None:
                counts = [(x == ignore).sum(), (x != ignore).sum(), (x == _first(x, ignore)).sum()]
                twins = [
                    i.reshape(x.shape) for i in self._inputs if i.numel() == x.numel() > 1 and i.device == x.device
                ]
                copied = sum((((i == x) | (x == ignore)).all() & (x != ignore).any()).to(torch.float32) for i in twins)
                facts = torch.stack([numbers[0] * 0 + copied, _common(flat, ignore)])
                self._add("labels", torch.cat([torch.stack(counts).to(torch.float32), facts]))
            elif name == "input":
                self._add("alike", _alike(x, flat, first="alike" not in self._numbers))
                self._inputs += [] if x.is_floating_point() else [x]
        self._add(name, torch.cat([numbers[:1] * (self._micro + 1) % _PRIME, numbers[1:]]))

    def _add(self, name: str, new: Tensor) -> None:
        old = self._numbers.get(name)
        if old is None or name in ("labels", "alike"):
            self._numbers[name] = new if old is None else old + new
            return
        joined = old + new
        joined[0] %= _PRIME
        joined[2] = torch.maximum(old[2], new[2])
        self._numbers[name] = joined

    # --- the backward and the step ----------------------------------------------------------------------------------

    def rooted(self, root: Tensor) -> None:
        """A backward begins at this loss."""
        if self.looking and self._backwards in self._stepped_at.values():
            left = [p.grad for ref, _ in [*self._held.values()][:_CHECKED] if (p := ref()) is not None]
            found = [
                g.detach().abs().amax().to(torch.float32) for g in left if g is not None and plain(g)[0] is not None
            ]
            self._numbers["kept_gradient"] = torch.stack(found).amax().reshape(1) if found else torch.zeros(1)
        self._backwards += 1
        if self._batches and "labels" not in self._numbers:
            for target, ignore, classes in _labels(root):
                self._note("label", target, ignore)
                self._classes = classes or self._classes
            if self._softmax is None:
                self._softmax = _softmax_twice(root)

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        usable = [(p, g) for p in parameters if (g := plain(p.grad)[0]) is not None and plain(p)[0] is not None]
        with torch.no_grad():
            if usable:
                norms = torch._foreach_norm([g for _, g in usable])
                joined = torch.stack([n.to(norms[0].device, torch.float32) for n in norms]).norm().reshape(1)
                old = self._numbers.get("grad_norm")
                self._numbers["grad_norm"] = joined if old is None else torch.hypot(old, joined)
            elif "grad_norm" not in self._numbers:
                self._numbers["grad_norm"] = torch.zeros(1)
            left, self._left = self._left, None
            if usable and (self.looking or left is not None):
                some = [p for p, _ in usable]
                samples = _samples(some)
                if left is not None and [*map(id, left[0])] == [*map(id, some)]:
                    self._written = some, _mean((left[1] != samples) & samples.isfinite(), some)
                if self.looking:
                    self._before = some, samples
        self._lr = max([_lr(group) for group in optimizer.param_groups], default=math.nan)

    def after(self, optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> None:
        """An optimizer has stepped."""
        if self._backwards and self._stepped_at.get(id(optimizer)) == self._backwards:
            self._extra_steps += 1
        self._note_restart(optimizer)
        self._stepped_at[id(optimizer)] = self._backwards
        if self._before is None:
            return
        (parameters, before), self._before = self._before, None
        names = {id(p): name for name, p in reversed([*self._parameters()])}
        with torch.no_grad():
            named = tuple(names.get(id(p)) or name_of(p) for p in parameters)
            after = _samples(parameters)
            written, self._written = self._written, None
            known = written is not None and [*map(id, written[0])] == [*map(id, parameters)]
            self._updates = Updates(named, _moved(parameters, before, after, written[1] if written and known else None))
            self._left = parameters, after
        for group in optimizer.param_groups:
            settings = {
                k: v for k, v in group.items() if k != "params" and isinstance(v, (int, float, tuple, str, bool))
            }
            about = {"optimizer": type(optimizer).__name__, **settings}
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                kinds = sorted({str(s.dtype) for s in state.values() if isinstance(s, Tensor) and s.numel() > 1})
                grad = "" if p.grad is None else str(p.grad.dtype)
                self._held[id(p)] = weakref.ref(p), {**about, "gradient": grad, "state": kinds}

    def _note_restart(self, optimizer: Optimizer) -> None:
        """Counts optimizers that forgot their state, or were made again, and those that step a parameter once more."""
        p = next((p for group in optimizer.param_groups for p in group["params"] if p.grad is not None), None)
        if p is None:
            return
        count = optimizer.state.get(p, {}).get("step", math.nan)
        count = math.nan if isinstance(count, Tensor) and count.device.type != "cpu" else float(count)
        before, steps = self._steppers.get(id(p), (lambda: optimizer, math.nan))
        other = before()
        if other is not optimizer and other is not None and self._stepped_at.get(id(other)) == self._backwards:
            self._shared += 1
        elif other is None or count <= steps:
            self._restarts += 1
        self._steppers[id(p)] = weakref.ref(optimizer), count

    # --- results ----------------------------------------------------------------------------------------------------

    def drain(self) -> tuple[dict[str, Tensor], Updates | None]:
        """The numbers of the step that ended, on their devices, and its updates; see `finish`."""
        numbers, self._numbers, self._inputs = self._numbers, {}, []
        counts = map(float, (self._extra_steps, self._restarts, self._shared))
        # without an optimizer in sight, none of its mistakes was looked for
        numbers["host"] = torch.tensor([self._lr, *(counts if self._stepped_at else [math.nan] * 3)])
        updates, self._updates = self._updates, None
        if updates is not None:
            numbers["updates"] = updates.sums.reshape(-1)
        self._extra_steps = self._micro = self._restarts = self._shared = 0
        return numbers, updates

    @staticmethod
    def finish(names: Iterable[str], values: Sequence[Sequence[float]]) -> dict[str, float]:
        """Columns of steps.jsonl from the numbers that `drain` gave, once they were read."""
        columns: dict[str, float] = {}
        for name, read in zip(names, values, strict=True):
            if name in ("input", "label"):
                number = dict(zip(_BATCH, read, strict=True))
                columns[f"{name}_hash"] = number["hash"]
                columns[f"{name}_nonfinite"] = number["nonfinite"]
                if not number["count"]:
                    columns[f"{name}_constant"] = float(number["amax"] == 0)
                else:
                    columns[f"{name}_amax"] = number["amax"]
                    columns[f"{name}_rms"] = math.sqrt(number["square"] / number["count"])
            elif name == "labels":
                ignored, used, equal, copied, alike = read
                columns["labels_ignored_pct"] = 100 * ignored / max(ignored + used, 1.0)
                columns |= {"labels_equal_pct": 100 * equal / used} if used > 1 else {}
                columns |= {"labels_copied": copied, "labels_alike_pct": alike}
            elif name == "host":
                columns |= {"lr": float(f"{read[0]:.6g}")} if math.isfinite(read[0]) else {}
                counts = zip(("extra_steps", "restarts", "shared_parameters"), read[1:], strict=True)
                columns |= {column: count for column, count in counts if math.isfinite(count)}
            elif name == "alike":
                columns |= dict(zip(("samples_alike_pct", "tokens_alike_pct", "blank_inputs"), read, strict=True))
            elif name in ("grad_norm", "kept_gradient"):
                columns[name] = read[0]
        return columns

    def describe(self, name_of: Callable[[Tensor], str]) -> dict[str, Any]:
        """Facts of the manifest: every parameter, dtypes, equal parameters, and facts of a cross-entropy."""
        parameters, seen = [], dict[int, str]()
        for name, p in self._parameters():
            if id(p) in seen:
                continue
            seen[id(p)] = name
            held = self._held.get(id(p))
            facts = held[1] if held is not None and held[0]() is p else None
            kind = str(p.dtype).removeprefix("torch.")
            trains = p.requires_grad and (facts is not None or bool(self._held))
            parameters.append({"name": name, "shape": list(p.shape), "dtype": kind, "trains": trains, "held": facts})
        dtypes = {name: sorted(kinds) for name, kinds in self._dtypes.items()}
        loss = {"classes": self._classes, "softmax_twice": bool(self._softmax)}
        return {"parameters": parameters, "dtypes": dtypes, "tied": self._ties(), **loss}

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for ref in self._roots:
            if (root := ref()) is not None:
                yield from root.named_parameters(remove_duplicate=False)

    def _ties(self) -> list[dict[str, Any]]:
        """Matrices that are one parameter, or began as equal ones: whether they still are."""
        now = {name: p for name, p in self._parameters() if p.dim() == 2 and plain(p)[0] is not None}
        ties = []
        for one, other in self._equal:
            if one in now and other in now:
                shared = now[one] is now[other]
                apart = not shared and bool((_samples([now[one]]) != _samples([now[other]])).any())
                ties.append({"names": [one, other], "shared": shared, "apart": apart})
        for ref in self._roots:
            config = getattr(ref(), "config", None)
            if getattr(config, "tie_word_embeddings", False) is True:
                ends = [getattr(ref(), f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
                weights = [getattr(end, "weight", None) for end in ends]
                if all(isinstance(w, Tensor) for w in weights) and weights[0] is not weights[1]:
                    ties.append({"names": ["input embeddings", "output embeddings"], "shared": False, "apart": True})
        return ties


def _sizes(x: Tensor, sample: Tensor) -> list[Tensor]:
    """What `_BATCH` needs of x and a sample of it: one reading of x, which finds its ends and any NaN.

    The count of infinities and NaNs is that of the sample, and 1 if only the rest has some.
    """
    ends = torch.stack(x.aminmax()).to(torch.float32)
    finite = sample.isfinite()
    clean = torch.where(finite, sample, 0)
    largest = torch.where(ends.isfinite(), ends.abs(), 0).amax()
    # 0 and -inf alone are a mask that is added to scores
    mask = (ends[0] == -math.inf) & (ends[1] == 0) & (clean == 0).all()
    broken = torch.maximum((~finite).sum(), (~ends.isfinite()).any()) * ~mask
    return [broken, torch.maximum(largest, clean.abs().amax()), clean.square().sum(), finite.sum()]


def _alike(x: Tensor, flat: Tensor, *, first: bool) -> Tensor:
    """[share of samples that are as the first one; share of the most frequent token; 1 if all is 0] in percent.

    The shares are 0 for later inputs, and where they mean nothing.
    """
    zero = torch.zeros((), device=x.device)
    samples = tokens = zero
    if first and x.dim() > 1 and len(x) > 1 and x.dtype != torch.bool:
        rows = x[:_SAMPLES].reshape(min(len(x), _SAMPLES), -1)[:, :_TOKENS]
        samples = 100 * (rows[1:] == rows[:1]).all(1).to(torch.float32).mean()
        if not x.is_floating_point():
            some = flat[:: -(-flat.numel() // _TOKENS)]
            tokens = 100 * (some == some.mode().values).to(torch.float32).mean()
    return torch.stack([samples, tokens, (x == 0).all().to(torch.float32)])


def _common(labels: Tensor, ignore: int) -> Tensor:
    """Share of the most frequent label among those that are not ignored, in percent."""
    some = labels[:: -(-labels.numel() // _TOKENS)]
    used = some != ignore
    # ignored labels become numbers of their own, so that they are never the most frequent
    own = torch.where(used, some, -1000 - torch.arange(some.numel(), device=some.device))
    common = (own == own.mode().values) & used
    return (100 * common.sum() / used.sum().clamp_min(1)).to(torch.float32)


def _lr(group: Mapping[str, Any]) -> float:
    lr = group.get("lr", math.nan)
    return math.nan if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr)


def _first(labels: Tensor, ignore: int) -> Tensor:
    """The first label that is not ignored."""
    flat = labels.reshape(-1)
    return flat[(flat != ignore).to(torch.uint8).argmax()]


def _samples(parameters: Sequence[Tensor]) -> Tensor:
    """Up to 1024 elements of each, joined, fp32; copied."""
    parts = []
    for p in parameters:
        flat = plain(p)[0].reshape(-1)  # type: ignore[union-attr]
        parts.append(flat[:: -(-flat.numel() // _SAMPLED)].to(parameters[0].device, torch.float32, copy=True))
    return torch.cat(parts)


def _mean(values: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The mean over each parameter's part of what `_samples` gave."""
    sizes = [len(range(0, n, -(-n // _SAMPLED))) for n in (plain(p)[0].numel() for p in parameters)]  # type: ignore[union-attr]
    count = torch.tensor(sizes, device=values.device)
    of = torch.repeat_interleave(torch.arange(len(sizes), device=values.device), count)
    return torch.zeros(len(sizes), device=values.device).index_add_(0, of, values.to(torch.float32)) / count


def _moved(parameters: Sequence[Tensor], before: Tensor, after: Tensor, written: Tensor | None) -> Tensor:
    """The sums of `Updates`."""
    gradients = _samples([p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters])
    moves = gradients != 0

    def mean(values: Tensor) -> Tensor:
        return _mean(values, parameters)

    weight = mean(before.square())
    ratio = (mean((after - before).square()) / weight.clamp_min(1e-30)).sqrt()
    still = mean((after == before) & moves) / mean(moves).clamp_min(1e-30)
    spread = ((weight - mean(before).square()).clamp_min(0) / weight.clamp_min(1e-30)).sqrt()
    unknown = torch.full_like(ratio, math.nan) if written is None else written
    return torch.stack([ratio, still, mean(gradients.square()).sqrt(), weight.sqrt(), spread, unknown])


def _labels(root: Tensor) -> Iterator[tuple[Tensor, int | None, int | None]]:
    """The targets that losses behind a root saved, the label that they ignore, the classes of a mean over labels."""
    waiting, visited = [root.grad_fn], 0
    while waiting and visited < _SEARCH:
        node: Any = waiting.pop(0)
        visited += 1
        if node is None:
            continue
        try:
            target = getattr(node, "_saved_target", None)
            if isinstance(target, Tensor):
                ignore = getattr(node, "_saved_ignore_index", None)
                scores = node._saved_self if ignore is not None and getattr(node, "_saved_reduction", 0) == 1 else None
                classes = scores.shape[1] if isinstance(scores, Tensor) and scores.dim() > 1 else None
                yield target, ignore if ignore is None or ignore < 1 << 63 else ignore - (1 << 64), classes
                continue
        except RuntimeError:  # the graph was freed
            return
        waiting += [following for following, _ in node.next_functions]


def _softmax_twice(root: Tensor) -> bool | None:
    """Whether a softmax feeds the cross-entropy behind a root, which has its own; None without a cross-entropy."""
    waiting = [root.grad_fn]
    for _ in range(_SEARCH):
        node: Any = waiting.pop(0) if waiting else None
        if node is None:
            continue
        if node.name().startswith("LogSoftmax"):
            while (node := node.next_functions[0][0]) is not None and node.name().startswith(_SHAPES):
                pass
            return node is not None and node.name().startswith(("Softmax", "LogSoftmax"))
        waiting += [following for following, _ in node.next_functions]
    return None
