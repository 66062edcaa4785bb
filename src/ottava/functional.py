"""The only forward and backward formulas. One autograd pair runs every recipe.

    y  (M, N) = x    (M, K) @ w    (N, K).T + bias
    dx (M, K) = dy   (M, N) @ w.T  (K, N).T
    dw (N, K) = dy.T (N, M) @ x.T  (K, M).T
    db (N,)   = sum of dy over M, in fp32, from the unquantized dy

An operand that the recipe leaves in high precision passes through its door unchanged; nothing here asks "is it FP8?".
Saved for backward: the operands of x.T and w.T as the recipe casts them (FP8 codes, not BF16), and only those that a
gradient will need. A norm or an activation may stand in front of the input's door (`Producer`). Operands of other
ranks may be gathered between cast and GEMM, and results summed over ranks (`Exchange`). Without them neither costs a
call. Where nothing is cast, the same Producer runs in front of torch's own linear (`produced`), so that its formulas
stand once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ottava.dispatch import no_autocast
from ottava.kernels.native import build as native_build
from ottava.kernels.native import quantize as native_quantize
from ottava.kernels.native.sums import column_sums
from ottava.ops import GemmPlan, GemmRecord, multiply
from ottava.quantized_tensor import Operand, QuantizationSpec, QuantizedTensor
from ottava.quantizer import LinearQuantizers, Quantizer
from ottava.recipe import Recipe


class Producer(Protocol):
    """Makes the rows that the input door casts: a norm or an activation in front of a linear, part of one backward.

    It holds no tensors: what it learns or keeps comes in as parameters and goes out as saved tensors. It runs outside
    torch.autocast, so its dtypes are explicit.
    """

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """(rows (M, K) in x's dtype, what its backward needs)."""

    def backward(self, d_rows: Tensor, saved: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients of x and of each parameter."""


class Exchange(Protocol):
    """Stands between casts and GEMMs where the weight is split over ranks: see `nn.sharding`."""

    def gather(self, tensor: str, operand: Operand, dim: int) -> Operand:
        """The tokens of all ranks, as the codes and scales that these have cast.

        tensor: "input" or "grad_output"; dim: where its tokens are: 0 in x (M, K), 1 in x.T (K, M).
        """

    def sum(self, tensor: str, partial: Tensor) -> Tensor:
        """The sum over all ranks of y or of dx, tensor: "y" or "dx"; (all M, features) -> this rank's tokens."""


class Call:
    """One forward of a quantized layer and its backward: what it runs under, and what it ran.

    Args:
        doors: the three of the layer.
        recipe: resolved for this layer (no overrides left).
        plans: where the layer keeps how its GEMMs are made.
        produce: makes the rows that are cast; None: they are the input.
        exchange: gathers operands between cast and GEMM; None: this rank's are all.
        training: whether it is a training forward: one in grad mode that is no calibration.
        before: the layer's call before this one, of which the last training call is kept: evaluation must not hide it.
    """

    __slots__ = (
        *("after_backward", "cast_specs", "doors", "dtype", "exchange", "high_precision_bytes", "input_shape"),
        *("plans", "produce", "recipe", "records", "remark", "saved_bytes", "trained", "training"),
    )

    def __init__(
        self,
        doors: LinearQuantizers,
        recipe: Recipe,
        plans: dict[Any, GemmPlan] | None = None,
        input_shape: tuple[int, ...] | None = None,
        produce: Producer | None = None,
        exchange: Exchange | None = None,
        *,
        training: bool = False,
        before: Call | None = None,
    ) -> None:
        self.doors, self.recipe, self.plans = doors, recipe, {} if plans is None else plans
        self.input_shape = input_shape  # None: the call was compiled, and is not seen when it runs
        self.produce, self.exchange = produce, exchange
        self.dtype: torch.dtype | None = None
        self.records: dict[str, GemmRecord] = {}  # "fprop", "dgrad", "wgrad" -> what ran
        self.saved_bytes = self.high_precision_bytes = 0  # kept for backward; torch's own linear would keep its input
        self.cast_specs: tuple[QuantizationSpec | None, ...] = ()
        """What the forward has cast its input to, for x and for x.T."""
        self.remark = ""
        """What a receipt says about these casts besides."""
        self.after_backward: Callable[[], None] | None = None
        self.training, self.trained = training, None if training or before is None else before.last_training

    @property
    def casts(self) -> int:
        """How often the forward has cast its input: twice, unless one cast serves x and x.T."""
        specs = [spec for spec in self.cast_specs if spec is not None]
        return 1 if len(specs) == 2 and specs[0] == specs[1] and specs[0].granularity.transposes else len(specs)

    @property
    def last_training(self) -> Call | None:
        """This call if it was one of training, else the last one that was."""
        return self if self.training else self.trained


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, *parameters: Tensor | None) -> Tensor:
    """y = x @ weight.T + bias under a recipe.

    Args:
        x: (..., K); fp32, bf16 or fp16. Its dtype is that of y and dx. With a `call.produce`, what that takes.
        weight: (N, K); may have another float dtype; dw has the weight's.
        bias: (N,) or None.
        call: doors, recipe and slots; what was run is noted there.
        parameters: of `call.produce`; they get gradients.
    Returns:
        (..., N).
    Raises:
        ValueError: the last dimension of x, or of the rows made of it, is not K.  TypeError: x has another dtype.
        NotImplementedError: a second derivative is asked for (backward with create_graph=True).
    """
    if x.dim() == 0 or (call.produce is None and x.shape[-1] != weight.shape[1]):
        raise ValueError(f"linear: got input {tuple(x.shape)}; needs (..., {weight.shape[1]}), as the weight has it")
    rows = x if x.dim() == 2 else x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)  # (M, K)
    y = _Linear.apply(call, torch.is_grad_enabled(), rows, weight, bias, *parameters)
    if x.dim() == 2:
        return y  # type: ignore[no-any-return]
    return y.squeeze(0) if x.dim() == 1 else y.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def produced(produce: Producer, x: Tensor, *parameters: Tensor | None) -> Tensor:
    """The rows that a Producer makes, as an operation of its own: a stand-alone norm, or rows that nobody casts.

    Args:
        x: any shape that the Producer takes.
        parameters: of the Producer; they get gradients.
    Raises:
        NotImplementedError: a second derivative is asked for (backward with create_graph=True).
    """
    return _Produced.apply(produce, x, *parameters)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=8)
