"""The one door between high precision and FP8.

A Linear owns three: input, weight and grad_output. Each takes a matrix and gives the operand of x and the operand of
x.T, as the recipe's cells ask. Whatever watches or changes casting wraps this door; all state of delayed scaling lives
in its buffers, where state_dict, .to(), deepcopy and sharding find it. There is no global manager: nothing can leak
between models (TransformerEngine #814).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ottava.ops import quantize, quantize_with_amax
from ottava.quantized_tensor import Operand, QuantizationSpec, QuantizedTensor
from ottava.recipe import Recipe
from ottava.scaling import compute_scale


class Quantizer(nn.Module):
    """Casts one tensor of one layer for both of its GEMMs; holds the amax history where its recipe scales delayed.

    Buffers, only once a delayed spec was prepared (`prepare`):
        amax_history   fp32 (amax_history_len,), newest first; entries not yet filled are 0
        amax_staged    fp32 (): largest finite amax since the last `update`
        scale          fp32 (): what the next cast multiplies with; 0 = no history yet, take the current scale
        nonfinite      int64 (): casts whose amax was inf or nan; those never enter the history
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
        if self.spec != spec:
            self.prepare(spec, x.device)
        x_q, amax = quantize_with_amax(x, spec, scale=self.scale)
        if record:
            self._stage(amax.reshape(()))
        return x_q

    def _stage(self, amax: Tensor) -> None:
        finite = amax.isfinite()
        self.amax_staged.copy_(torch.maximum(self.amax_staged, torch.where(finite, amax, 0.0)))
        self.nonfinite.add_((~finite).to(torch.int64))

    def prepare(self, spec: QuantizationSpec, device: torch.device | None = None) -> None:
        """Makes the buffers of a delayed spec; an existing history of the same length is kept."""
        if self.spec is None or self.spec.amax_history_len != spec.amax_history_len:
            self.register_buffer("amax_history", torch.zeros(spec.amax_history_len, device=device))
            self.register_buffer("amax_staged", torch.zeros((), device=device))
            self.register_buffer("scale", torch.zeros((), device=device))
            self.register_buffer("nonfinite", torch.zeros((), dtype=torch.int64, device=device))
        self.spec = spec

    def update(self) -> None:
        """Rolls the staged amax into the window and sets the scale of the next step; idle doors do not roll."""
        if self.spec is None:
            return
        ran = self.amax_staged > 0
        rolled = self.amax_history.roll(1)
        rolled[0] = self.amax_staged
        self.amax_history.copy_(torch.where(ran, rolled, self.amax_history))
        window = self.amax_history.max() if self.spec.amax_compute_algo == "max" else self.amax_history[0]
        scale = compute_scale(
            window, self.spec.format, scale_format=self.spec.scale_format, margin=self.spec.margin
        ).scale
        self.scale.copy_(torch.where(ran & (window > 0), scale, self.scale))
        self.amax_staged.zero_()

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
        """Makes the buffers that a resolved recipe needs, so that state_dict has its shape before the first forward."""
        doors = (
            (self.input, (recipe.fprop.lhs, recipe.wgrad.rhs)),
            (self.weight, (recipe.fprop.rhs, recipe.dgrad.rhs)),
            (self.grad_output, (recipe.dgrad.lhs, recipe.wgrad.lhs)),
        )
        for door, specs in doors:
            for spec in specs:
                if spec is not None and spec.scaling == "delayed" and door.spec != spec:
                    door.prepare(spec, device)
