"""The only forward and backward formulas. One autograd pair runs every recipe.

    y  (M, N) = x    (M, K) @ w    (N, K).T + bias
    dx (M, K) = dy   (M, N) @ w.T  (K, N).T
    dw (N, K) = dy.T (N, M) @ x.T  (K, M).T
    db (N,)   = sum of dy over M, in fp32, from the unquantized dy

An operand in high precision passes through its door unchanged; no code here asks "is it FP8?". Backward keeps the
operands of x.T and w.T as the recipe casts them (FP8 codes, not BF16), and only those that a gradient needs. A norm or
an activation may stand in front of the input's door (`Producer`). An `Exchange` may gather operands of other ranks
between cast and GEMM, and sum results over ranks. They cost other layers no call. In high precision the same Producer
runs in front of torch's linear (`produced`), so it has one set of formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ottava.engine.quantizer import LinearQuantizers, Notes, Quantizer, Record
from ottava.kernels.gate import applied, no_autocast, refuse_transforms
from ottava.kernels.native import build as native_build
from ottava.kernels.native.pointwise import column_sums
from ottava.kernels.triton.quantize import UnmadeRows
from ottava.kernels.triton.rows import UnmadeGradient, make_rows
from ottava.numerics.tensor import Operand, QuantizationSpec, QuantizedTensor
from ottava.ops.gemm import GemmPlan, GemmRecord, multiply
from ottava.recipe import Recipe
from ottava.weights.operands import shared_bytes, weight_operands
from ottava.weights.parameter import QuantizedWeight


class Producer(Protocol):
    """Makes the rows that the input door casts: a norm or an activation in front of a linear, part of one backward.

    It holds no tensors: its parameters come in, and the tensors for its backward go out. It runs outside
    torch.autocast, so its dtypes are explicit.

    A method `unmade(x, dtype, *parameters)`, where it has one, returns `UnmadeRows` in place of the rows, which a GPU's
    kernel makes while it casts them, or the reason why it does not. `unmade_gradient(d_rows, saved)` does the same for
    the gradient of x, which the cast of the linear before makes.
    """

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """(rows (M, K) in x's dtype, the tensors that its backward needs)."""

    def backward(self, d_rows: Tensor, saved: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients of x and of each parameter."""


class Exchange(Protocol):
    """Stands between casts and GEMMs if ranks hold parts of the weight: see `nn.sharding`."""

    def gather(self, tensor: str, operand: Operand, dim: int) -> Operand:
        """The tokens of all ranks, as codes and scales from the casts of the ranks.

        tensor: "input" or "grad_output"; dim: where its tokens are: 0 in x (M, K), 1 in x.T (K, M).
        """

    def sum(self, tensor: str, partial: Tensor) -> Tensor:
        """The sum over all ranks of y or of dx, tensor: "y" or "dx"; (all M, features) -> this rank's tokens."""


@dataclass(slots=True, eq=False)
class Call:
    """One forward of a quantized layer and its backward: its settings, and the record of the kernels that ran."""

    doors: LinearQuantizers
    """The three doors of the layer."""
    recipe: Recipe
    """Resolved for this layer (no overrides left)."""
    plans: dict[Any, GemmPlan] = field(default_factory=dict)
    """The layer's plans of GEMMs."""
    input_shape: tuple[int, ...] | None = None
    """None: compiled code runs the call."""
    produce: Producer | None = None
    """Makes the rows for the input door; None: the rows are the input."""
    exchange: Exchange | None = None
    """Gathers operands between cast and GEMM; None: this rank has all of them."""
    training: bool = False
    """Whether this is a training forward: in grad mode, and no calibration."""
    before: InitVar[Call | None] = None
    """The layer's previous call. This call keeps the last training call, so that evaluation does not hide it."""
    dtype: torch.dtype | None = None
    records: dict[str, GemmRecord] = field(default_factory=dict)
    """By "fprop", "dgrad", "wgrad"."""
    saved_bytes: int = 0
    high_precision_bytes: int = 0  # kept for backward; torch's linear would keep its input
    cast_specs: tuple[QuantizationSpec | None, ...] = ()
    """The specs of x and of x.T to which the forward has cast its input."""
    remark: str = ""
    """A remark of the receipt about these casts."""
    gradient_remark: str = ""
    """The same about the cast of dy."""
    after_backward: Callable[[], None] | None = None
    note: Callable[[Notes], None] | None = None
    """Takes what the casts of a backward have seen, and those of its forward; None: their doors stage it."""
    session_note: Callable[[Notes], None] | None = None
    """Takes what a forward has seen in an autocast that makes boundaries: scales wait for no backward there."""
    takes_dw: Callable[[Callable[[torch.dtype], Tensor]], Tensor | None] | None = None
    """Takes the GEMM of dw, a function of its dtype, and returns what autograd gets; None: the GEMM's result."""
    unlinked: Notes = field(default_factory=list)
    """What a forward has seen that will have no backward, because nothing in it requires a gradient."""
    trained: Call | None = None
    first: bool = True
    """Whether the layer has no earlier call."""

    def __post_init__(self, before: Call | None) -> None:
        self.first = before is None
        self.trained = None if self.training or before is None else before.last_training

    @property
    def casts(self) -> int:
        """The number of casts of the input in the forward: two, unless one cast serves x and x.T."""
        specs = [spec for spec in self.cast_specs if spec is not None]
        one = len(specs) == 2 and specs[0] == specs[1] and specs[0].granularity.transposes and not specs[0].transform
        return 1 if one else len(specs)

    def keep(self, notes: Notes, linked: bool) -> Notes:
        """What the backward has to take of a forward's notes: amaxes enter a history only with a backward and a step.

        linked: whether there will be a backward.
        """
        if self.session_note is not None:
            self.session_note(notes)  # the autocast keeps them until its boundary
        elif linked:
            return notes  # the backward hands them over, together with those of dy
        elif self.note is not None:
            self.unlinked = notes  # a frozen layer: the next backward of the model takes them
        else:
            self.take(notes)  # nobody collects: the doors stage at once
        return []

    def take(self, notes: Notes) -> None:
        """Hands over what the casts of a backward have seen, and those of its forward."""
        if self.note is not None:
            self.note(notes)
        else:
            for door, seen in notes:
                door.stage(seen)

    @property
    def last_training(self) -> Call | None:
        """This call if it is a training call, else the last training call."""
        return self if self.training else self.trained


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, *parameters: Tensor | None) -> Tensor:
    """y = x @ weight.T + bias under a recipe.

    Args:
        x: (..., K); fp32, bf16 or fp16. y and dx have its dtype. With a `call.produce`: that Producer's input.
        weight: (N, K); may have another float dtype; dw has the weight's.
        bias: (N,) or None.
        call: doors, recipe and slots; it records the kernels that ran.
        parameters: of `call.produce`; they get gradients.
    Returns:
        (..., N).
    Raises:
        ValueError: the last dimension of x, or of the Producer's rows, is not K.  TypeError: x has another dtype.
        NotImplementedError: in a backward with create_graph=True: there is no second derivative.
    """
    if x.dim() == 0 or (call.produce is None and x.shape[-1] != weight.shape[1]):
        raise ValueError(f"linear: got input {tuple(x.shape)}; needs (..., {weight.shape[1]}), as the weight has it")
    rows = x if x.dim() == 2 else x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)  # (M, K)
    try:  # as `applied`, without a call
        y = _Linear.apply(call, torch.is_grad_enabled(), rows, weight, bias, *parameters)
    except RuntimeError:
        refuse_transforms()
        raise
    if x.dim() == 2:
        return y  # type: ignore[no-any-return]
    return y.squeeze(0) if x.dim() == 1 else y.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def produced(produce: Producer, x: Tensor, *parameters: Tensor | None) -> Tensor:
    """The rows of a Producer as a separate operation: a stand-alone norm, or rows in high precision.

    Args:
        x: any shape that the Producer takes.
        parameters: of the Producer; they get gradients.
    Raises:
        NotImplementedError: in a backward with create_graph=True: there is no second derivative.
    """
    return applied(_Produced, produce, x, *parameters)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=8)