def build_ahead(dtype: torch.dtype, casts: bool = True) -> None:
    """Begins to compile what linears with such weights need on a CPU, all of it at once and in the background.

    The first step would ask for one library after the other, and wait for each. Nothing is begun where there is an
    accelerator: a model that is converted on the CPU will hardly stay there. casts: False for layers in high precision.
    """
    if torch.accelerator.is_available():
        return
    inputs = torch.bfloat16 if dtype == torch.float32 else dtype  # torch.autocast's, as training in FP32 has it
    for one in dict.fromkeys((inputs, dtype)) if casts else ():  # in the order of need
        if one in native_quantize.VARIANTS:
            native_build.begin("quantize", native_quantize.VARIANTS[one])
    for name in ("gemm", "sums"):
        native_build.begin(name)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        grad_enabled: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *parameters: Tensor | None,
    ) -> Tensor:
        # needs_input_grad is requires_grad, also where no gradient will ever be asked for
        _, _, *needed = ctx.needs_input_grad
        needs_dx = grad_enabled and (needed[0] or True in needed[3:])  # for x, or a parameter of what makes the rows
        needs_dw = grad_enabled and needed[1]
        fprop, wgrad = call.recipe.fprop, call.recipe.wgrad
        made: tuple[Tensor | None, ...] = ()
        rows = x
        if call.produce is not None:
            rows, made = _made(call.produce, x, parameters, weight.shape[1], call.dtype)
        x_row, x_col = call.doors.input(rows, fprop.lhs, wgrad.rhs, columnwise=needs_dw, record=grad_enabled)
        if call.exchange is not None:
            x_row = call.exchange.gather("input", x_row, 0)
        dtype = rows.dtype
        y, w_col = forward_gemm(call, x_row, weight, bias, dtype, needs_dx=needs_dx, record=grad_enabled)
        ctx.call, ctx.dtypes = call, (dtype, weight.dtype, None if bias is None else bias.dtype)
        made = made if needs_dx else ()
        tensors, ctx.described, saved_bytes = flattened((x_col, w_col))
        ctx.save_for_backward(*tensors, *made)  # every tensor, so that checkpointing and offloading see it
        if not torch.compiler.is_compiling():
            if isinstance(x_col, Tensor):  # a weight in high precision lives anyway
                saved_bytes += x_col.nbytes
            call.saved_bytes, call.high_precision_bytes = saved_bytes, rows.nbytes if needs_dw else 0
            call.cast_specs = fprop.lhs, wgrad.rhs if needs_dw else None
            if made:  # parameters live anyway
                call.saved_bytes += sum(t.nbytes for t in made if t is not None and all(t is not p for p in parameters))
                call.high_precision_bytes += x.nbytes
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("a quantized linear", "run that forward under ottava.autocast(enabled=False)")
        (dy,), call = grads, ctx.call
        _, _, needs_x, needs_dw, needs_db, *needed = ctx.needs_input_grad
        needs_dx = needs_x or True in needed
        saved = ctx.saved_tensors
        (x_col, w_col), made = unflattened(saved[:4], ctx.described), saved[4:]
        dx, dw, db = backward_gemms(call, dy, x_col, w_col, ctx.dtypes, (needs_dx, needs_dw, needs_db))
        d_parameters: Sequence[Tensor | None] = ()
        if dx is not None and call.produce is not None:
            with no_autocast(dx.device):
                dx, *d_parameters = call.produce.backward(dx, made)
        if call.after_backward is not None:
            call.after_backward()
        return None, None, dx, dw, db, *(d_parameters or [None] * len(needed))


