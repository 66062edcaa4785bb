"""Records one training step by meaning: what every module got and gave, forward and backward, gradients and updates.

    weight             a parameter before the first step of an optimizer
    input, output      of a module, in the order of the forward
    recomputed         an output that activation checkpointing computes again in the backward
    output gradient    of the loss, of that output; input gradient alike
    gradient           of a parameter at the end of a backward
    clipped gradient   of a parameter at the step of the optimizer, where it is another one
    update             what the step of the optimizer added to a parameter
    buffer             a buffer after that step

A module's path is the name in its model, without the words that wrappers add (`_orig_mod`, `module`, ...). Code inside
a compiled region is not seen: only what enters and leaves it. Shards of DTensors keep their place in the whole tensor,
so several ranks need no collective to be put together later.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ottava.base.errors import need
from ottava.base.text import grouped, to_json
from ottava.base.untrusted import UntrustedError, parse_json, read_text, regular_size
from ottava.engine.functional import QuantizedLayer
from ottava.experiments.casts import is_torchao
from ottava.experiments.program import tensors_in
from ottava.experiments.snapshot import calls_on, stepped_by

SCHEMA = "ottava.trace/1"
GRADIENTS = ("output gradient", "input gradient")
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_flat_param)(?=\.|$)")


class TraceError(ValueError):
    """A saved trace cannot be read; the message names the file and the reason."""

    exit_code = 4


class Key(NamedTuple):
    """What a tensor means; equal in two programs that compute the same."""

    step: int
    path: str
    """Of the module, or of the parameter."""
    kind: str
    part: int = 0
    """Number among the tensors that a module gets or gives."""

    def __str__(self) -> str:
        what = self.path or "the model"
        return f"{self.kind} of {what}" + (f" (number {self.part + 1})" if self.part else "")


@dataclass(frozen=True)
class Shard:
    """The place of a local tensor in a DTensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    partial: bool = False
    """Whether the whole tensor is the sum over ranks."""


@dataclass(eq=False)
class TensorSeen:
    """One tensor of one call."""

    key: Key
    value: Tensor
    order: float
    """Place in the order of the program."""
    operation: str = ""
    """Class of the module, or of the optimizer."""
    shard: Shard | None = None
    beside: tuple[str, ...] | None = None
    """Of an input gradient: modules elsewhere that read the tensor, too, so that it is a sum. None: unknown."""