def build_ahead(dtype: torch.dtype, casts: bool = True) -> None:
    """Compiles in the background, all at once, the libraries that linears with such weights need on a CPU.

    Otherwise the first step would wait for one library after the other. If the machine has an accelerator, this
    function does nothing: a model converted on the CPU will move there. casts: False for layers in high precision.
    """
    if torch.accelerator.is_available():
        return
    inputs = torch.bfloat16 if dtype == torch.float32 else dtype  # FP32 weights run under torch.autocast
    for cast_dtype in dict.fromkeys((inputs, dtype)) if casts else ():  # in the order of need
        if cast_dtype in native_build.VARIANTS:
            native_build.begin("quantize", cast_dtype)
    # one compiler each, side by side
    for name in ("gemm", "sums", "pointwise"):
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
        # needs_input_grad is requires_grad, without regard to grad mode
        _, _, *needed = ctx.needs_input_grad
        # grad mode came in as an argument, because a Function's forward always runs without it
        needs_dx = grad_enabled and (needed[0] or True in needed[3:])  # for x, or a parameter of the Producer
        needs_dw = grad_enabled and needed[1]
        fprop, wgrad = call.recipe.fprop, call.recipe.wgrad
        made: tuple[Tensor | None, ...] = ()
        rows: Tensor | UnmadeRows = x
        notes: Notes = []
        # amaxes of a forward wait for its backward: evaluation and frozen forwards must leave no trace in a history
        record: Record = notes if grad_enabled else False
        if call.produce is not None:
            cells = (fprop.lhs, wgrad.rhs) if needs_dw else (fprop.lhs,)
            rows, made = _made(call, call.produce, x, parameters, weight.shape[1], cells)
        x_row, x_col = call.doors.input(rows, fprop.lhs, wgrad.rhs, columnwise=needs_dw, record=record)
        if call.exchange is not None:
            # codes and scales travel, a byte a number: the cast came first
            x_row = call.exchange.gather("input", x_row, 0)
        dtype = rows.dtype  # not that of x: a norm reads fp32, and under autocast its linear runs in 16 bits
        y, w_col = forward_gemm(call, x_row, weight, bias, dtype, needs_dx=needs_dx, record=record)
        ctx.call, ctx.dtypes = call, (dtype, weight.dtype, None if bias is None else bias.dtype)
        # a Producer's own tensors serve only the gradients of what it read and of its parameters
        made = made if needs_dx else ()
        # x and w themselves are not kept: the operands of x.T and w.T are all that the backward multiplies (decision
        # 12)
        tensors, ctx.described, saved_bytes = flattened((x_col, w_col))
        # whether there will be a backward is known here, and nowhere later
        ctx.notes = call.keep(notes, linked=True in needed) if notes else notes
        ctx.save_for_backward(*tensors, *made)  # every tensor but notes, so that checkpointing and offloading see it
        if not torch.compiler.is_compiling():
            if isinstance(weight, QuantizedWeight):
                # an operand that is the weight's own memory costs nothing until the backward
                saved_bytes -= shared_bytes(w_col, weight)
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
        (x_col, w_col), made = unflattened(saved[:6], ctx.described), saved[6:]
        notes: Notes = [*ctx.notes]
        dx, dw, db = backward_gemms(call, dy, x_col, w_col, ctx.dtypes, (needs_dx, needs_dw, needs_db), notes)
        d_parameters: Sequence[Tensor | None] = ()
        if dx is not None and call.produce is not None:
            dx, *d_parameters = _pulled_back(ctx, call.produce, dx, made)
        if notes:
            call.take(notes)
        if call.after_backward is not None:
            call.after_backward()
        return None, None, dx, dw, db, *(d_parameters or [None] * len(needed))  # call and grad mode are no tensors


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
    record: Record,
) -> tuple[Tensor, Operand | None]:
    """y (M, N) in `dtype` from the operand of x (M, K), and the operand of w.T (K, N) that dx will need."""
    fprop = call.recipe.fprop
    w_row, w_col = call.doors.weight(
        weight, fprop.rhs, call.recipe.dgrad.rhs, columnwise=needs_dx, record=record, beside=(x_row, None)
    )
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)  # as torch.autocast would have it; FP8 hardware adds no fp32 bias to a 16-bit y
    # y (M, N) = x (M, K) @ w (N, K).T
    y = multiply(x_row, w_row, fprop, dtype, bias, call.plans, call.records, "fprop")
    if call.exchange is not None:
        y = call.exchange.sum("y", y)
    return y, w_col