def refuse_second_derivative(what: str, instead: str) -> None:
    """For a backward in grad mode, which torch uses in eager code under create_graph=True only.

    Raises:
        NotImplementedError: always, except while compiling.
    """
    if not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"ottava: {what} has no second derivative (backward was asked for create_graph=True); {instead}"
        )


def forward_gemm(
    call: Call,
    x_row: Operand | None,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    needs_dx: bool,
    record: bool,
) -> tuple[Tensor, Operand | None]:
    """y (M, N) in `dtype` from the operand of x (M, K), and the operand of w.T (K, N) that dx will need."""
    fprop = call.recipe.fprop
    w_row, w_col = call.doors.weight(weight, fprop.rhs, call.recipe.dgrad.rhs, columnwise=needs_dx, record=record)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)  # as torch.autocast would have it; FP8 hardware adds no fp32 bias to a 16-bit y
    y = multiply(
        x_row, w_row, fprop, dtype, bias, call.plans, call.records, "fprop"
    )  # y (M, N) = x (M, K) @ w (N, K).T
    if call.exchange is not None:
        y = call.exchange.sum("y", y)
    return y, w_col


def backward_gemms(
    call: Call,
    dy: Tensor,
    x_col: Operand | None,
    w_col: Operand | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx (M, K), dw (N, K) and db (N,) of dy (M, N), each where it is needed.

    Args:
        x_col, w_col: the operands of x.T (K, M) and w.T (K, N).
        dtypes: of x, weight and bias.
        needs: dx, dw, db.
    """
    needs_dx, needs_dw, needs_db = needs
    dgrad, wgrad = call.recipe.dgrad, call.recipe.wgrad
    x_dtype, weight_dtype, bias_dtype = dtypes
    dx = dw = None
    db = (
        column_sums(dy, bias_dtype) if needs_db and bias_dtype is not None else None
    )  # first: what made dy has left some of it in a cache
    dy_row, dy_col = call.doors.grad_output(dy, dgrad.lhs, wgrad.lhs, rowwise=needs_dx, columnwise=needs_dw)
    if call.exchange is not None:
        dy_row = call.exchange.gather("grad_output", dy_row, 0) if needs_dx else None
        dy_col = call.exchange.gather("grad_output", dy_col, 1) if needs_dw else None
    if needs_dx:  # (M, K) = dy (M, N) @ w.T (K, N).T
        dx = multiply(dy_row, w_col, dgrad, x_dtype, None, call.plans, call.records, "dgrad")
        if call.exchange is not None:
            dx = call.exchange.sum("dx", dx)
    if needs_dw:  # (N, K) = dy.T (N, M) @ x.T (K, M).T
        if call.exchange is not None:
            assert x_col is not None
            x_col = call.exchange.gather("input", x_col, 1)
        dw = multiply(dy_col, x_col, wgrad, weight_dtype, None, call.plans, call.records, "wgrad")
    return dx, dw, db


class _Produced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, produce: Producer, x: Tensor, *parameters: Tensor | None) -> Tensor:
        with no_autocast(x.device):
            rows, made = produce.forward(x, *parameters)
        ctx.produce = produce
        ctx.save_for_backward(*made)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative(type(ctx.produce).__name__, "use torch's own module there")
        (d_rows,) = grads
        with no_autocast(d_rows.device):
            return None, *ctx.produce.backward(d_rows, ctx.saved_tensors)


def _made(
    produce: Producer, x: Tensor, parameters: tuple[Tensor | None, ...], features: int, dtype: torch.dtype | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """What a Producer makes, in the dtype that the linear behind it runs in."""
    with no_autocast(x.device):
        rows, made = produce.forward(x, *parameters)
    if rows.shape[-1] != features:
        raise ValueError(
            f"linear: {type(produce).__name__} made rows of {rows.shape[-1]} features from input {tuple(x.shape)}; the "
            f"weight takes {features}"
        )
    return (rows if dtype is None else rows.to(dtype)), made


def observe_grad_output(y: Tensor, door: Quantizer, spec: QuantizationSpec) -> None:
    """When the gradient of y arrives, the door stages its amax. For calibration."""
    if not y.requires_grad:
        return
    # a hook, not a Function of its own: y may be written to in place afterwards (nn.ReLU). Of a 3-D input y is a view
    # of the GEMM's result, which an in-place operation cuts out of the graph, hooks and all: so the result is asked
    result = y if y._base is None or y._base.grad_fn is None or y._base.numel() != y.numel() else y._base
    result.register_hook(lambda dy: door.calibrate(dy, spec))


Described = tuple[tuple[QuantizationSpec, torch.dtype] | None, ...]


def flattened(operands: Sequence[Operand | None]) -> tuple[list[Tensor | None], Described, int]:
    """Two tensors of each operand, as autograd saves them; what they are; bytes of the quantized ones.

    `unflattened` is the way back.
    """
    tensors: list[Tensor | None] = []
    described: list[tuple[QuantizationSpec, torch.dtype] | None] = []
    nbytes, counted = 0, not torch.compiler.is_compiling()
    for operand in operands:
        if isinstance(operand, QuantizedTensor):
            tensors += (operand.data, operand.scale_inv)
            described.append((operand.spec, operand.dtype))
            nbytes += operand.data.nbytes + operand.scale_inv.nbytes if counted else 0
        else:
            tensors += (operand, None)
            described.append(None)
    return tensors, tuple(described), nbytes


def unflattened(tensors: Sequence[Tensor | None], described: Described) -> list[Operand | None]:
    """The operands of `flattened`."""
    pairs = zip(tensors[::2], tensors[1::2], described, strict=True)
    return [data if cast is None else QuantizedTensor(data, scale_inv, *cast) for data, scale_inv, cast in pairs]  # type: ignore[arg-type]
