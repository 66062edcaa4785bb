"""The only forward and backward formulas. One autograd pair runs every recipe.

    y  (M, N) = x    (M, K) @ w    (N, K).T + bias
    dx (M, K) = dy   (M, N) @ w.T  (K, N).T
    dw (N, K) = dy.T (N, M) @ x.T  (K, M).T
    db (N,)   = sum of dy over M, in fp32, from the unquantized dy

An operand that the recipe leaves in high precision passes through its door unchanged; nothing here asks "is it FP8?".
Saved for backward: the operands of x.T and w.T as the recipe casts them (FP8 codes, not BF16), and only those that a
gradient will need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ottava.kernels import native_build, native_cpu
from ottava.kernels.native_sums import column_sums
from ottava.ops import GemmRecord, gemm
from ottava.quantized_tensor import Operand, QuantizationSpec, QuantizedTensor
from ottava.quantizer import LinearQuantizers, Quantizer
from ottava.recipe import GemmRecipe, Recipe


class CallLog(Protocol):
    """Told what a linear ran; not while compiling."""

    def gemm(self, name: str, record: GemmRecord) -> None:
        """name: "fprop", "dgrad" or "wgrad"."""

    def saved(self, nbytes: int, high_precision: int) -> None:
        """Bytes kept for backward, and what torch's own linear would keep (its input)."""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    quantizers: LinearQuantizers,
    recipe: Recipe,
    *,
    log: CallLog | None = None,
    after_backward: Callable[[], None] | None = None,
) -> Tensor:
    """y = x @ weight.T + bias under a recipe.

    Args:
        x: (..., K); fp32, bf16 or fp16. Its dtype is that of y and dx.
        weight: (N, K); may have another float dtype; dw has the weight's.
        bias: (N,) or None.
        quantizers: the three doors of the layer.
        recipe: resolved for this layer (no overrides left).
        log: told what each GEMM ran and what is kept for backward.
        after_backward: called when the backward of this layer has ended.
    Returns:
        (..., N).
    Raises:
        ValueError: the last dimension of x is not K.  TypeError: x has another dtype.
        NotImplementedError: a second derivative is asked for (backward with create_graph=True).
    """
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: got input {tuple(x.shape)}; needs (..., {weight.shape[1]}), as the weight has it")
    rows = x if x.dim() == 2 else x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)  # (M, K)
    y = _Linear.apply(rows, weight, bias, quantizers, recipe, torch.is_grad_enabled(), log, after_backward)
    if x.dim() == 2:
        return y  # type: ignore[no-any-return]
    return y.squeeze(0) if x.dim() == 1 else y.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=8)
