"""The one door between high precision and FP8.

A Linear owns three: input, weight and grad_output. Each takes a matrix and gives the operand of x and the operand of
x.T, as the recipe's cells ask. Whatever watches or changes casting wraps this door; all state of predicted scales
lives here, where state_dict, .to(), deepcopy and sharding find it. There is no global manager: nothing can leak between
models (TransformerEngine #814). When the state moves on is decided in `state`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ottava.attention_recipe import ATTENTION_TENSORS
from ottava.casts import Both, CastPlan, cast_both
from ottava.kernels.gate import PLAIN, is_plain
from ottava.kernels.native.sums import checksum
from ottava.quantized_tensor import Operand, QuantizationSpec, QuantizedTensor
from ottava.recipe import TENSORS, Recipe
from ottava.scaling import PER_TENSOR, amax

_FRESH = MappingProxyType(
    {"cached": None, "graph": None, "_steps": 0, "_uses": 0, "_reused": False, "_frozen_in": False}
)
_BUFFERS = ("amax_history", "scale", "nonfinite_count", "guard_count")


class Quantizer(nn.Module):
    """Casts one tensor of one layer for both of its GEMMs; holds the amax history where its scale is predicted.

    Buffers, there once a predicted spec was prepared; between two updates nothing writes to them:
        amax_history      fp32 (amax_history_len,), newest first; entries not yet filled are 0
        scale             fp32 (): what the next cast multiplies with; 0 = no history yet, take the current scale
        nonfinite_count   int64 (): steps with an amax of inf or nan; those never enter the history
        guard_count       int64 (): steps in which the guard fired
    Since the last update, a plain tensor and no buffer, so that DDP does not overwrite one rank's with another's:
        staged            fp32 (3,): largest finite amax | 1 if one was not finite | 1 if the guard fired
    All of them stay fp32 and int64 whatever dtype the model is cast to.
    """

    spec: QuantizationSpec | None
    amax_history: Tensor
    scale: Tensor
    nonfinite_count: Tensor
    guard_count: Tensor
    staged: Tensor

    cast: Callable[..., Both] = staticmethod(cast_both)
    """What casts; `agreement.AgreedCast` where the matrix is split over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = None  # the predicted spec that the buffers belong to
        self.plans: dict[Any, CastPlan] = {}
        """How tensors that came are cast."""
        self.pack: object | None = None
        """Whose views the buffers are, see `state`; None once they have been replaced."""

    def forward(
        self,
        x: Tensor,
        row_spec: QuantizationSpec | None,
        col_spec: QuantizationSpec | None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        record: bool = True,
    ) -> tuple[Operand | None, Operand | None]:
        """x (R, C) -> (operand of x, operand of x.T); None for one that is not wanted.

        record: let the history see this tensor's amax; False in evaluation, which leaves no trace.

        A spec of None passes x through. Where x and x.T share their scales (per tensor, square blocks) one cast serves
        both; else x.T is cast from high precision.
        """
        cast_row, cast_col = row_spec if rowwise else None, col_spec if columnwise else None
        row: Operand | None = None
        col: Operand | None = None
        spec = cast_row or cast_col
        if spec is not None and spec.scaling == "current" and (cast_col is None or cast_col.scaling == "current"):
            row, col, _ = self.cast(x, cast_row, cast_col, plans=self.plans)
        elif cast_row is not None and cast_col is not None and cast_row != cast_col:  # each with a scale of its own
            row, col = self._predict(x, cast_row, None, record)[0], self._predict(x, None, cast_col, record)[1]
        elif spec is not None:
            row, col = self._predict(x, cast_row, cast_col, record)
        if rowwise and row_spec is None:
            row = x
        if columnwise and col_spec is None:
            col = x.t()
        return row, col

    def _predict(
        self, x: Tensor, row_spec: QuantizationSpec | None, col_spec: QuantizationSpec | None, record: bool
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """Casts with the predicted scale, if the spec has one, and stages the amax."""
        spec = row_spec or col_spec
        assert spec is not None
        if spec.scaling == "current":
            row, col, _ = self.cast(x, row_spec, col_spec, plans=self.plans)
            return row, col
        scale = self._scale_for(spec, x.device, record)
        staged = self.staged if record else None
        row, col, amax = self.cast(x, row_spec, col_spec, scale=scale, staged=staged, plans=self.plans)
        one = row or col
        if record and amax is not None and one is not None:  # no kernel has noted it
            self._see(amax, one.scale_inv)
        return row, col

    def _scale_for(self, spec: QuantizationSpec, device: torch.device, record: bool) -> Tensor:
        """What a cast multiplies with; a recorded one makes the buffers it needs."""
        if self.spec != spec and not record:
            return self._scale_under(spec, device)
        if self.spec != spec:
            self.prepare(spec, device)
        return self.scale

    def _see(self, seen: Tensor, scale_inv: Tensor) -> None:
        used = scale_inv.reshape(())
        self._stage(seen.reshape(()), (self.scale > 0) & (used != self.scale.reciprocal()))

    def calibrate(self, x: Tensor, spec: QuantizationSpec) -> None:
        """Stages the amax of a tensor that is not cast."""
        if self.spec != spec:
            self.prepare(spec, x.device)
        seen = amax(x.detach().reshape(-1, x.shape[-1])).reshape(())
        self._stage(seen, torch.zeros_like(seen))

    def _stage(self, seen: Tensor, fired: Tensor) -> None:
        finite = seen.isfinite()
        now = torch.stack([torch.where(finite, seen, 0.0), (~finite).to(torch.float32), fired.to(torch.float32)])
        self.staged.copy_(torch.maximum(self.staged, now))

    def prepare(self, spec: QuantizationSpec, device: torch.device | None = None) -> None:
        """Makes the buffers of a predicted spec; an earlier spec's history is kept as far as it fits."""
        old, self.pack = self.spec, None
        if old is None:
            self.register_buffer("amax_history", torch.zeros(spec.amax_history_len, dtype=torch.float32, device=device))
            self.register_buffer("scale", _first_scale(spec, device))
            for name in ("nonfinite_count", "guard_count"):
                self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=device))
            self.staged = torch.zeros(3, dtype=torch.float32, device=device)
            self.spec = spec
            return
        self.spec = spec
        if old.amax_history_len != spec.amax_history_len:
            kept = min(old.amax_history_len, spec.amax_history_len)
            self.amax_history = _resized(self.amax_history, spec.amax_history_len)
            warnings.warn(
                f"amax_history_len changed from {old.amax_history_len} to {spec.amax_history_len}: the newest {kept} "
                "entries of each history are kept",
                stacklevel=2,
            )
        self.scale = self._scale_under(spec)

    def drop(self) -> None:
        """Forgets all state, buffers included; for a layer that changes to a recipe that keeps none."""
        if self.spec is not None:
            for name in (*_BUFFERS, "staged"):
                delattr(self, name)
        self.spec = self.pack = None

    def reset(self) -> None:
        """Empties the history in place; the door stays live and starts again from the current scale."""
        if self.spec is not None:
            for name in (*_BUFFERS, "staged"):
                getattr(self, name).zero_()
            if not self.spec.bootstrap:
                self.scale.fill_(1.0)

    def _scale_under(self, spec: QuantizationSpec, device: torch.device | None = None) -> Tensor:
        """What the history says under a spec, which need not be the door's own: evaluation only reads."""
        empty = 0.0 if spec.bootstrap else 1.0
        if self.spec is None:
            return _first_scale(spec, device)
        history = _resized(self.amax_history, spec.amax_history_len)
        scale, usable = spec.from_window(history)
        return torch.where(usable, scale, empty)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves with the model but keeps dtypes and numbers: neither `bfloat16` nor `to_empty` is meant for scales."""
        own = {name: getattr(self, name) for name in (*_BUFFERS, "staged")} if self.spec is not None else {}
        self.pack = None
        for name, tensor in own.items():
            device = fn(tensor).device
            setattr(self, name, torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
        if any(tensor.is_meta for tensor in own.values()):
            self.reset()  # to_empty gives a tensor that was on meta whatever memory there is
        return self

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
        """Loads its state; a checkpoint without any (BF16) leaves the door as it is, one with some of it is refused."""
        here = {name: prefix + name for name in _BUFFERS if prefix + name in state_dict}
        if strict:
            unexpected.extend(key for key in state_dict if key.startswith(prefix) and key not in here.values())
        if not here:
            return
        if self.spec is None:  # an FP8 checkpoint in a model whose recipe keeps no state: nothing to put it into
            return
        if len(here) != len(_BUFFERS):
            missing.extend(prefix + name for name in _BUFFERS if name not in here)
            return
        loaded = {name: state_dict[key] for name, key in here.items()}
        if reason := _invalid(loaded, self.spec):
            errors.append(f"{prefix.removesuffix('.')}: {reason}")
            return
        with torch.no_grad():
            for name, tensor in loaded.items():
                own = getattr(self, name)
                if own.is_meta and metadata.get("assign_to_params_buffers", False):
                    self.pack = None
                    setattr(self, name, tensor.to(own.dtype, copy=True))
                else:
                    own.copy_(tensor)
            if self.staged.is_meta:
                self.staged = torch.zeros_like(self.staged, device=self.scale.device)
            self.staged.zero_()
            # written under another format or margin: the history still holds, its scale does not
            scale = self._scale_under(self.spec)
            self.scale.copy_(torch.where(self.amax_history.any(), scale, self.scale))

    def __getstate__(self) -> dict[str, Any]:
        # a copy has buffers of its own: views of the pack would take all of it along, once for each door
        own = {name: None if buffer is None else buffer.clone() for name, buffer in self._buffers.items()}
        state = {**self.__dict__, "_buffers": own, "pack": None, "plans": {}}
        return state | ({"staged": self.staged.clone()} if self.spec is not None else {})

    def extra_repr(self) -> str:
        """The predicted spec, if any."""
        return str(self.spec) if self.spec else ""


def _first_scale(spec: QuantizationSpec, device: torch.device | None) -> Tensor:
    """fp32 (), whatever torch's default dtype: 0 takes the current scale, 1 is TransformerEngine's start."""
    return torch.full((), 0.0 if spec.bootstrap else 1.0, dtype=torch.float32, device=device)


def _invalid(loaded: dict[str, Any], spec: QuantizationSpec) -> str | None:
    """Why tensors from a checkpoint are not the state of such a door; None if they are."""
    shapes = {"amax_history": (spec.amax_history_len,)}
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
    """The newest entries of a window, newest first; (length,), 0 where there are none."""
    return nn.functional.pad(history[:length], (0, length - min(length, history.shape[0])))


class WeightQuantizer(Quantizer):
    """The door of a weight, which is cast once between two changes of it: micro-batches and recomputation find it done.

    On a CPU a change is noticed by the tensor's version, its address, and a checksum of its bits, which also sees
    `.data` writes and what an all-gather of a sharded weight brought. Reading a checksum back from an accelerator would
    make the host wait, so there a cast is kept more carefully: from one step of a torch optimizer that holds the weight
    to the next, while version and address stay; for training forwards only (evaluation may swap in averaged weights
    through `.data`); and only if the step before used it more than once, since codes that are kept take memory. What it
    cannot see there is a `.data` write between two micro-batches of one step: `ScalingState.update` makes it forget.

    Never inside torch.compile, with stochastic rounding or while someone watches the door; and not in a CUDA graph,
    where a kept cast would be frozen in, but in that of `graphed_step`, which casts anew at every replay.
    """

    cached: tuple[Any, bool, Operand | None, Operand | None] | None
    """What the operands were made from and whether a history saw it; the operands of the weight and its transpose."""
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
        """Told after each step of an optimizer that holds this weight."""
        if self._uses:  # two states of one model may both tell
            self._reused, self._uses = self._uses > 1, 0
        self._steps += 1
        if self.cached is not None and any(o is not None and o.device.type != "cpu" for o in self.cached[2:]):
            self.cached = None  # out of date, and memory

    def forward(
        self,
        x: Tensor,
        row_spec: QuantizationSpec | None,
        col_spec: QuantizationSpec | None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        record: bool = True,
    ) -> tuple[Operand | None, Operand | None]:
        """As `Quantizer.forward`."""
        kept = (
            not torch.compiler.is_compiling()
            # a high-precision operand would keep the weight itself alive
            and (row_spec is not None and row_spec.rounding == "nearest_even")
            and (col_spec is not None and col_spec.rounding == "nearest_even")
            and not (self._forward_hooks or self._forward_pre_hooks)  # a hook wants to see each cast
            and self.cast is cast_both  # ranks that agree on scales must all cast, or none
            and type(x) in PLAIN
            and not x.is_neg()
        )
        on_cpu = x.is_cpu
        if not kept or not (on_cpu or (is_plain(x) and self._reusable(x, record))):
            return super().forward(x, row_spec, col_spec, rowwise=rowwise, columnwise=columnwise, record=record)
        assert row_spec is not None  # or it were not kept
        witness = checksum(x) if on_cpu else self._steps
        scale = None if self.spec is None else _identity(self.scale)
        version = 0 if x.is_inference() else x._version
        key = (x.data_ptr(), version, x.dtype, witness, row_spec, col_spec, self.spec, scale)
        seen, row, col = False, None, None
        if self.cached is not None and self.cached[0] == key:
            _, seen, row, col = self.cached
            if record and not seen and self._predicts(row_spec, col_spec):
                row = col = None  # made in evaluation: no history has seen this weight yet
        wants_row, wants_col = rowwise and row is None, columnwise and col is None
        one_cast = row_spec.granularity.transposes and row_spec == col_spec
        if wants_col and one_cast and on_cpu and isinstance(row, QuantizedTensor):
            col, wants_col = row.t(), False  # an accelerator's GEMMs want the codes of x.T row by row
            self.cached = (key, seen, row, col)
        if wants_row or wants_col:
            both = super().forward(x, row_spec, col_spec, rowwise=wants_row, columnwise=wants_col, record=record)
            row, col = both[0] if wants_row else row, both[1] if wants_col else col
            if row_spec.granularity is not PER_TENSOR:
                row, col = _without_amaxes(row), _without_amaxes(col)
            self.cached = (key, seen or record, row, col)
        return row if rowwise else None, col if columnwise else None

    def _predicts(self, *specs: QuantizationSpec | None) -> bool:
        return any(spec is not None and spec.predicted for spec in specs)

    def _reusable(self, x: Tensor, record: bool) -> bool:
        """Whether a cast made on an accelerator may be kept, or one that was kept be used."""
        self._uses += record
        if _capturing(x) and self.graph is None:
            self._frozen_in = True  # somebody's own graph: its replays may change the weight, and nobody will say so
        return record and self._reused and not self._frozen_in

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **_FRESH}


def _without_amaxes(operand: Operand | None) -> Operand | None:
    """What is kept leaves out the amaxes of blocks: memory that nobody asks for later."""
    if not isinstance(operand, QuantizedTensor) or operand.amax is None or operand.amax.numel() == 1:
        return operand
    return QuantizedTensor(operand.data, operand.scale_inv, operand.spec, operand.dtype)


def _capturing(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _identity(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), 0 if x.is_inference() else x._version


class Doors(nn.Module):
    """The doors of a layer, each under the name of its tensor: what watches casts looks for these."""


class AttentionQuantizers(Doors):
    """The doors of FP8 attention: qkv, s, o; do, dp, dqkv. They keep no state."""

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
        own: dict[str, Any] = self._modules  # past nn.Module.__getattr__: a boundary asks a thousand doors
        return own["input"], own["weight"], own["grad_output"]

    def prepare(self, recipe: Recipe, device: torch.device | None = None) -> None:
        """Makes the buffers that a resolved recipe needs and drops those of doors that need none."""
        for door, spec in self.predicted(recipe):
            if spec is None:
                door.drop()
            elif door.spec != spec:
                door.prepare(spec, device)

    def ready(self, recipe: Recipe) -> bool:
        """Whether the doors have the buffers that a resolved recipe needs; quick where nothing changed since."""
        if torch.compiler.is_compiling():  # Dynamo would guard on what was seen last
            return self._prepared_for(recipe)
        own: dict[str, Any] = self._modules
        seen = recipe, own["input"].spec, own["weight"].spec, own["grad_output"].spec
        if self._ready == seen:  # mostly the same objects: comparing them by their fields takes longer
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
