"""Notes the training around the casts: each step's batch, gradient and update, and the modes of its forwards.

Most trouble that is blamed on FP8 comes from data, learning rate or the loop. This tap records what tells them apart:

    every step      hash and size of inputs and labels, share of ignored labels, of samples and tokens that are alike,
                    gradient norm before and after clipping, settings of every parameter group, forwards, backwards,
                    optimizer steps, optimizer steps without a backward, optimizers that began anew
    full looks      for each parameter the update over the weight, the share of weights that did not move, the gradient,
                    the spread of the weight, and the share of weights that something else wrote after an earlier step
    once            hash of each weight before the first step, packages that drive the training, dtypes, every parameter
                    with the optimizer that holds it, equal parameters, modes of forwards

All numbers stay on their device until the step's other numbers are read. The numbers of a step do not depend on whether
the step gets a look.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from ottava.base.errors import Guard
from ottava.engine.functional import QuantizedLayer
from ottava.experiments.snapshot import stepped_by
from ottava.experiments.trace import fingerprint
from ottava.watching.adapters import stored
from ottava.watching.batches import Batches, arguments_of
from ottava.watching.gradients import Gradients, dense
from ottava.watching.manifest import configured
from ottava.watching.operands import SHARD, capturing, plain

_SAMPLED = 1024  # elements of a parameter whose update is measured
_CHECKED = 4  # parameters that are looked at in every step: gradients before a backward, weights after a step
_GUARDED = 64  # elements of such a weight
_RANDOM = ("Dropout", "BatchNorm", "DropPath", "StochasticDepth")
_GROUPS = 8  # parameter groups whose settings are columns
_SETTINGS = ("lr", "weight_decay", "eps", "momentum")
_PLAIN = (int, float, tuple, str, bool)
_HASHED = 16_384  # elements of a parameter that its hash reads
_TRAINERS = MappingProxyType(
    {"pytorch_lightning": "lightning", "ottava.train": "ottava"}
    | {name: name for name in ("transformers", "trl", "accelerate", "lightning", "torchtitan", "megatron", "deepspeed")}
)
"""Package of a function -> name in the manifest's "framework"."""


UPDATES = ("ratio", "still", "gradient", "weight", "spread", "written")
"""The sums of `Updates`."""


class Updates(NamedTuple):
    """Sums over the samples of all parameters, on the device."""

    names: tuple[str, ...]
    sums: Tensor
    """fp32 (6, parameters): update over weight; share of weights that did not move although they have a gradient;
    rms of gradient; rms of weight; its standard deviation over that; share of weights that something other than an
    optimizer changed after an earlier look, NaN if unknown."""


class Drained(NamedTuple):
    """The facts of a step that ended."""

    numbers: dict[str, Tensor]
    """On their devices; `TrainingTap.finish` makes columns of them."""
    host: dict[str, float]
    """Columns that are known already."""
    updates: Updates | None