def build_ahead(dtype: torch.dtype) -> None:
    """Begins to compile what linears with such weights need on a CPU, all of it at once and in the background.

    The first step would ask for one library after the other, and wait for each. Nothing is begun where there is an
    accelerator: a model that is converted on the CPU will hardly stay there.
    """
    if torch.accelerator.is_available():
        return
    inputs = torch.bfloat16 if dtype == torch.float32 else dtype  # torch.autocast's, as training in FP32 has it
    for one in dict.fromkeys((inputs, dtype)):  # in the order of need
        if one in native_cpu.VARIANTS:
            native_build.begin("native_quantize", native_cpu.VARIANTS[one])
    for name in ("native_gemm", "native_sums"):
        native_build.begin(name)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        quantizers: LinearQuantizers,
        recipe: Recipe,
        grad_enabled: bool,
        log: CallLog | None,
        after_backward: Callable[[], None] | None,
    ) -> Tensor:
        # needs_input_grad is requires_grad, also where no gradient will ever be asked for
        needs_dx, needs_dw = (needed and grad_enabled for needed in ctx.needs_input_grad[:2])
        fprop, dgrad, wgrad = recipe.fprop, recipe.dgrad, recipe.wgrad
        x_row, x_col = quantizers.input(x, fprop.lhs, wgrad.rhs, columnwise=needs_dw, record=grad_enabled)
        w_row, w_col = quantizers.weight(weight, fprop.rhs, dgrad.rhs, columnwise=needs_dx, record=grad_enabled)
        ctx.quantizers, ctx.recipe, ctx.log, ctx.after_backward = quantizers, recipe, log, after_backward
        ctx.dtypes = (x.dtype, weight.dtype, bias.dtype if bias is not None else None)
        ctx.specs = _save(ctx, x_col, w_col)
        if log is not None:
            own = w_col.nbytes if isinstance(w_col, QuantizedTensor) else 0  # the high-precision weight lives anyway
            log.saved(own + (x_col.nbytes if x_col is not None else 0), x.nbytes if needs_dw else 0)
        if bias is not None:
            bias = bias.to(x.dtype)  # as torch.autocast would have it; FP8 hardware adds no fp32 bias to a 16-bit y
        return _gemm("fprop", fprop, x_row, w_row, log, out_dtype=x.dtype, bias=bias)  # y (M, N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # only so under create_graph=True
            raise NotImplementedError(
                "ottava: a quantized linear has no second derivative (backward was asked for create_graph=True); run "
                "that forward under ottava.autocast(enabled=False)"
            )
        (dy,) = grads
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dgrad, wgrad, log = ctx.recipe.dgrad, ctx.recipe.wgrad, ctx.log
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        x_col, w_col = _saved(ctx)
        dx = dw = None
        db = column_sums(dy, bias_dtype) if needs_db else None  # first: what made dy has left some of it in a cache
        dy_row, dy_col = ctx.quantizers.grad_output(dy, dgrad.lhs, wgrad.lhs, rowwise=needs_dx, columnwise=needs_dw)
        if needs_dx:  # (M, K) = dy (M, N) @ w.T (K, N).T
            dx = _gemm("dgrad", dgrad, dy_row, w_col, log, out_dtype=x_dtype)
        if needs_dw:  # (N, K) = dy.T (N, M) @ x.T (K, M).T
            dw = _gemm("wgrad", wgrad, dy_col, x_col, log, out_dtype=weight_dtype)
        if ctx.after_backward is not None:
            ctx.after_backward()
        return dx, dw, db, None, None, None, None, None


def observe_grad_output(y: Tensor, door: Quantizer, spec: QuantizationSpec) -> None:
    """When the gradient of y arrives, the door stages its amax. For calibration."""
    if not y.requires_grad:
        return
    # a hook, not a Function of its own: y may be written to in place afterwards (nn.ReLU). Of a 3-D input y is a view
    # of the GEMM's result, which an in-place operation cuts out of the graph, hooks and all: so the result is asked
    result = y if y._base is None or y._base.grad_fn is None or y._base.numel() != y.numel() else y._base
    result.register_hook(lambda dy: door.calibrate(dy, spec))


def _gemm(
    name: str,
    recipe: GemmRecipe,
    a: Operand | None,
    b: Operand | None,
    log: CallLog | None,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    assert a is not None
    assert b is not None  # the doors were asked for exactly what is used
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        b = b.to(a.dtype)  # a high-precision fp32 weight in the activation's dtype, as torch.autocast would have it
    return gemm(
        a,
        b,
        out_dtype=out_dtype,
        bias=bias,
        fast_accum=recipe.fast_accum,
        compute=recipe.compute,
        log=None if log is None else partial(log.gemm, name),
    )


def _save(ctx: Any, *operands: Operand | None) -> tuple[tuple[QuantizationSpec, torch.dtype] | None, ...]:
    """Hands every tensor to save_for_backward, where checkpointing and offloading see it; the rest is returned."""
    tensors: list[Tensor | None] = []
    specs: list[tuple[QuantizationSpec, torch.dtype] | None] = []
    for operand in operands:
        if isinstance(operand, QuantizedTensor):
            tensors += [operand.data, operand.scale_inv]
            specs.append((operand.spec, operand.dtype))
        else:
            tensors += [operand, None]
            specs.append(None)
    ctx.save_for_backward(*tensors)
    return tuple(specs)


def _saved(ctx: Any) -> tuple[Operand | None, ...]:
    tensors = ctx.saved_tensors
    return tuple(
        QuantizedTensor(tensors[2 * i], tensors[2 * i + 1], *spec) if spec else tensors[2 * i]
        for i, spec in enumerate(ctx.specs)
    )
