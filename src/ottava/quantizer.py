"""The one door between high precision and FP8.

A Linear owns three: input, weight and grad_output. Each takes a matrix and gives the operand of x and the operand of
x.T, as the recipe's cells ask. Whatever watches or changes casting wraps this door; all state of delayed scaling lives
in its buffers, where state_dict, .to(), deepcopy and sharding find it. There is no global manager: nothing can leak
between models (TransformerEngine #814).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from ottava.ops import quantize, quantize_with_amax
from ottava.quantized_tensor import Operand, QuantizationSpec, QuantizedTensor
from ottava.recipe import Recipe
from ottava.scaling import compute_scale


class Quantizer(nn.Module):
    """Casts one tensor of one layer for both of its GEMMs; holds the amax history where its recipe scales delayed.

    Buffers, only once a delayed spec was prepared (`prepare`); they keep their dtypes when the model changes its own:
        amax_history   fp32 (amax_history_len,), newest first; entries not yet filled are 0
        amax_staged    fp32 (): largest finite amax since the last `update`
        scale          fp32 (): what the next cast multiplies with; 0 = no history yet, take the current scale
        nonfinite      int64 (): casts whose amax was inf or nan; those never enter the history. A cast that
                       torch.utils.checkpoint repeats counts again
    """

    spec: QuantizationSpec | None
    amax_history: Tensor
    amax_staged: Tensor
    scale: Tensor
    nonfinite: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.spec = None  # the delayed spec that the buffers belong to

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

        record: let delayed scaling see this tensor's amax; False in evaluation, which leaves no trace.

        A spec of None passes x through. Where x and x.T share their scales (per tensor, square blocks) one cast serves
        both; else x.T is cast from high precision.
        """
        row = self._cast(x, row_spec, record) if rowwise else None
        if not columnwise:
            return row, None
        if isinstance(row, QuantizedTensor) and row_spec == col_spec and row.spec.granularity.transposes:
            return row, row.t()
        return row, self._cast(x.t(), col_spec, record)

    def _cast(self, x: Tensor, spec: QuantizationSpec | None, record: bool) -> Operand:
        if spec is None:
            return x
        if spec.scaling == "current":
            return quantize(x, spec)
        if record and self.spec != spec:
            self.prepare(spec, x.device)
        x_q, amax = quantize_with_amax(x, spec, scale=self._scale_for(spec))
        if record:
            self._stage(amax.reshape(()))
        return x_q

    def _stage(self, amax: Tensor) -> None:
        finite = amax.isfinite()
        self.amax_staged.copy_(torch.maximum(self.amax_staged, torch.where(finite, amax, 0.0)))
        self.nonfinite.add_((~finite).to(torch.int64))

    def prepare(self, spec: QuantizationSpec, device: torch.device | None = None) -> None:
        """Makes the buffers of a delayed spec. A history of the same length is kept: it is amax, whatever the spec."""
        if self.spec is None or self.spec.amax_history_len != spec.amax_history_len:
            self.register_buffer("amax_history", torch.zeros(spec.amax_history_len, device=device))
            self.register_buffer("amax_staged", torch.zeros((), device=device))
            self.register_buffer("scale", torch.zeros((), device=device))
            self.register_buffer("nonfinite", torch.zeros((), dtype=torch.int64, device=device))
        elif self.spec != spec:
            self.scale.copy_(self._scale_of_window(spec))
        self.spec = spec

    def forget(self) -> None:
        """Drops history and buffers: state_dict is that of a stateless recipe again."""
        if self.spec is not None:
            del self.amax_history, self.amax_staged, self.scale, self.nonfinite
        self.spec = None

    def update(self) -> None:
        """Rolls the staged amax into the window and sets the scale of the next step; idle doors do not roll."""
        if self.spec is None:
            return
        ran = self.amax_staged > 0
        rolled = self.amax_history.roll(1)
        rolled[0] = self.amax_staged
        self.amax_history.copy_(torch.where(ran, rolled, self.amax_history))
        self.scale.copy_(torch.where(ran, self._scale_of_window(self.spec), self.scale))
        self.amax_staged.zero_()

    def _scale_for(self, spec: QuantizationSpec) -> Tensor | None:
        # Evaluation may ask for a spec that the door was not prepared for: it reads the history and leaves no trace.
        if self.spec is None or self.spec == spec:
            return None if self.spec is None else self.scale
        return self._scale_of_window(spec)

    def _scale_of_window(self, spec: QuantizationSpec) -> Tensor:
        """fp32 (): what the history says for a spec; 0 while it is empty."""
        window = self.amax_history.max() if spec.amax_compute_algo == "max" else self.amax_history[0]
        scale = compute_scale(window, spec.format, scale_format=spec.scale_format, margin=spec.margin).scale
        return torch.where(window > 0, scale, 0.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # .bfloat16() would round scale and history, and to_empty() leave garbage in them: only the device may change
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            assert buffer is not None
            assert moved is not None
            self._buffers[name] = (
                torch.zeros_like(moved, dtype=buffer.dtype) if buffer.is_meta else buffer.to(moved.device)
            )
        return self

    def extra_repr(self) -> str:
        """The delayed spec, if any."""
        return str(self.spec) if self.spec else ""


class LinearQuantizers(nn.Module):
    """The three doors of a Linear: input, weight, grad_output."""

    def __init__(self) -> None:
        super().__init__()
        self.input = Quantizer()
        self.weight = Quantizer()
        self.grad_output = Quantizer()

    def prepare(self, recipe: Recipe, device: torch.device | None = None) -> None:
        """Makes the buffers that a resolved recipe needs, so that state_dict has its shape before the first forward.

        Doors that the recipe does not scale delayed forget what an earlier one left; a history of the same spec stays.
        """
        doors = (
            (self.input, (recipe.fprop.lhs, recipe.wgrad.rhs)),
            (self.weight, (recipe.fprop.rhs, recipe.dgrad.rhs)),
            (self.grad_output, (recipe.dgrad.lhs, recipe.wgrad.lhs)),
        )
        for door, specs in doors:
            delayed = [spec for spec in specs if spec is not None and spec.scaling == "delayed"]
            if delayed:
                door.prepare(delayed[0], device)  # a recipe has one delayed spec for a tensor
            else:
                door.forget()