class TrainingTap:
    """Collects these numbers until `drain`.

    Args:
        model: the model; None: those that `adopt` gets.
        batches: whether to hash inputs and labels.
        report: gets the facts of an event.
        guard: wraps what a forward calls.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> tap = TrainingTap(model)
        >>> _ = model(torch.ones(3, 4))
        >>> tap.drain().host["forwards"]
        1.0
        >>> tap.close()
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        batches: bool = True,
        report: Callable[..., None] = lambda kind, **facts: None,
        by_hand: Callable[[], None] = lambda: None,
        guard: Guard = lambda hook: hook,
    ) -> None:
        self._on_begin, self._on_end = guard(self._begins), guard(self._forwarded)
        self._hashes, self._report, self._by_hand = batches, report, by_hand
        self.batches = Batches()
        self.gradients = Gradients()
        self._roots: list[tuple[weakref.ref[nn.Module], Any]] = []
        self._numbers: dict[str, Tensor] = {}
        self._kept: dict[int, Tensor] = {}  # optimizer -> what its parameters still have when a backward begins
        self._backwards = self._drained_at = 0
        self._evaluations = self._optimizer_steps = self._extra_steps = self._accumulated = 0
        self._stepped_at: dict[int, int] = {}
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._held: dict[int, tuple[weakref.ref[Tensor], dict[str, Any]]] = {}
        self._bare: dict[str, dict[str, Any]] = {}
        self._configured: dict[str, dict[str, Any]] = {}
        self._steppers: dict[int, tuple[weakref.ref[Optimizer], float]] = {}
        self._restarts = self._shared = 0
        self._versions: list[Any] | None = None
        self._functional = False
        self._before: tuple[list[Tensor], Tensor] | None = None
        self._left: tuple[list[Tensor], Tensor] | None = None
        self._written: tuple[list[Tensor], Tensor] | None = None
        self._guarded: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._updates: Updates | None = None
        self._modes: set[tuple[Any, ...]] = set()
        self._casting: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module] | None]
        self._casting = weakref.WeakKeyDictionary()
        self._equal: list[tuple[str, str]] = []
        self._weights: dict[str, str] = {}
        self._began: dict[int, str] = {}  # id -> hash: two models may have one name, and another take its place
        self._hashed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._reached: set[str] = set()
        self._frameworks: list[str] | None = None
        self.looking = self.paused = self.idle = self.searches = False
        """Whether the running step gets a full look; whether forwards are none of the training; whether the step is
        counted only; whether an optimizer runs that moves weights between forwards, as L-BFGS does."""
        self.outputs: list[Tensor] = []
        """Of a forward whose backward has not come; no graph, and nothing that lives longer than the graph does."""
        self.guards, self.norm_wanted = True, False
        """Whether the next step asks what was written after this one; whether an idle step reads its norm."""
        self._load = nn.Module.load_state_dict
        load, report = self._load, self._report

        @functools.wraps(load)
        def loaded(module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            result = load(module, state_dict, *args, **kwargs)
            own = [name for name, _ in module.named_parameters()]
            given = [name for name, x in state_dict.items() if isinstance(x, Tensor)]
            if own and given and {*own} <= {*getattr(result, "missing_keys", ())}:
                theirs = next((name for name in given if name.endswith(f".{own[0]}")), given[0])
                report("load", own=len(own), given=len(given), mine=own[0], theirs=theirs)
            return result

        self._loaded = loaded
        nn.Module.load_state_dict = loaded  # type: ignore[method-assign,assignment]
        if model is not None:
            self.adopt(model)

    def adopt(self, root: nn.Module) -> None:
        """Adds a model. It replaces those that are parts of it, or their forwards would count twice."""
        if any(known() is root for known, _ in self._roots) or isinstance(root, torch.jit.ScriptModule):
            return  # TorchScript takes no hooks
        inside = {id(module) for module in root.modules()}
        for known, hook in self._roots:
            if id(known()) in inside:
                hook.remove()
        self._roots = [entry for entry in self._roots if entry[0]() is not None and id(entry[0]()) not in inside]
        # blocks and averaged copies begin as equals, too, and should part; an embedding and a head should not
        tables = {id(m._parameters.get("weight")) for m in root.modules() if isinstance(m, nn.Embedding)}
        lookups: set[str] = set()
        found: dict[Any, list[str]] = {}
        for name, p in _named(root):
            lookups |= {name} if id(p) in tables else set()
            if p.dim() == 2 and plain(p)[0] is not None:
                sample = _samples([p])
                if bool((sample != sample[0]).any()):
                    found.setdefault((tuple(p.shape), tuple(sample.tolist())), []).append(name)
        pairs = [(group[0], other) for group in found.values() for other in group[1:]]
        self._equal += [pair for pair in pairs if len(lookups & set(pair)) == 1 or self._is_one(root, pair)]
        self._roots.append((weakref.ref(root), root.register_forward_hook(self._on_end, with_kwargs=True)))
        self._roots.append((weakref.ref(root), root.register_forward_pre_hook(self._on_begin, prepend=True)))

    @staticmethod
    def _is_one(root: nn.Module, pair: tuple[str, str]) -> bool:
        one, other = map(root.get_parameter, pair)
        return one is other

    def close(self) -> None:
        """Removes the hooks."""
        if nn.Module.load_state_dict is self._loaded:
            nn.Module.load_state_dict = self._load  # type: ignore[method-assign]
        for _, hook in self._roots:
            hook.remove()

    # --- the forward ----------------------------------------------------------------------------------------------

    def _begins(self, *_: Any) -> None:
        self.outputs = []
        if self._versions is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.wrote()

    def wrote(self) -> None:
        """Ends the step if weights have changed since the backward, and no optimizer of torch's was there to do it."""
        if self._versions is None or self.paused or capturing() or (now := self._counts()) is None:
            return
        before, self._versions = self._versions, now
        if now != before and now[0] == before[0]:  # a model that ran for the first time has written nothing
            self._versions = None
            self._by_hand()

    def _counts(self) -> list[Any] | None:
        """Which weights there are, and what changes with them; None while torch.func.functional_call has put others in
        their place."""
        held = [p for _, p in self._parameters() if not p.is_inference()]
        if not all(isinstance(p, nn.Parameter) for p in held):
            self._functional = True
            return None
        # what is written through p.data has no version; to read numbers on a GPU would wait
        read = [x for p in held if p.device.type == "cpu" and (x := plain(p)[0]) is not None]
        numbers = _samples(read, _GUARDED).numpy().tobytes() if read else b""
        return [[*map(id, held)], numbers, *(p._version for p in held)]

    def _forwarded(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or self.paused or torch._C._current_graph_task_id() != -1 or capturing():
            return
        trains = torch.is_grad_enabled()
        if trains and not (self._backwards or self._versions or self._stepped_at or self.searches):
            self._versions = self._counts()  # torch.autograd.grad and steps by hand
        if trains and module.training:
            self.outputs = [x.detach() for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if self.idle and trains:
            self.batches.forwards += 1
            return
        self._note_mode(module, trains, args, kwargs)
        if trains:
            given = (args, kwargs) if self._hashes else ((), {})
            self.batches.forward(*given, training=module.training)
        elif module.training and any(p.requires_grad for p in module.parameters()):
            self._evaluations += 1

    def _note_mode(self, module: nn.Module, trains: bool, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Reports each combination of modes once: whether gradients are on, `training`, and the recipe that ran."""
        if self.looking or module not in self._casting:  # it may have been converted since
            layers = (x for x in module.modules() if isinstance(x, QuantizedLayer) and x.resolved.casts)
            first = next(layers, None)
            self._casting[module] = None if first is None else weakref.ref(first)
        reference = self._casting[module]
        layer: Any = None if reference is None else reference()
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
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        counts = [m.num_batches_tracked for m in norms if m.num_batches_tracked is not None]
        facts |= {"fresh": not any(int(count) for count in counts)} if counts else {}
        if not trains and self._hashes:  # what an evaluation is given no loss shows
            seen = {name: fingerprint(x) for name, x in arguments_of(args, kwargs)}
            facts["given"] = {name: of for name, of in seen.items() if isinstance(of, list)}
        self._report("mode", **facts)

    # --- the backward and the step ----------------------------------------------------------------------------------

    def rooted(self, roots: Sequence[Tensor]) -> None:
        """A backward begins at these losses."""
        self._backwards += 1
        self.outputs = []
        first = self._backwards - 1 in self._stepped_at.values()  # since an optimizer stepped
        self._kept = {} if first else self._kept
        if not first and self._backwards > 1:
            self._accumulated += any(p.grad is not None for o in self._living() for p in stepped_by(o))
        if self.idle or capturing():
            return
        if first:
            # of several optimizers one may leave its gradients until its own turn, so each is asked when it steps; a
            # flat copy of the parameters takes its gradient by assignment: nothing is added to it
            self._numbers["kept_gradient"] = torch.zeros(1, dtype=torch.float32)
            held = {id(o): [p for p in stepped_by(o) if p.grad is not None] for o in self._living()}
            mine = {id(p) for _, p in self._parameters()} if any(held.values()) else set[int]()
            held = {o: [p for p in some if id(p) in mine] for o, some in held.items()}
            self._kept = {o: _left(some).reshape(1) for o, some in held.items() if some}
        self.batches.backward(roots if self._hashes else ())

    def backward_ended(self, scale: Tensor | None = None) -> None:
        """A backward has ended: its gradients are whole, and nobody has clipped them yet.

        scale: the factor of a GradScaler in them.
        """
        if capturing():
            return
        if not self._stepped_at:  # nobody knows yet who will step
            self._versions = None if self.searches else self._counts()
            self._hash_weights()
        if self.idle and not self.norm_wanted:
            return
        held = [p for group in self._groups() for p in group["params"] if p.grad is not None]
        if self.looking or not held:
            reached = [(name, p) for name, p in self._parameters() if p.grad is not None]
            self._reached.update(name for name, _ in reached)
            held = held or [p for _, p in reached]
        with torch.no_grad():
            self.gradients.note(held, scale)
            if scale is not None:
                self._numbers["grad_scale"] = scale.detach().float().reshape(1).clone()  # update() writes into it

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        if self.idle or capturing():
            return
        if self._frameworks is None:
            self._frameworks = driven_by(sys._getframe(1))
        self._hash_weights()
        if (kept := self._kept.pop(id(optimizer), None)) is not None:
            before = self._numbers.get("kept_gradient", kept)  # of an optimizer that steps in this step, too
            self._numbers["kept_gradient"] = kept if before.device != kept.device else torch.maximum(kept, before)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        usable = [p for p in parameters if dense(p.grad) is not None and dense(p) is not None]
        tensors = [p for p in usable if p.dim()]
        with torch.no_grad():
            self._note_written(tensors)
            if self._drained_at == self._backwards > 0:  # the step of this backward has ended
                self.gradients.joins(optimizer)
            else:
                self._numbers |= self.gradients.norms(optimizer, usable, self._numbers, self.looking)
            left, self._left = self._left, None
            if tensors and (self.looking or left is not None):
                samples = _samples(tensors)
                if left is not None and [*map(id, left[0])] == [*map(id, tensors)]:
                    self._written = tensors, _mean((left[1] != samples) & samples.isfinite(), tensors)
                if self.looking:
                    self._before = tensors, samples

    @property
    def derives(self) -> bool:
        """Whether a backward was seen: an evolution strategy sets gradients by hand."""
        return self._backwards > 0

    @property
    def optimized(self) -> bool:
        """Whether an optimizer has stepped."""
        return bool(self._stepped_at)

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer has stepped before."""
        return any(ref() is optimizer for ref in self._optimizers)

    def after(self, optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> None:
        """An optimizer has stepped."""
        self._versions = None
        self._optimizer_steps += 1
        if self._backwards and self._stepped_at.get(id(optimizer)) == self._backwards:
            self._extra_steps += 1
        self._note_restart(optimizer)
        self._stepped_at[id(optimizer)] = self._backwards
        if not (known := self.knows(optimizer)):
            self._optimizers.append(weakref.ref(optimizer))
        self._guard(optimizer)
        if self._before is None and known and not self.looking:
            return
        self._note_held(optimizer, name_of)
        if self._before is None:
            return
        (parameters, before), self._before = self._before, None
        names = {id(p): name for name, p in reversed([*self._parameters()])}
        with torch.no_grad():
            named = tuple(names.get(id(p)) or self._held[id(p)][1]["name"] for p in parameters)
            after = _samples(parameters)
            written, self._written = self._written, None
            same = written is not None and [*map(id, written[0])] == [*map(id, parameters)]
            self._updates = Updates(named, _moved(parameters, before, after, written[1] if written and same else None))
            self._left = parameters, after

    def _guard(self, optimizer: Optimizer) -> None:
        """Keeps a few numbers of a few parameters, as the optimizer left them."""
        if capturing():
            return
        if not self.guards:
            self._guarded.clear()
            return
        held = [p for group in optimizer.param_groups for p in group["params"] if p.dim()]
        for p in held:  # of a step before, in which other parameters had gradients
            self._guarded.pop(id(p), None)
        some = [p for p in held if p.grad is not None and dense(p) is not None]
        some = some[:: -(-len(some) // _CHECKED) or 1]
        sizes = [len(range(0, n, -(-n // _GUARDED))) for n in (plain(p)[0].numel() for p in some)]  # type: ignore[union-attr]
        for p, x in zip(some, _samples(some, _GUARDED).split(sizes) if some else (), strict=True):
            self._guarded[id(p)] = weakref.ref(p), x

    def _note_written(self, parameters: Sequence[Tensor]) -> None:
        """The share of these numbers that something else has changed since: an average that was swapped in, say."""
        left = [(p, known[1]) for p in parameters if (known := self._guarded.get(id(p))) and known[0]() is p]
        if left:
            now = _samples([p for p, _ in left], _GUARDED)
            changed = ((now != torch.cat([x.to(now.device) for _, x in left])) & now.isfinite()).float()
            shares = [x.mean() for x in changed.split([x.numel() for _, x in left])]
            self._numbers["written"] = torch.stack(shares).amax().reshape(1)
            self._numbers["weights"] = now.sum(dtype=torch.float64).reshape(1)

    def _note_held(self, optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> None:
        """Notes every tensor that an optimizer holds, with its settings; those of no model get a name of their own."""
        mine = {id(p) for _, p in self._parameters()}
        first = 0
        for known in self._living():
            if known is optimizer:
                break
            first += len(known.param_groups)
        for number, group in enumerate(optimizer.param_groups, first):
            settings = {k: v for k, v in group.items() if k != "params" and isinstance(v, _PLAIN)}
            settings["lr"] = number_of(group.get("lr"))
            about = {"optimizer": type(optimizer).__name__, "group": number, **settings}
            for i, p in enumerate(group["params"]):
                state = optimizer.state.get(p, {})
                kinds = sorted({str(s.dtype) for s in state.values() if isinstance(s, Tensor) and s.numel() > 1})
                grad = "" if p.grad is None else str(p.grad.dtype)
                name = name_of(p) or f"optimizer[{number}].params[{i}]"
                facts = {**about, "gradient": grad, "state": kinds}
                self._held[id(p)] = weakref.ref(p), {"name": name, "held": facts}
                if id(p) not in mine:
                    kind = str(p.dtype).removeprefix("torch.")
                    self._bare[name] = {"shape": list(p.shape), "dtype": kind, "trains": p.requires_grad, "held": facts}

    def _note_restart(self, optimizer: Optimizer) -> None:
        """Counts optimizers that forgot their state, or were made again, and those that step a parameter once more."""
        p = next((p for group in optimizer.param_groups for p in group["params"] if p.grad is not None), None)
        if p is None:
            return
        count = optimizer.state.get(p, {}).get("step", math.nan)
        count = number_of(count)
        before, steps = self._steppers.get(id(p), (lambda: optimizer, math.nan))
        other = before()
        if other is not optimizer and other is not None and self._stepped_at.get(id(other)) == self._backwards:
            self._shared += 1
        elif other is None or count <= steps:
            self._restarts += 1
        self._steppers[id(p)] = weakref.ref(optimizer), count

    # --- results ----------------------------------------------------------------------------------------------------

    @property
    def expects(self) -> bool:
        """Whether the step before got a look, whose weights are compared with what the next step finds."""
        return self._left is not None

    def skip(self) -> Drained:
        """An idle step has ended. What went wrong in it counts for the next step that is not idle."""
        self.batches.drain()
        norm = self.gradients.total() if self.norm_wanted else {}
        self.gradients.drain()
        self._drained_at, self._optimizer_steps, self.norm_wanted = self._backwards, 0, False
        return Drained(norm, {}, None)

    def drain(self) -> Drained:
        """The facts of the step that ended."""
        seen = self.batches.drain()
        host: dict[str, float] = {
            "forwards": float(seen.pop("forwards")),
            "eval_forwards_in_train_mode": float(self._evaluations),
            "train_forwards_in_eval_mode": float(seen.pop("evaluating")),
            "backwards": float(self._backwards - self._drained_at),
            "optimizer_steps": float(self._optimizer_steps),
            "accumulated": float(self._accumulated),
        }
        numbers, self._numbers = seen | self._numbers, {}
        if self._stepped_at:  # without an optimizer in sight, none of its mistakes was looked for
            host |= {"extra_steps": float(self._extra_steps), "restarts": float(self._restarts)}
            host |= {"shared_parameters": float(self._shared)} | self._settings(numbers)
        updates, self._updates = self._updates, None
        if updates is not None:
            numbers["updates"] = updates.sums.reshape(-1)
        self._drained_at = self._backwards
        self._extra_steps = self._restarts = self._shared = self._evaluations = self._optimizer_steps = 0
        self._accumulated = 0
        self.gradients.drain()
        self.norm_wanted = False
        return Drained(numbers, host, updates)

    def _settings(self, numbers: dict[str, Tensor]) -> dict[str, float]:
        """Columns of the settings of the parameter groups; adds those on a device to `numbers`."""
        columns: dict[str, float] = {}
        rates = []
        for g, group in enumerate(self._groups()):
            betas = group.get("betas")
            pair = betas if isinstance(betas, (tuple, list)) and len(betas) > 1 else (None, None)
            values = {name: group.get(name) for name in _SETTINGS} | {"beta1": pair[0], "beta2": pair[1]}
            for name, value in values.items() if g < _GROUPS else [("lr", group.get("lr"))]:
                number = number_of(value)
                told = isinstance(value, (int, float)) and not math.isfinite(number) and name == "lr"  # by a schedule
                rates += [number] if name == "lr" and (math.isfinite(number) or told) else []
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    numbers[f"{name}/{g}"] = value.detach().to(torch.float32).reshape(-1)[:1]
                elif (math.isfinite(number) or told) and g < _GROUPS:
                    columns[f"{name}/{g}"] = number
        return columns | _largest(rates)

    def finish(
        self, host: Mapping[str, float], names: Iterable[str], values: Sequence[Sequence[float]]
    ) -> dict[str, float]:
        """Columns of steps.jsonl from what `drain` gave: `host`, and the `numbers` by name, once they were read."""
        columns = dict(host)
        for name, read in zip(names, values, strict=True):
            columns |= self.batches.columns(name, read)
            if len(read) == 1:
                columns[name] = read[0]
        return columns | _largest([value for name, value in columns.items() if name == "lr" or name.startswith("lr/")])

    def describe(self, final: bool = False) -> dict[str, Any]:
        """Facts of the manifest: every parameter, weights, packages, dtypes, equal parameters, cross-entropy.

        final: also the parameters that end as they began; their hashes take time.
        """
        parameters, seen = [], set[int]()
        for name, p in self._parameters():
            if id(p) in seen:
                continue
            seen.add(id(p))
            held = self._held.get(id(p))
            facts = held[1]["held"] if held is not None and held[0]() is p else None
            kind = str(p.dtype).removeprefix("torch.")
            trains = p.requires_grad and (facts is not None or bool(self._held))
            one = {"name": name, "shape": list(p.shape), "dtype": kind, "trains": trains, "held": facts}
            one |= {"reached": name in self._reached} if self._held else {}
            parameters.append(one | ({"sharded": True} if plain(p)[1] == SHARD else {}))
        parameters += [{"name": name, **facts} for name, facts in self._bare.items()]
        loss = {"classes": self.batches.classes, "softmax_twice": bool(self.batches.softmax_twice)}
        dtypes = {"inputs": sorted(self.batches.dtypes)} if self.batches.dtypes else {}
        about: dict[str, Any] = {"weights": self._weights, "framework": self._frameworks or []}
        if final:
            still = [(n, self._began.get(id(p)) == hash_of(p)) for n, p in self._parameters()]
            about["unmoved"] = sorted({n for n, same in still if same} - {n for n, same in still if not same})
        about |= {"functional": True} if self._functional else {}
        about |= {"arguments": self.batches.arguments} if self.batches.arguments else {}
        if not self._configured:  # once: a search among all objects of the process takes a tenth of a second
            self._configured = configured([root for ref, _ in self._roots if (root := ref()) is not None])
        about |= self._configured
        return {"parameters": parameters, "dtypes": dtypes, "tied": self._ties(), **loss, **about}

    def stands_in(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer may hold copies of the models' parameters: they ran, and all its shapes are theirs."""
        if self._backwards == self._drained_at or not self.batches.forwards:
            return False
        shapes = {tuple(p.shape) for _, p in self._parameters()}
        return all(tuple(p.shape) in shapes for group in optimizer.param_groups for p in group["params"])

    def _hash_weights(self) -> None:
        """Hashes the parameters of models that are new, before an optimizer first changes them; new ones in looks."""
        for ref, _ in self._roots:
            if (root := ref()) is not None and (self.looking or root not in self._hashed):
                self._hashed.add(root)
                for name, p in root.named_parameters():
                    if id(p) not in self._began and (hash := hash_of(p)):
                        self._began[id(p)] = hash
                        self._weights.setdefault(name, hash)

    def _living(self) -> list[Optimizer]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._living():
            yield from optimizer.param_groups

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for ref, _ in self._roots:
            if (root := ref()) is not None:
                yield from _named(root)

    def _ties(self) -> list[dict[str, Any]]:
        """Matrices that are one parameter, or began as equal ones: whether they still are."""
        now = {name: p for name, p in self._parameters() if p.dim() == 2 and plain(p)[0] is not None}
        ties = []
        for one, other in self._equal:
            if one in now and other in now:
                shared = now[one] is now[other]
                apart = not shared and bool((_samples([now[one]]) != _samples([now[other]])).any())
                ties.append({"names": [one, other], "shared": shared, "apart": apart})
        for ref, _ in self._roots:
            config = getattr(ref(), "config", None)
            if getattr(config, "tie_word_embeddings", False) is True:
                ends = [getattr(ref(), f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
                weights = [None if end is None else stored(end) for end in ends]
                if all(isinstance(w, Tensor) for w in weights) and weights[0] is not weights[1]:
                    ties.append({"names": ["input embeddings", "output embeddings"], "shared": False, "apart": True})
        return ties


def _named(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model, each under every name; not those of lazy layers, which have no shape yet."""
    return ((name, p) for name, p in root.named_parameters(remove_duplicate=False) if not is_lazy(p))


def _left(parameters: Sequence[Tensor]) -> Tensor:
    """The largest gradient that some of these still have; 0 if they have none."""
    left = [
        g
        for p in sorted(parameters, key=Tensor.numel)[:_CHECKED]
        if (g := p.grad) is not None and plain(g)[0] is not None and g.numel()
    ]
    return (
        torch.stack([g.detach().abs().amax().float() for g in left]).amax()
        if left
        else torch.zeros((), dtype=torch.float32)
    )


def _largest(rates: Sequence[float]) -> dict[str, float]:
    """The column of the largest rate; NaN if one is."""
    return {"lr": math.nan if any(map(math.isnan, rates)) else max(rates)} if rates else {}


def _samples(parameters: Sequence[Tensor], most: int = _SAMPLED) -> Tensor:
    """Up to `most` elements of each, joined, fp32; copied."""
    parts = []
    for p in parameters:
        flat = plain(p)[0].reshape(-1)  # type: ignore[union-attr]
        parts.append(flat[:: -(-flat.numel() // most)].to(parameters[0].device, torch.float32, copy=True))
    return torch.cat(parts)


def _mean(values: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The mean over each parameter's part of what `_samples` gave."""
    sizes = [len(range(0, n, -(-n // _SAMPLED))) for n in (plain(p)[0].numel() for p in parameters)]  # type: ignore[union-attr]
    count = torch.tensor(sizes, device=values.device)
    of = torch.repeat_interleave(torch.arange(len(sizes), device=values.device), count)
    return torch.zeros(len(sizes), dtype=torch.float32, device=values.device).index_add_(0, of, values.float()) / count


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


def number_of(value: Any) -> float:
    """A number, or a tensor of one on the CPU; NaN for anything else."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else math.nan
    return float(value) if isinstance(value, (int, float)) else math.nan


def hash_of(x: Tensor) -> str:
    """16 hexadecimal digits from a tensor's shape and 16,384 of its elements, evenly spread; "" if it has no numbers.

    Equal numbers have equal hashes in every floating dtype that holds them.

    Example:
        >>> hash_of(torch.ones(4)) == hash_of(torch.ones(4).bfloat16()) != hash_of(torch.ones(2, 2))
        True
    """
    x = x.detach()
    if x.is_floating_point() and (x := dense(x)) is None:  # type: ignore[assignment]
        return ""
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ or x.is_meta or not x.numel():
        return ""
    flat = x.reshape(-1)[:: -(-x.numel() // _HASHED)].cpu()
    flat = flat.to(torch.float32) if flat.is_floating_point() else flat
    data = flat.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8, key=repr(tuple(x.shape)).encode()[:64]).hexdigest()


def driven_by(frame: FrameType | None) -> list[str]:
    """The training packages whose functions are on the stack, the innermost first."""
    found: dict[str, None] = {}
    while frame is not None:
        # a trainer of one package may inherit the loop of another
        kinds = type(frame.f_locals.get("self")).__mro__
        for name in (str(frame.f_globals.get("__name__", "")), *(kind.__module__ for kind in kinds)):
            words = name.split(".")
            if (known := _TRAINERS.get(words[0]) or _TRAINERS.get(".".join(words[:2]))) is not None:
                found[known] = None
        frame = frame.f_back
    return list(found)