def backward_gemms(
    call: Call,
    dy: Tensor | UnmadeGradient,
    x_col: Operand | None,
    w_col: Operand | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    needs: tuple[bool, bool, bool],
    notes: Notes,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx (M, K), dw (N, K) and db (N,) of dy (M, N), as needed.

    Args:
        x_col, w_col: the operands of x.T (K, M) and w.T (K, N).
        dtypes: of x, weight and bias.
        needs: dx, dw, db.
        notes: gets what the cast of dy sees.
    """
    needs_dx, needs_dw, needs_db = needs
    dgrad, wgrad = call.recipe.dgrad, call.recipe.wgrad
    x_dtype, weight_dtype, bias_dtype = dtypes
    dx = dw = None
    if isinstance(w_col, QuantizedWeight):  # its codes were lent to the forward, and again to this backward
        w_col = weight_operands(w_col, None, dgrad.rhs, rowwise=False)[1]
    # db first: the operation that made dy has left a part of it in a cache
    db = column_sums(dy, bias_dtype) if needs_db and bias_dtype is not None else None
    # the cast below makes the numbers; nobody else has seen them
    rows = dy.taken() if isinstance(dy, UnmadeGradient) else dy
    dy_row, dy_col = call.doors.grad_output(
        rows, dgrad.lhs, wgrad.lhs, rowwise=needs_dx, columnwise=needs_dw, record=notes, beside=(w_col, x_col)
    )
    if call.exchange is not None:
        dy_row = call.exchange.gather("grad_output", dy_row, 0) if needs_dx else None
        dy_col = call.exchange.gather("grad_output", dy_col, 1) if needs_dw else None  # tokens are the columns of dy.T
    if needs_dx:  # (M, K) = dy (M, N) @ w.T (K, N).T
        dx = multiply(dy_row, w_col, dgrad, x_dtype, None, call.plans, call.records, "dgrad")
        if call.exchange is not None:
            dx = call.exchange.sum("dx", dx)
    if needs_dw:  # (N, K) = dy.T (N, M) @ x.T (K, M).T
        if call.exchange is not None:
            assert x_col is not None
            x_col = call.exchange.gather("input", x_col, 1)
        if call.takes_dw is None:
            dw = multiply(dy_col, x_col, wgrad, weight_dtype, None, call.plans, call.records, "wgrad")
        else:
            dw = call.takes_dw(functools.partial(_wide_gradient, call, dy_col, x_col))
    return dx, dw, db


def _wide_gradient(call: Call, dy_col: Operand | None, x_col: Operand | None, dtype: torch.dtype) -> Tensor:
    if isinstance(dy_col, Tensor) and isinstance(x_col, Tensor):  # torch's 16-bit GEMM would round its sums
        dy_col, x_col = dy_col.to(dtype), x_col.to(dtype)
    return multiply(dy_col, x_col, call.recipe.wgrad, dtype, None, call.plans, call.records, "wgrad")


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
        dx, *d_parameters = _pulled_back(ctx, ctx.produce, grads[0], ctx.saved_tensors)
        return None, dx, *(d_parameters or [None] * (len(ctx.needs_input_grad) - 2))


def _pulled_back(
    ctx: Any, produce: Producer, d_rows: Tensor, saved: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients of what a Producer has read and of its parameters; without these where the first is not made yet."""
    with no_autocast(d_rows.device):
        rows = None if torch.compiler.is_compiling() else _left_unmade(ctx, produce, d_rows, saved)
        if rows is None:
            return produce.backward(d_rows, saved)
        return (UnmadeGradient(rows, (*d_rows.shape[:-1], rows.shape[1])),)


def _left_unmade(ctx: Any, produce: Producer, d_rows: Tensor, saved: Sequence[Tensor | None]) -> UnmadeRows | None:
    """The gradient of what a Producer has read, if a linear made that and its cast makes the gradient."""
    unmade = getattr(produce, "unmade_gradient", None)
    # autograd's graph tells who will receive this gradient: only a linear of ours casts what it makes
    node: Any = None if unmade is None else ctx.next_functions[0][0]
    # a view changes no number: who stands behind it gets the same gradient
    while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"):
        node = node.next_functions[0][0]
    of_a_linear: Any = _Linear._backward_cls
    if unmade is None or not isinstance(node, of_a_linear):
        return None
    answer: UnmadeRows | str = unmade(d_rows, saved)
    reason = answer if isinstance(answer, str) else _refuse_gradient(node, answer)
    if reason and d_rows.is_cuda:
        node.call.gradient_remark = f"gradient made first: {reason}"
    if reason or isinstance(answer, str):
        return None
    node.call.gradient_remark = "one kernel makes and casts the gradient"
    return answer


def _refuse_gradient(node: Any, rows: UnmadeRows) -> str | None:
    """Why a linear, of which autograd has this node, wants a gradient that has been made; None if its cast makes it."""
    call: Call = node.call
    _, _, needs_x, needs_dw, needs_db, *more = node.needs_input_grad
    try:
        # torch.autograd.grad returns gradients of chosen tensors to its caller, who knows nothing of unmade ones
        alone = all(torch._C._will_engine_execute_node(after) for after, _ in node.next_functions if after is not None)
    except RuntimeError:  # torch's answer about a leaf in torch.autograd.grad
        alone = False
    if not alone:
        return "torch.autograd.grad may hand it to its caller"
    if needs_db:
        return "the gradient of the bias is its sum"
    cells = ((call.recipe.dgrad.lhs, needs_x or True in more), (call.recipe.wgrad.lhs, needs_dw))
    return call.doors.grad_output.refuse_unmade(rows, *(spec for spec, needed in cells if needed))


def _made(
    call: Call,
    produce: Producer,
    x: Tensor,
    parameters: tuple[Tensor | None, ...],
    features: int,
    cells: tuple[QuantizationSpec | None, ...],
) -> tuple[Tensor | UnmadeRows, tuple[Tensor | None, ...]]:
    """What a Producer makes, in the dtype that the linear behind it runs in; on a GPU the cast may make it."""
    # under torch.autocast the linear runs in 16 bits, whatever the norm reads
    dtype = x.dtype if call.dtype is None else call.dtype
    unmade = None if torch.compiler.is_compiling() else getattr(produce, "unmade", None)
    rows: Tensor | UnmadeRows
    with no_autocast(x.device):
        answer = "" if unmade is None else unmade(x, dtype, *parameters)
        if isinstance(answer, str):
            rows, made = produce.forward(x, *parameters)
            rows = rows if call.dtype is None else rows.to(dtype)
        else:
            later, made = answer
            answer = call.doors.input.refuse_unmade(later, *cells)
            rows = later if answer is None else make_rows(later)
    if unmade is not None and x.is_cuda:
        call.remark = f"rows made first: {answer}" if answer else "one kernel makes and casts the rows"
    if rows.shape[-1] != features:
        raise ValueError(
            f"linear: {type(produce).__name__} made rows of {rows.shape[-1]} features from input {tuple(x.shape)}; the "
            f"weight takes {features}"
        )
    return rows, made


def observe_grad_output(y: Tensor, door: Quantizer, spec: QuantizationSpec, note: Callable[[Notes], None]) -> None:
    """For calibration: notes the amax of y's gradient when it arrives."""
    if not y.requires_grad:
        return
    # A hook, not a Function: the next module may write to y in place (nn.ReLU). With a 3-D input y is a view of the
    # GEMM's result; an in-place operation removes the view and its hooks from the graph, so the hook is on the result.
    result = y if y._base is None or y._base.grad_fn is None or y._base.numel() != y.numel() else y._base
    result.register_hook(lambda dy: note(door.calibrated(dy, spec)))


Described = tuple[tuple[QuantizationSpec, torch.dtype] | QuantizedWeight | None, ...]


def flattened(operands: Sequence[Operand | None]) -> tuple[list[Tensor | None], Described, int]:
    """Three tensors of each operand, for autograd to save; their descriptions; bytes of the quantized operands.

    `unflattened` is the inverse. A lent weight goes through as it is: FSDP2 frees and fills its memory, so that nobody
    may keep a copy of it, as an offload of saved tensors would.
    """
    tensors: list[Tensor | None] = []
    described: list[tuple[QuantizationSpec, torch.dtype] | QuantizedWeight | None] = []
    nbytes, counted = 0, not torch.compiler.is_compiling()
    for operand in operands:
        if isinstance(operand, QuantizedTensor):
            tensors += (operand.data, operand.scale_inv, operand.aside)
            described.append((operand.spec, operand.dtype))
            nbytes += operand.data.nbytes + operand.scale_inv.nbytes if counted else 0
            nbytes += operand.aside.nbytes if counted and operand.aside is not None else 0
        elif isinstance(operand, QuantizedWeight):
            tensors += (None, None, None)  # nothing to save: `unflattened` takes the weight itself
            described.append(operand)
        else:
            tensors += (operand, None, None)
            described.append(None)
    return tensors, tuple(described), nbytes


def unflattened(tensors: Sequence[Tensor | None], described: Described) -> list[Operand | None]:
    """The inverse of `flattened`."""
    operands = zip(tensors[::3], tensors[1::3], tensors[2::3], described, strict=True)
    return [
        QuantizedTensor(data, scale_inv, *said, aside=aside)  # type: ignore[arg-type]
        if isinstance(said, tuple)
        else (data if said is None else said)
        for data, scale_inv, aside, said in operands
    ]


class QuantizedLayer(nn.Module):
    """A module with three doors whose GEMMs run under a recipe."""

    name: str
    """Full name in the converted model; override patterns match it."""
    recipe: Recipe
    """As given to `convert`, overrides included."""
    resolved: Recipe
    """The recipe with this layer's overrides applied."""
    quantizers: LinearQuantizers
    """The doors of its input, weight and gradient."""
    plans: dict[Any, GemmPlan]
    """The plans of its GEMMs so far."""
    last_call: Call | None
    """Its last forward and backward; None: nothing has run yet."""
    scaling_state: Any
    """The `state.ScalingState` that decides when predicted scales change; the layers of a model share it."""
    weight: Tensor
    """(N, K), or in the layout of its module."""
    bias: Any
    """(N,) or None."""
    in_features: int
    """K."""
    out_features: int
    """N."""

    @property
    def parameter(self) -> Tensor:
        """The parameter that an optimizer holds: the weight, or the larger parameter with this piece."""
        return self.weight

    def adopt(self, recipe: Recipe, name: str) -> None:
        """Takes a recipe and its full name in the model."""
        raise NotImplementedError(f"{type(self).__name__}.adopt")


def quantized_layers(model: nn.Module) -> list[QuantizedLayer]:
    """The quantized layers of a model, in the order of its modules.

    Example:
        >>> import ottava
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> report = ottava.convert(model, "tensorwise")
        >>> [layer.name for layer in quantized_layers(model)]
        ['0']
    """
    # the order of modules is that of ranks too: a place in an all-reduce stands for a layer
    return [module for module in model.modules() if isinstance(module, QuantizedLayer)]