@dataclass(eq=False)
class StepRecording:
    """A step as entries in the order of the program. `ranks` are those of other processes, this one among them."""

    entries: list[TensorSeen]
    name: str = "A"
    rank: int = 0
    size: int = 1
    casts: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Path of a module that casts -> unit of rounding in the forward and of gradients."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Path of a module -> its class."""
    ranks: list[StepRecording] = field(default_factory=list)
    nudged: list[StepRecording] = field(default_factory=list)
    """The same program, with every tensor moved by one rounding."""
    again: StepRecording | None = None
    """A second run of the same program."""
    lost: int = 0
    """Tensors beyond what a recorder keeps."""
    operations: Any = None
    """Its calls of operators of torch, see `prover`."""

    def by_key(self) -> dict[Key, list[TensorSeen]]:
        """Key -> the entries of its calls, in order."""
        return grouped((entry.key, entry) for entry in self.entries)

    def save(self, folder: Path | str) -> None:
        """Writes rank0.json and rank0.safetensors (of other ranks alike), and the runs beside it in folders."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [asdict(replace(e, value=None)) for e in self.entries]  # type: ignore[arg-type]
        facts = {"schema": SCHEMA} | {k: getattr(self, k) for k in ("rank", "size", "casts", "kinds", "lost")}
        file = folder / f"rank{self.rank}.json"
        save_file({str(i): e.value.contiguous() for i, e in enumerate(self.entries)}, file.with_suffix(".safetensors"))
        file.write_text(to_json({**facts, "entries": rows}), "utf-8")
        for number, other in enumerate(self.nudged):
            other.save(folder / f"nudged{number}")
        if self.again is not None:
            self.again.save(folder / "again")

    @classmethod
    def load(cls, folder: Path | str) -> StepRecording:
        """Reads what `save` wrote, of all ranks.

        Raises:
            TraceError: a file is missing or damaged.
        """
        folder = Path(folder)
        files = sorted(folder.glob("rank*.json"), key=lambda p: (len(p.name), p.name))
        if not files:
            raise TraceError(f"{folder}: there is no rank0.json in it; `ottava check --save {folder} SCRIPT` makes one")
        ranks = [cls._load_rank(path) for path in files]
        first = ranks[0]
        first.name = folder.name
        missing = sorted({*range(first.size)} - {r.rank for r in ranks})
        if missing:
            raise TraceError(f"{folder}: ranks {missing} of {first.size} have saved nothing")
        first.ranks = ranks if first.size > 1 else []
        first.nudged = [cls.load(path) for path in sorted(folder.glob("nudged*"))]
        first.again = cls.load(folder / "again") if (folder / "again").is_dir() else None
        return first

    @classmethod
    def _load_rank(cls, path: Path) -> StepRecording:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            facts = parse_json(read_text(path))
        except UntrustedError as error:
            raise TraceError(f"{path}: {error}") from None
        if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
            raise TraceError(f"{path}: is no trace of ottava check (schema {SCHEMA})")
        try:
            regular_size(numbers := path.with_suffix(".safetensors"))
            tensors, entries = load_file(numbers), []
            for number, one in enumerate(facts["entries"]):
                (step, name, kind, part), held, readers = one["key"], one["shard"], one.get("beside")
                place = () if held is None else (tuple(held["shape"]), tuple(held["offset"]), bool(held["partial"]))
                shard, beside = Shard(*place) if place else None, None if readers is None else tuple(map(str, readers))
                key, how = Key(int(step), str(name), str(kind), int(part)), (float(one["order"]), str(one["operation"]))
                entries.append(TensorSeen(key, tensors[str(number)], *how, shard, beside))
            casts = {str(k): (float(a), float(b)) for k, (a, b) in facts["casts"].items()}
            kinds = {str(k): str(v) for k, v in facts["kinds"].items()}
            who = path.parent.name, int(facts["rank"]), int(facts["size"])
            return cls(entries, *who, casts, kinds, lost=int(facts.get("lost", 0)))
        except (SafetensorError, KeyError, TypeError, ValueError, OSError, AttributeError) as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            raise TraceError(f"{path}: is damaged: {said}") from None


class StepRecorder:
    """Records steps while it is entered.

    Args:
        models: whose modules to watch; none: every model that is called, found at its first call.
        steps: optimizer steps to record.
        nudge: moves tensors by one rounding, see `tolerance.Nudge`.
        most: bytes to keep at most.
        at_end: called after the last step.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> with StepRecorder(model) as recorder:
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> [str(e.key) for e in recorder.recording().entries][:3]
        ['input of the model', 'input of 0', 'output of 0']
    """

    def __init__(
        self,
        *models: nn.Module,
        steps: int = 1,
        nudge: Any = None,
        most: int = 8 << 30,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        for model in models:
            need("StepRecorder", model, nn.Module)
        self._models, self._steps, self._nudge, self._left = models, steps, nudge, most
        self._at_end, self._lost = at_end, 0
        self.step, self.depth = 0, 0
        self._entries: dict[tuple[int, int, str, str, int, int], TensorSeen] = {}
        self._roots: list[nn.Module] = []
        self._calls: dict[tuple[int, int, bool], int] = {}
        self._handles: list[Any] = []
        self._readers: Any = WeakIdKeyDictionary()
        self._read: dict[tuple[int, int, int, int], list[int]] = {}
        self._owners: dict[int, nn.Module] = {}
        self._before: dict[int, tuple[Any, str, Tensor]] = {}
        self._order = 0.0
        self._grad_order: dict[int, float] = {}
        self._queued = False

    def __enter__(self) -> Self:
        if self._models:
            for model in self._models:
                self._adopt(model)
        else:
            warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
            self._handles.append(register_module_forward_pre_hook(self._discover))
        self._handles.append(register_optimizer_step_pre_hook(self._before_update))
        self._handles.append(register_optimizer_step_post_hook(self._after_update))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def active(self) -> bool:
        """Whether steps are left to record."""
        return self.step < self._steps and bool(self._handles)

    # --- modules ----------------------------------------------------------------------------------------------------

    def _discover(self, module: nn.Module, args: Any) -> None:
        if not (torch.compiler.is_compiling() or not self.active or self.depth or id(module) in self._owners):
            self._adopt(module)
            self._enter(module, args, {})  # torch does not call a hook that was added during the call

    def _adopt(self, root: nn.Module) -> None:
        self._roots.append(root)
        doors = {
            id(m) for layer in root.modules() if isinstance(layer, QuantizedLayer) for m in layer.quantizers.modules()
        }
        for module in root.modules():
            if id(module) not in self._owners and id(module) not in doors:
                self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
            self._owners[id(module)] = module
        for parameter in root.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated))
        if self._nudge is not None:
            names = {module: bare(name) for name, module in root.named_modules()}
            self._nudge.weights(root, lambda m: names[m])

    def _accumulated(self, parameter: Tensor) -> None:
        self._grad_order.setdefault(id(parameter), self._next())
        self._queue()

    def _next(self) -> float:
        self._order += 1
        return self._order

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self.active:
            return None
        recomputes = _in_backward()
        if self._nudge is not None:
            self._nudge.at(*self._place(module))
            of_data = not self.depth and not recomputes
            args, kwargs = self._nudge.data([args, kwargs]) if of_data else self._nudge.entering(module, [args, kwargs])
        self.depth += 1
        call = self._calls.get((id(module), self.step, recomputes), 0)
        if not recomputes:
            for part, x in enumerate(tensors_in([args, kwargs])):
                self._note(module, "", "input", part, call, x)
                self._hook(module, "input gradient", part, call, x)
        return None if self._nudge is None else (args, kwargs)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or not self.active or not self.depth:
            return None
        self.depth -= 1
        recomputes = _in_backward()
        call = self._calls.get((id(module), self.step, recomputes), 0)
        changed = None
        if self._nudge is not None and not any(True for _ in module.children()):
            self._nudge.at(*self._place(module), 1)
            output = changed = self._nudge.data(output)
        self._calls[id(module), self.step, recomputes] = call + 1
        for part, x in enumerate(tensors_in(output)):
            self._note(module, "", "recomputed" if recomputes else "output", part, call, x)
            self._hook(module, "output gradient", part, call, x)
        return changed

    def _place(self, module: nn.Module) -> tuple[int, int]:
        """A forward and its recomputation get the same nudge."""
        number = next((i for i, known in enumerate(self._owners) if known == id(module)), 0)
        return number, self._calls.get((id(module), self.step, _in_backward()), 0)

    def _hook(self, module: nn.Module, kind: str, part: int, call: int, x: Tensor) -> None:
        if not x.requires_grad or not torch.is_grad_enabled():
            return
        last = kind == "output gradient" and self._nudge is not None
        if kind == "input gradient" and self._nudge is None:  # a nudge may give each reader a tensor of its own
            readers = self._read[self.step, id(module), part, call] = self._readers.setdefault(x, [])
            readers.append(id(module))

        def seen(gradient: Tensor) -> Tensor | None:
            self._queue()
            if not self.active:
                return None
            moved = self._nudge.gradient(module, gradient) if last else None
            self._note(module, "", kind, part, call, gradient if moved is None else moved)
            return moved

        x.register_hook(seen)

    # --- the end of a backward, and the optimizer --------------------------------------------------------------------

    def _queue(self) -> None:
        """Asks for a call after those that DDP and FSDP have asked for: only then gradients are whole."""
        if self._queued or not self.active or not _in_backward():
            return
        self._queued = True
        ask: Any = torch.autograd.Variable._execution_engine.queue_callback
        ask(lambda: ask(self._after_backward))

    def _after_backward(self) -> None:
        self._queued = False
        if self.active:
            for module, name, parameter in self._parameters():
                if parameter.grad is not None:
                    order = self._grad_order.get(id(parameter))
                    self._note(module, name, "gradient", 0, 0, parameter.grad, order=order)

    def _parameters(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        seen: set[int] = set()
        for root in self._roots:
            for module in root.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield module, name, parameter

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.active or calls_on(optimizer):
            return
        names: dict[int, tuple[Any, str]] = {id(p): (module, name) for module, name, p in self._parameters()}
        for number, p in enumerate(stepped_by(optimizer)):
            module, name = names.get(id(p), (optimizer, f"parameter {number}"))
            if p.grad is not None:
                self._note(module, name, "clipped gradient", 0, 0, p.grad)
            if id(p) not in self._before:
                if self.step == 0:
                    self._note(module, name, "weight", 0, 0, p, order=-1.0)
                self._before[id(p)] = module, name, _local(p).clone()

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.active or calls_on(optimizer):
            return
        for p in stepped_by(optimizer):
            if id(p) in self._before:
                module, name, before = self._before.pop(id(p))
                moved = _local(p).float() - before.float()
                self._note(module, name, "update", 0, 0, moved, like=p, operation=type(optimizer).__name__)
        if not self._before:
            self._finish_step()
            if self.step == self._steps:
                self._at_end()

    def _finish_step(self) -> None:
        for root in self._roots:
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        self._note(module, name, "buffer", 0, 0, buffer)
        self.step += 1

    # --- what is kept -------------------------------------------------------------------------------------------------

    def _note(
        self, module: Any, name: str, kind: str, part: int, call: int, x: Tensor, *,
        order: float | None = None, like: Tensor | None = None, operation: str = "",
    ) -> None:  # fmt: skip
        key = self.step, id(module), name, kind, part, call
        self._owners.setdefault(id(module), module)
        value = _local(x)
        if value.is_meta or value.layout != torch.strided or value.dtype == torch.bool:
            return
        old = self._entries.get(key)
        self._left -= value.nbytes if old is None else 0
        if old is None and self._left < 0:
            self._lost += 1
            return
        order = (old.order if old else self._next()) if order is None else order
        value = torch.view_as_real(value) if value.is_complex() else value
        copy, shard = value.to("cpu", copy=True).contiguous(), _shard(x if like is None else like)
        how = order, operation or type(module).__name__
        self._entries[key] = TensorSeen(Key(self.step, name, kind, part), copy, *how, shard)

    def recording(self, name: str = "A") -> StepRecording:
        """What was recorded, with modules named by their path in the largest model that holds them."""
        if self.active:
            self._finish_step()
        names: dict[int, str] = {}
        units: dict[str, tuple[float, float]] = {}
        kinds: dict[str, str] = {}
        taken: set[str] = set()
        for root in sorted(self._roots, key=lambda r: -sum(1 for _ in r.modules())):
            prefix = "" if not taken else f"<{type(root).__name__}>"
            while prefix in taken and prefix:
                prefix += "'"
            prefix = "" if id(root) in names else prefix
            taken |= set() if id(root) in names else {prefix}
            for path, module in root.named_modules():
                if id(module) not in names:
                    name_of = names[id(module)] = ".".join(filter(None, (prefix, bare(path))))
                    kinds[name_of] = type(module).__name__
                    if (unit := unit_of(module)) is not None:
                        units[name_of] = unit
        # a wrapper has the path of what it wraps: the inner one counts
        used = {k[1] for k in self._entries}
        inner = {path: owner for owner, path in names.items() if owner in used}
        entries = []
        raw = {(k[0], k[1], k[2]): e for k, e in self._entries.items() if k[3] == "gradient"}
        for (step, owner, local, kind, part, call), entry in self._entries.items():
            whole = raw.get((step, owner, local))
            if owner in names and inner[names[owner]] != owner:
                continue
            if kind == "clipped gradient" and whole is not None and _same(whole.value, entry.value):
                continue
            path = ".".join(filter(None, (names.get(owner, ""), local)))
            readers = self._read.get((step, owner, part, call)) if kind == "input gradient" else None
            beside = None if readers is None else tuple(sorted(_elsewhere(path, {names.get(o, "") for o in readers})))
            entries.append(replace(entry, key=Key(step, path, kind, part), beside=beside))
        entries.sort(key=lambda e: (e.key.step, e.order))
        alone = not (dist.is_available() and dist.is_initialized())
        place = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        return StepRecording(entries, name, *place, units, kinds, lost=self._lost)


def bare(path: str) -> str:
    """A path without the words of wrappers.

    Example:
        >>> bare("_orig_mod.module.layers.0._checkpoint_wrapped_module.fc"), bare("module")
        ('layers.0.fc', '')
    """
    path = _WRAPPERS.sub("", path).lstrip(".")
    while path == "module" or path.startswith("module."):
        path = path[7:]
    return path


def unit_of(module: nn.Module) -> tuple[float, float] | None:
    """Largest relative error of the casts of a layer's forward, and of its gradients; None if it does not cast."""
    call = module.last_call if isinstance(module, QuantizedLayer) else None
    if call is not None and call.recipe is not None:
        found = {}
        for gemm in ("fprop", "dgrad", "wgrad"):
            specs = [s for s in (getattr(call.recipe, gemm).lhs, getattr(call.recipe, gemm).rhs) if s is not None]
            found[gemm] = max((2.0 ** -(s.format.mantissa_bits + 1) for s in specs), default=0.0)
        return (found["fprop"], max(found["dgrad"], found["wgrad"])) if any(found.values()) else None
    if is_torchao(module):
        return (0.25, 0.25) if "NVFP4" in type(module).__name__ else (2.0**-4, 2.0**-3)
    return None


def _elsewhere(path: str, others: set[str]) -> set[str]:
    """Modules that neither hold a module nor lie in it."""
    return {o for o in others if o and path and not f"{o}.".startswith(f"{path}.") and not path.startswith(f"{o}.")}


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _local(x: Tensor) -> Tensor:
    """The numbers that this rank holds."""
    x = x.detach()
    if isinstance(x, DTensor):
        x = x.to_local()
        x = x.wait() if hasattr(x, "wait") else x
    if type(x) not in (Tensor, nn.Parameter):
        x = x.dequantize() if hasattr(x, "dequantize") else x.float()
    return x


def _shard(x: Tensor) -> Shard | None:
    if not isinstance(x, DTensor):
        return None
    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return Shard(tuple(x.shape), tuple(offset), any(p.is_partial() for p in x.placements))
