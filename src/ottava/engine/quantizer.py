"""The only door between high precision and FP8.

A Linear owns three: input, weight and grad_output. Each takes a matrix and gives the operand of x and the operand of
x.T, as the recipe's cells ask. Code that watches or changes casts wraps this door. The door's buffers hold all state of
predicted scales, so state_dict, .to(), deepcopy and sharding find it. There is no global manager, so nothing can leak
between models (TransformerEngine #814). `state` decides when the state changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ottava.kernels.gate import PLAIN, constant_in_graph, is_plain
from ottava.kernels.native.pointwise import checksum
from ottava.kernels.triton.quantize import UnmadeRows
from ottava.numerics.formats import FORMATS
from ottava.numerics.scaling import PER_TENSOR, amax, read_scales
from ottava.numerics.tensor import Beside, Both, Operand, QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import CastPlan, cast_both, refuse_unmade
from ottava.recipe import ATTENTION_TENSORS, TENSORS, Recipe
from ottava.weights.operands import weight_operands
from ottava.weights.parameter import QuantizedWeight

_FRESH = MappingProxyType(
    {"cached": None, "graph": None, "_steps": 0, "_uses": 0, "_reused": False, "_frozen_in": False}
)
_BUFFERS = ("amax_history", "scale", "nonfinite_count", "guard_count")

Notes = list[tuple["Quantizer", Tensor]]
"""What casts have seen: each with its door and fp32 (3,), as `Quantizer.staged`."""
Record = bool | Notes
"""True: a cast stages its amax at once. A list: it appends it, and the caller stages it later. False: no trace."""


class Quantizer(nn.Module):
    """Casts one tensor of one layer for both of its GEMMs; holds the amax history if its scale is predicted.

    `prepare` makes these buffers for a predicted spec. Between two updates nothing writes to them:
        amax_history      fp32 (amax_history_len,), newest first; entries not yet filled are 0
        scale             fp32 (): the factor of the next cast; 0 = no history yet, take the current scale
        nonfinite_count   int64 (): steps with an amax of inf or nan, which never enters the history
        guard_count       int64 (): steps in which the guard fired
    The amaxes since the last update. A plain tensor, because DDP would overwrite a buffer with that of rank 0:
        staged            fp32 (3,): largest finite amax | 1 if one was not finite | 1 if the guard fired
    All of them stay fp32 and int64 if the model is cast to another dtype.
    """

    spec: QuantizationSpec | None
    amax_history: Tensor
    scale: Tensor
    nonfinite_count: Tensor
    guard_count: Tensor
    staged: Tensor

    cast: Callable[..., Both] = staticmethod(cast_both)
    """Runs the casts; `ops.agreed.AgreedCast` if ranks hold parts of the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = None  # the predicted spec of the buffers
        self.plans: dict[Any, CastPlan] = {}
        """A plan for each kind of tensor that this door has cast."""
        self.pack: object | None = None
        """The pack (see `windows`) whose views the buffers are; None: the door has buffers of its own."""

    def forward(
        self,
        x: Tensor | UnmadeRows,
        row_spec: QuantizationSpec | None,
        col_spec: QuantizationSpec | None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        record: Record = True,
        beside: Beside = (None, None),
    ) -> tuple[Operand | None, Operand | None]:
        """x (R, C) -> (operand of x, operand of x.T); None for an operand without a cell.

        It takes unmade rows only if `refuse_unmade` returns None.

        record: where this tensor's amax goes; False in evaluation, which leaves no trace.
        beside: the operands that x and x.T meet, where those were cast before; transforms agree with them.

        A spec of None passes x through. If x and x.T share their scales (per tensor, square blocks), one cast serves
        both. Otherwise the door casts x.T from high precision.
        """
        cast_row, cast_col = row_spec if rowwise else None, col_spec if columnwise else None
        row: Operand | None = None
        col: Operand | None = None
        spec = cast_row or cast_col
        if spec is not None and spec.scaling == "current" and (cast_col is None or cast_col.scaling == "current"):
            row, col, _ = self.cast(x, cast_row, cast_col, plans=self.plans, beside=beside)
        # two cells with scales of their own are two casts: one history cannot predict both
        elif cast_row is not None and cast_col is not None and cast_row is not cast_col and cast_row != cast_col:
            row, col = self._predict(x, cast_row, None, record)[0], self._predict(x, None, cast_col, record)[1]
        elif spec is not None:
            row, col = self._predict(x, cast_row, cast_col, record)
        if isinstance(x, Tensor):
            row = x if rowwise and row_spec is None else row
            col = x.t() if columnwise and col_spec is None else col  # a view: high precision needs no copy
        return row, col

    @property
    def hooked(self) -> bool:
        """Whether a hook watches what this door casts."""
        own = self._forward_hooks or self._forward_pre_hooks
        return bool(own or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)

    def refuse_unmade(self, rows: UnmadeRows, *specs: QuantizationSpec | None) -> str | None:
        """Why this door needs made rows; None if a kernel may make them while it casts."""
        if self.hooked:
            return "a hook watches the door"
        if self.cast is not cast_both:
            return "ranks agree on a scale first"
        return refuse_unmade(rows, *specs)

    def _predict(
        self,
        x: Tensor | UnmadeRows,
        row_spec: QuantizationSpec | None,
        col_spec: QuantizationSpec | None,
        record: Record,
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """Casts with the predicted scale, or the current one if the spec predicts none, and records the amax."""
        spec = row_spec or col_spec
        assert spec is not None
        if spec.scaling == "current":
            row, col, _ = self.cast(x, row_spec, col_spec, plans=self.plans)
            return row, col
        # evaluation may ask for a spec that this door has no buffers for, and must make none
        scale = self.scale_for(spec, x.device, record is not False)
        staged = self.staged if record is True else None
        # the caller stages it after its backward: until then it must not touch the door's memory
        if isinstance(record, list) and not torch.compiler.is_compiling():
            staged = scale.new_zeros(4)  # a kernel may raise it, and a GPU's needs the fourth
        row, col, amax = self.cast(x, row_spec, col_spec, scale=scale, staged=staged, plans=self.plans)
        one = row or col
        if amax is not None and one is not None:  # no kernel has raised it
            self._see(amax, one.scale_inv, record)
        elif isinstance(record, list) and staged is not None:
            record.append((self, staged[:3]))
        return row, col

    def scale_for(self, spec: QuantizationSpec, device: torch.device, record: bool) -> Tensor:
        """The factor of a cast; a recorded cast makes the buffers that it needs."""
        if self.spec is spec or self.spec == spec:  # mostly the same object, whose fields Python need not compare
            return self.scale
        if not record:
            return self._scale_under(spec, device)
        self.prepare(spec, device)
        return self.scale

    def _see(self, seen: Tensor, scale_inv: Tensor, record: Record) -> None:
        if record is not False:
            used = scale_inv.reshape(())
            # a guarded cast fires where it uses another scale than the predicted one
            self._note(seen.reshape(()), (self.scale > 0) & (used != self.scale.reciprocal()), record)

    def calibrated(self, x: Tensor, spec: QuantizationSpec) -> Notes:
        """Notes the amax of a tensor without a cast."""
        if self.spec != spec:
            self.prepare(spec, x.device)
        notes: Notes = []
        seen = amax(x.detach().reshape(-1, x.shape[-1])).reshape(())
        self._note(seen, torch.zeros_like(seen), notes)
        return notes

    def _note(self, seen: Tensor, fired: Tensor, record: Record) -> None:
        finite = seen.isfinite()
        # an amax that is not finite never enters a history: it is counted (decision 4)
        now = torch.stack([torch.where(finite, seen, 0.0), (~finite).to(torch.float32), fired.to(torch.float32)])
        if isinstance(record, list):
            record.append((self, now))
        else:
            self.stage(now)

    def stage(self, seen: Tensor) -> None:
        """Raises the staged values; seen: fp32 (3,)."""
        self.staged.copy_(torch.maximum(self.staged, seen))  # micro-batches share a boundary: the largest counts

    def prepare(self, spec: QuantizationSpec, device: torch.device | None = None) -> None:
        """Makes the buffers of a predicted spec; keeps as much of an earlier spec's history as fits."""
        old, self.pack = self.spec, None
        if old is None:
            self.register_buffer("amax_history", torch.zeros(spec.amax_history_len, dtype=torch.float32, device=device))
            self.register_buffer("scale", _first_scale(spec, device))
            for name in ("nonfinite_count", "guard_count"):
                self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=device))
            # no buffer: DistributedDataParallel would send rank 0's over it in every forward
            self.staged = torch.zeros(3, dtype=torch.float32, device=device)
            self.spec = spec
            return
        self.spec = spec
        if old.amax_history_len != spec.amax_history_len:
            # newest first, so what is cut off or filled up is the oldest
            kept = min(old.amax_history_len, spec.amax_history_len)
            self.amax_history = _resized(self.amax_history, spec.amax_history_len)
            warnings.warn(
                f"amax_history_len changed from {old.amax_history_len} to {spec.amax_history_len}: the newest {kept} "
                "entries of each history are kept",
                stacklevel=2,
            )
        self.scale = self._scale_under(spec)

    def drop(self) -> None:
        """Deletes all state and the buffers; for a layer whose new recipe keeps no state."""
        if self.spec is not None:
            for name in (*_BUFFERS, "staged"):
                delattr(self, name)
        self.spec = self.pack = None

    def reset(self) -> None:
        """Empties the history in place; the door starts again from the current scale."""
        if self.spec is not None:
            for name in (*_BUFFERS, "staged"):
                getattr(self, name).zero_()
            if not self.spec.bootstrap:
                self.scale.fill_(1.0)  # TransformerEngine's start

    def _scale_under(self, spec: QuantizationSpec, device: torch.device | None = None) -> Tensor:
        """The scale that a spec derives from the history; evaluation asks for specs of other recipes, too."""
        empty = 0.0 if spec.bootstrap else 1.0
        if self.spec is None:
            return _first_scale(spec, device)
        history = _resized(self.amax_history, spec.amax_history_len)
        scale, usable = spec.from_window(history, self.scale)
        return torch.where(usable, scale, empty)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves with the model but keeps dtypes and numbers: neither `bfloat16` nor `to_empty` may change scales."""
        buffers = {name: getattr(self, name) for name in (*_BUFFERS, "staged")} if self.spec is not None else {}
        self.pack = None
        for name, tensor in buffers.items():
            device = fn(tensor).device
            # meta tensors have no numbers to move; `reset` fills them below
            setattr(self, name, torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
        if any(tensor.is_meta for tensor in buffers.values()):
            self.reset()  # to_empty leaves the memory of such tensors as it was
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Copies that own their memory: the buffers may be views of one memory, which safetensors takes for one tensor.

        With the amaxes of an open accumulation, so that a checkpoint between two micro-batches loses none.
        """
        for name in (*_BUFFERS, "staged") if self.spec is not None else ():
            destination[prefix + name] = getattr(self, name).clone()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Loads the state; a checkpoint without any (BF16) changes nothing, one with a part of it is an error."""
        names = (*_BUFFERS, "staged")
        here = {name: prefix + name for name in names if prefix + name in state_dict}
        if strict:
            unexpected.extend(key for key in state_dict if key.startswith(prefix) and key not in here.values())
        if not here:
            return
        if self.spec is None:  # an FP8 checkpoint, and a recipe that keeps no state
            return
        if lacking := [prefix + name for name in _BUFFERS if name not in here]:
            missing.extend(lacking)
            return
        # checked before anything is copied: half of a state is none
        loaded = {name: state_dict[key] for name, key in here.items()}
        if reason := _invalid(loaded, self.spec):
            errors.append(f"{prefix.removesuffix('.')}: {reason}")
            return
        with torch.no_grad():
            for name, tensor in loaded.items():
                buffer = getattr(self, name)
                # a copy into no memory would be lost
                if buffer.is_meta and metadata.get("assign_to_params_buffers", False):
                    self.pack = None
                    setattr(self, name, tensor.to(buffer.dtype, copy=True))
                else:
                    buffer.copy_(tensor)
            if self.staged.is_meta:
                self.staged = torch.zeros_like(self.staged, device=self.scale.device)
            if "staged" not in loaded:  # an older checkpoint
                self.staged.zero_()
            # the checkpoint may have another format or margin: its history is still true, its scale is not
            scale = self._scale_under(self.spec)
            self.scale.copy_(torch.where(self.amax_history.any(), scale, self.scale))

    def __getstate__(self) -> dict[str, Any]:
        # pickle would copy the whole pack for each view of it, so a copied door gets buffers of its own
        buffers = {name: None if buffer is None else buffer.clone() for name, buffer in self._buffers.items()}
        state = {**self.__dict__, "_buffers": buffers, "pack": None, "plans": {}}
        return state | ({"staged": self.staged.clone()} if self.spec is not None else {})

    def extra_repr(self) -> str:
        """The predicted spec, if any."""
        return str(self.spec) if self.spec else ""


def _first_scale(spec: QuantizationSpec, device: torch.device | None) -> Tensor:
    """fp32 (), whatever torch's default dtype: 0 takes the current scale, 1 is TransformerEngine's start."""
    return torch.full((), 0.0 if spec.bootstrap else 1.0, dtype=torch.float32, device=device)


def _invalid(loaded: dict[str, Any], spec: QuantizationSpec) -> str | None:
    """Why tensors from a checkpoint are not the state of such a door; None if they are."""
    shapes = {"amax_history": (spec.amax_history_len,), "staged": (3,)}
    for name, tensor in loaded.items():
        shape = shapes.get(name, ())
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            hint = "; convert with that amax_history_len first" if name == "amax_history" else ""
            return f"{name} has shape {got}, needs {shape}{hint}"
        if tensor.is_meta:
            continue
        if not bool(tensor.isfinite().all()) or bool((tensor < 0).any()):
            return f"{name} holds negative or non-finite entries: the checkpoint is damaged"
    return None


def _resized(history: Tensor, length: int) -> Tensor:
    """The newest entries of a window, newest first; (length,), padded with 0."""
    return nn.functional.pad(history[:length], (0, length - min(length, history.shape[0])))


class WeightQuantizer(Quantizer):
    """The door of a weight. It casts the weight once and keeps the cast until the weight changes, so micro-batches and
    recomputation reuse it.

    On a CPU the door sees a change by the tensor's version, its address, and a checksum of its bits, which also notices
    `.data` writes and all-gathers of a sharded weight. On an accelerator the host would wait for a checksum. There the
    door keeps a cast only between two steps of a torch optimizer that holds the weight, while version and address stay;
    only for training forwards (evaluation may swap in averaged weights through `.data`); and only if the step before
    used the cast more than once, because kept codes take memory. There it cannot see a `.data` write between two
    micro-batches of one step; after such a write call `ScalingState.update`.

    The door keeps no cast inside torch.compile, with stochastic rounding or a transform, or while a hook watches it. In
    a CUDA graph it keeps one only for `graphed_step`, which casts anew at every replay; another graph would freeze it.
    """

    cached: tuple[Any, Tensor | None, Operand | None, Operand | None] | None
    """The identity of the cast weight; what its cast has seen (see `Notes`); the operands of w and of w.T."""
    graph: object | None
    """The CUDA graph that `graphed_step` is capturing."""
    _steps: int
    _uses: int  # training forwards since the last step
    _reused: bool
    _frozen_in: bool

    def __init__(self) -> None:
        super().__init__()
        vars(self).update(_FRESH)

    def stepped(self) -> None:
        """`ScalingState` calls this after each step of an optimizer that holds this weight."""
        if self._uses:  # two states of one model may both call it
            self._reused, self._uses = self._uses > 1, 0
        self._steps += 1
        if self.cached is not None and any(o is not None and o.device.type != "cpu" for o in self.cached[2:]):
            self.cached = None  # out of date, and memory

    def forward(  # type: ignore[override]  # a weight is there
        self,
        x: Tensor,
        row_spec: QuantizationSpec | None,
        col_spec: QuantizationSpec | None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        record: Record = True,
        beside: Beside = (None, None),
    ) -> tuple[Operand | None, Operand | None]:
        """As `Quantizer.forward`; for a weight in FP8 it returns the stored codes, without a cast."""
        recorded = record is not False
        if isinstance(x, QuantizedWeight):
            lent = x.lent
            if lent is not None and lent.amax is not None and self.spec is not None:
                self._see(lent.amax, x.scale_inv, record)
            elif recorded and self.spec is not None:  # a later BF16 weight finds a history
                seen_amax = read_scales(x.scales).amax() * _largest(self.spec.format.name)
                self._note(seen_amax, torch.zeros_like(seen_amax), record)
            if lent is not None:  # a forward without gradients, and saved tensors that a hook takes, are run again
                lent.again = not recorded or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
            return weight_operands(x, row_spec, col_spec, rowwise=rowwise, columnwise=columnwise)
        kept = (
            not torch.compiler.is_compiling()
            # a kept high-precision operand would keep the weight itself alive
            and (row_spec is not None and row_spec.repeatable)
            and (col_spec is not None and col_spec.repeatable)
            and not (self._forward_hooks or self._forward_pre_hooks)  # a hook must see each cast
            and self.cast is cast_both  # ranks that agree on scales must all cast, or none
            and type(x) in PLAIN
            and not (x.is_neg() or x.is_meta)
        )
        on_cpu = not _on_accelerator(x)
        if not kept or not (on_cpu or (is_plain(x) and self._reusable(x, recorded))):
            return super().forward(
                x, row_spec, col_spec, rowwise=rowwise, columnwise=columnwise, record=record, beside=beside
            )
        assert row_spec is not None  # `kept` says so
        # bits on a CPU, promises on an accelerator: a checksum there would have to be read back
        witness = checksum(x) if on_cpu else self._steps
        scale = None if self.spec is None else _identity(self.scale)
        version = 0 if x.is_inference() else x._version
        # all that the cast depends on; a changed recipe, or a moved scale, is another key
        key = (x.data_ptr(), version, x.dtype, witness, row_spec, col_spec, self.spec, scale)
        seen, row, col = None, None, None
        if self.cached is not None and self.cached[0] == key:
            _, seen, row, col = self.cached
            if recorded and seen is None and any(spec is not None and spec.predicted for spec in (row_spec, col_spec)):
                row = col = None  # evaluation made the casts, and noted no amax
        wants_row, wants_col = rowwise and row is None, columnwise and col is None
        one_cast = row_spec.granularity.transposes and row_spec == col_spec
        if wants_col and one_cast and on_cpu and isinstance(row, QuantizedTensor):
            col, wants_col = row.t(), False  # only on a CPU: an accelerator's GEMMs read the codes of x.T by rows
            self.cached = (key, seen, row, col)
        if wants_row or wants_col:
            notes: Notes = []
            own: Record = notes if recorded else False
            # tensors made in inference mode can never be saved for a backward, and this cast may be
            with torch.inference_mode(False), torch.no_grad():  # a later training step may save the kept cast
                both = super().forward(x, row_spec, col_spec, rowwise=wants_row, columnwise=wants_col, record=own)
            row, col = both[0] if wants_row else row, both[1] if wants_col else col
            if row_spec.granularity is not PER_TENSOR:
                row, col = _without_amaxes(row), _without_amaxes(col)
            for _, now in notes:  # two if x and x.T have scales of their own
                seen = now if seen is None else torch.maximum(seen, now)
            self.cached = (key, seen, row, col)
        if seen is not None and isinstance(record, list):  # for each use: one of them may belong to no training step
            record.append((self, seen))
        elif seen is not None and record:
            self.stage(seen)
        # a kept operand that this call did not ask for stays in the cache only
        return row if rowwise else None, col if columnwise else None

    def _reusable(self, x: Tensor, record: bool) -> bool:
        """Whether the door may keep a cast on an accelerator, or use a kept one."""
        self._uses += record  # evaluation does not say whether a step will cast more than once
        if _capturing(x) and self.graph is None:
            self._frozen_in = True  # a user's graph: its replays may change the weight unnoticed
        return record and self._reused and not self._frozen_in

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **_FRESH}


# with dynamic=True Dynamo makes a float that it reads off an object an input of the graph, and fails at the second
@constant_in_graph
def _largest(name: str) -> float:
    return FORMATS[name].max


def _without_amaxes(operand: Operand | None) -> Operand | None:
    """Drops amaxes of blocks: no code asks for them later."""
    if not isinstance(operand, QuantizedTensor) or operand.amax is None or operand.amax.numel() == 1:
        return operand
    return QuantizedTensor(operand.data, operand.scale_inv, operand.spec, operand.dtype)


def _on_accelerator(x: Tensor) -> bool:
    return not x.is_cpu


def _capturing(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _identity(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), 0 if x.is_inference() else x._version


def stage(notes: Notes) -> None:
    """Raises the staged values of doors, in few launches."""
    while notes:
        first: dict[int, tuple[Tensor, Tensor]] = {}  # a door once a round: the tensors of a launch must not overlap
        later: Notes = []
        for door, seen in notes:
            if door.spec is not None:
                if id(door) in first:
                    later.append((door, seen))
                else:
                    first[id(door)] = door.staged, seen
        if first:
            staged, raised = zip(*first.values(), strict=True)
            # one launch for all doors of a backward, not one for each
            torch._foreach_maximum_(list(staged), list(raised))
        notes = later


class Doors(nn.Module):
    """The doors of a layer, each under the name of its tensor. Watches look for this class."""


class AttentionQuantizers(Doors):
    """The doors of FP8 attention: qkv, s, o; do, dp, dqkv. `nn.fp8_attention.move_histories` moves predicted scales."""

    def __init__(self) -> None:
        super().__init__()
        for tensor in ATTENTION_TENSORS:
            self.add_module(tensor, Quantizer())


class LinearQuantizers(Doors):
    """The three doors of a Linear: input, weight, grad_output."""

    def __init__(self) -> None:
        super().__init__()
        self.input = Quantizer()
        self.weight = WeightQuantizer()
        self.grad_output = Quantizer()
        self._ready: tuple[Any, ...] = ()

    @property
    def doors(self) -> tuple[Quantizer, Quantizer, Quantizer]:
        """input, weight, grad_output."""
        modules: dict[str, Any] = self._modules  # past nn.Module.__getattr__: a boundary asks a thousand doors
        return modules["input"], modules["weight"], modules["grad_output"]

    def prepare(self, recipe: Recipe, device: torch.device | None = None) -> None:
        """Makes the buffers that a resolved recipe needs, and drops the others."""
        for door, spec in self.predicted(recipe):
            if spec is None:
                door.drop()
            elif door.spec != spec:
                door.prepare(spec, device)

    def ready(self, recipe: Recipe) -> bool:
        """Whether the doors have the buffers that a resolved recipe needs; quick if nothing has changed."""
        if torch.compiler.is_compiling():  # Dynamo would guard on `_ready`
            return self._prepared_for(recipe)
        doors: dict[str, Any] = self._modules
        # four objects that are mostly the same as last time: identity answers before equality has to
        seen = recipe, doors["input"].spec, doors["weight"].spec, doors["grad_output"].spec
        if self._ready == seen:  # mostly the same objects, whose fields Python need not compare
            return True
        if ready := self._prepared_for(recipe):
            self._ready = seen
        return ready

    def _prepared_for(self, recipe: Recipe) -> bool:
        return all(spec is None or door.spec == spec for door, spec in self.predicted(recipe))

    def predicted(self, recipe: Recipe) -> list[tuple[Quantizer, QuantizationSpec | None]]:
        """Each door with the predicted spec that a resolved recipe gives it, or None."""
        return [
            (door, next((spec for spec in recipe.cells(tensor) if spec is not None and spec.predicted), None))
            for tensor, door in zip(TENSORS, self.doors, strict=True)
        ]
