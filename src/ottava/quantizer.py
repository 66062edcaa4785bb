"""The one door between high precision and FP8.

A Linear owns three: input, weight and grad_output. Each takes a matrix and gives the operand of x and the operand of
x.T, as the recipe's cells ask. Whatever watches or changes casting wraps this door; all state of predicted scales
lives here, where state_dict, .to(), deepcopy and sharding find it. There is no global manager: nothing can leak between
models (TransformerEngine #814). When the state moves on is decided in `state`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ottava.kernels.native_sums import checksum
from ottava.ops import quantize, quantize_both, quantize_with_amax
from ottava.quantized_tensor import Operand, QuantizationSpec, QuantizedTensor
from ottava.recipe import Recipe
from ottava.scaling import amax, compute_scale

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

    def __init__(self) -> None:
        super().__init__()
        self.spec = None  # the predicted spec that the buffers belong to
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
        if rowwise and columnwise and row_spec and col_spec and not (row_spec.predicted or col_spec.predicted):
            both = quantize_both(x, row_spec, col_spec)  # where a kernel reads x once for the two of them
            if both is not None:
                return both
        row = self._cast(x, row_spec, record) if rowwise else None
        if not columnwise:
            return row, None
        if isinstance(row, QuantizedTensor) and row_spec == col_spec and row.spec.granularity.transposes:
            return row, row.t()
        return row, self._cast(x.t(), col_spec, record)

    def _cast(self, x: Tensor, spec: QuantizationSpec | None, record: bool) -> Operand:
        if spec is None:
            return x
        if not spec.predicted:
            return quantize(x, spec)
        if not record:
            return quantize(x, spec, scale=self.scale if self.spec == spec else self._scale_under(spec, x.device))
        if self.spec != spec:
            self.prepare(spec, x.device)
        x_q, seen = quantize_with_amax(x, spec, scale=self.scale)
        used = x_q.scale_inv.reshape(())
        self._stage(seen.reshape(()), (self.scale > 0) & (used != self.scale.reciprocal()))
        return x_q

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
        algorithm = spec.amax_compute_algo
        window = algorithm(history) if callable(algorithm) else history.max() if algorithm == "max" else history[0]
        scale = compute_scale(window, spec.format, scale_format=spec.scale_format, margin=spec.margin).scale
        return torch.where((window > 0) & window.isfinite(), scale, empty)

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
        state = {**self.__dict__, "_buffers": own, "pack": None}
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

    A change is noticed by the tensor's version, its address, and a checksum of its bits, which also sees `.data` writes
    and what an all-gather of a sharded weight brought. The checksum is read back, so the cache is for CPUs; elsewhere
    every forward casts. Never inside torch.compile, with stochastic rounding or while someone watches the door.
    """

    cached: tuple[Any, bool, Operand | None, Operand | None] | None
    """What the operands were made from and whether a history saw it; the operands of the weight and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.cached = None

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
        if torch.compiler.is_compiling() or not self._cacheable(x, row_spec, col_spec):
            return super().forward(x, row_spec, col_spec, rowwise=rowwise, columnwise=columnwise, record=record)
        key: tuple[Any, ...] = (*_identity(x), x.dtype, checksum(x), row_spec, col_spec, self.spec)
        if self.spec is not None:
            key += _identity(self.scale)
        seen, row, col = False, None, None
        if self.cached is not None and self.cached[0] == key:
            _, seen, row, col = self.cached
        if record and not seen and any(spec is not None and spec.predicted for spec in (row_spec, col_spec)):
            row = col = None  # made in evaluation: no history has seen this weight yet
        if isinstance(row, QuantizedTensor) and row_spec == col_spec and row.spec.granularity.transposes:
            col = row.t()
        wants_row, wants_col = rowwise and row is None, columnwise and col is None
        if wants_row or wants_col:
            both = super().forward(x, row_spec, col_spec, rowwise=wants_row, columnwise=wants_col, record=record)
            row, col = both[0] if wants_row else row, both[1] if wants_col else col
            self.cached = (key, seen or record, row, col)
        return row if rowwise else None, col if columnwise else None

    def _cacheable(self, x: Tensor, *specs: QuantizationSpec | None) -> bool:
        if x.device.type != "cpu" or self._forward_hooks or self._forward_pre_hooks:
            return False
        # a high-precision operand would keep the weight itself alive
        return all(spec is not None and spec.rounding == "nearest_even" for spec in specs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "cached": None}


def _identity(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), 0 if x.is_inference() else x._version


class LinearQuantizers(nn.Module):
    """The three doors of a Linear: input, weight, grad_output."""

    def __init__(self) -> None:
        super().__init__()
        self.input = Quantizer()
        self.weight = WeightQuantizer()
        self.grad_output = Quantizer()

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

    def predicted(self, recipe: Recipe) -> list[tuple[Quantizer, QuantizationSpec | None]]:
        """Each door with the predicted spec that a resolved recipe gives it, or None."""
        cells = (
            (self.input, (recipe.fprop.lhs, recipe.wgrad.rhs)),
            (self.weight, (recipe.fprop.rhs, recipe.dgrad.rhs)),
            (self.grad_output, (recipe.dgrad.lhs, recipe.wgrad.lhs)),
        )
        return [(door, next((s for s in specs if s is not None and s.predicted), None)) for door, specs in cells]
