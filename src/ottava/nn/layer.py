"""A layer under a recipe, wherever its weight lies: in itself, in pieces on ranks, or in a parameter of another module.

`Layer` finds the recipe, informs the scaling state, and hands a `Call` to the formulas. A layer is this class and a
shape: `Linear` adds torch's constructor and nothing else. Its `produce` runs in front of the cast, its `exchange`
between cast and GEMM (see `functional`), and its `formula` multiplies the operands.

Some weights hold several matrices below each other: q, k and v, or gate and up. In one process they are one parameter.
Ranks that split a layer by output features hold their share of each, so there each is a parameter of its own, as in
TransformerEngine (`parameters_split`): torch's sharded tensors, checkpoints and optimizers then see ordinary shards.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ottava.engine.autocast import AMBIENT, TORCHS_OWN, Ambient, ambient, traced_ambient
from ottava.engine.functional import (
    Call,
    Exchange,
    Producer,
    QuantizedLayer,
    build_ahead,
    linear,
    observe_grad_output,
    produced,
)
from ottava.engine.groups import ddp_around
from ottava.engine.quantizer import LinearQuantizers
from ottava.engine.state import ScalingState
from ottava.kernels.gate import constant_in_graph, dense, is_plain
from ottava.ops.dispatch import torch_is_beaten
from ottava.recipe import Recipe, get_recipe
from ottava.weights.checkpoint import decode_codes
from ottava.weights.operands import in_high_precision
from ottava.weights.parameter import QuantizedWeight, is_quantized_weight, local


class Projection(NamedTuple):
    """One of the matrices that lie below each other in the weight of a layer: q, k and v, or gate and up."""

    name: str
    """Its parameters are NAME_weight and NAME_bias."""
    rows: int
    """Of the whole weight."""
    unit: int = 1
    """Rows that one rank keeps together: the entries of a head."""


def split_projections(layer: Any, projections: Sequence[Projection] = ()) -> None:
    """Makes each weight of a fused layer a parameter of its own; the layer then joins them in each forward.

    Args:
        layer: an ottava layer.
        projections: from top to bottom; none: those that the layer knows (`nn.MultiheadAttention`, `nn.NormMLP`).
    Raises:
        ValueError: their rows do not add up to the weight's.
    Edge cases: optimizers have to be made after it. State dicts of either kind load into both.

    Example:
        >>> import ottava
        >>> mlp = ottava.nn.NormMLP(64, 96, activation="swiglu", bias=False)
        >>> split_projections(mlp.fc1)
        >>> [name for name, _ in mlp.fc1.named_parameters()], mlp.fc1.weight.shape
        (['gate_weight', 'up_weight', 'norm.weight', 'norm.bias'], torch.Size([192, 64]))
    """
    projections = tuple(projections or layer.projections)
    rows = [one.rows for one in projections]
    if sum(rows) != layer.weight.shape[0]:
        raise ValueError(
            f"{layer.name or type(layer).__name__}: got projections of {rows} rows; needs {layer.weight.shape[0]} in "
            "all, as the weight has them"
        )
    if is_quantized_weight(layer.weight):
        raise TypeError(
            f"{layer.name or type(layer).__name__}: its weight is stored only as codes, and its projections would have "
            "scales of their own, where a GEMM takes one. Give it numbers, ottava.convert(model, recipe, "
            "weights='bf16'), or shard it with fully_shard"
        )
    layer.projections = projections
    own = {kind: layer._parameters.pop(kind) for kind in ("weight", "bias")}
    change(layer, SplitWeight)
    front = {}
    for kind, whole in own.items():
        parts = [None] * len(projections) if whole is None else whole.detach().split(rows)
        for one, part in zip(projections, parts, strict=True):
            parameter = None if part is None else nn.Parameter(part.clone(), whole.requires_grad)
            front[f"{one.name}_{kind}"] = parameter
    layer._parameters.update(front)


class Changed(nn.Module):
    """A module whose class was changed to a subclass of its old class, made on demand; a pickle makes it, too."""

    _made_of: tuple[type, type]

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, self._made_of, self.__getstate__()


def change(module: nn.Module, ours: type[Changed]) -> None:
    """Gives a module a class that is a subclass of ours and of its old class."""
    module.__class__ = _subclass((ours, type(module)))


@functools.cache
def _subclass(made_of: tuple[Any, Any]) -> Any:
    ours, theirs = made_of
    return type(theirs.__name__, made_of, {"_made_of": made_of, "__module__": ours.__module__})


def _empty(*made_of: type) -> Any:
    made = _subclass(made_of)
    return made.__new__(made)


class SplitWeight(Changed):
    """The part of a layer's class that joins its projections."""

    projections: tuple[Projection, ...]
    _parameters: dict[str, Any]

    @property
    def weight(self) -> Tensor:
        """(N, K): the rows of all projections; on a rank its own rows."""
        return torch.cat([local(self._parameters[f"{one.name}_weight"]) for one in self.projections])

    @property
    def bias(self) -> Tensor | None:
        """(N,) or None; on a rank its own entries."""
        parts = [self._parameters[f"{one.name}_bias"] for one in self.projections]
        return None if parts[0] is None else torch.cat([local(part) for part in parts])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for kind in ("weight", "bias"):
            if (whole := state_dict.pop(f"{prefix}{kind}", None)) is None:
                continue
            for one, part in zip(self.projections, whole.split([p.rows for p in self.projections]), strict=True):
                name = f"{one.name}_{kind}"
                state_dict[prefix + name] = _shared_as(self._parameters[name], part)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def parameter(self) -> Tensor:
        """The first projection's; an optimizer that steps it steps all."""
        first: Tensor = self._parameters[f"{self.projections[0].name}_weight"]
        return first


def _shared_as(own: Any, whole: Tensor) -> Tensor:
    """A whole tensor, split as a parameter is whose place it takes."""
    if not hasattr(own, "device_mesh") or hasattr(whole, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor  # it takes a second to import

    return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Layer(QuantizedLayer):
    """The base class of all quantized layers."""

    produce: Producer | None = None
    """Makes the rows in front of every forward, with or without a cast; None: the rows are the input."""
    exchange: Exchange | None = None
    """Gathers operands between cast and GEMM; None: this rank has all of them."""
    sharding: Any = None
    """A `nn.sharding.Sharding` if the weight is split over ranks."""
    takes_dw: Callable[[Callable[[torch.dtype], Tensor]], Tensor | None] | None = None
    """As `Call.takes_dw`: where a trainer, not autograd, takes the weight's gradient."""
    returns_bias: bool = False
    """Whether the caller adds the bias to what `forward` returns."""
    projections: tuple[Projection, ...] = ()
    """The matrices that lie below each other in its weight: q, k and v, or gate and up."""
    formula: Callable[..., Tensor] = staticmethod(linear)
    """(input, weight, bias, call, *more) -> result, under a recipe that casts; more: the other arguments of `forward`,
    or the parameters of `produce`."""
    plain: Callable[..., Tensor] = staticmethod(nn.functional.linear)
    """(rows, weight, bias, *more of `forward`) -> result, without casts: torch's linear, as torch dispatches it."""

    def produced_with(self) -> tuple[Tensor | None, ...]:
        """The parameters of `produce`; they get gradients."""
        return ()

    def adopt(self, recipe: Recipe, name: str) -> None:
        """Takes a recipe and the layer's full name in the model; `convert` calls it after it has changed the class."""
        if not isinstance(getattr(self, "quantizers", None), LinearQuantizers):
            self.quantizers = LinearQuantizers()
        self.recipe, self.name, self.last_call = recipe, name, None
        self.plans = {}
        if getattr(self, "scaling_state", None) is None:
            self.scaling_state = ScalingState(None)
        self.resolved = recipe.for_layer(name)
        self.quantizers.prepare(self.resolved, self.weight.device)
        if self.weight.device.type == "cpu":
            build_ahead(self.weight.dtype, casts=self.resolved.quantized)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's; refuses torch's tensor-parallel styles, which would split the doors as well. FSDP2 does not call
        it.

        Raises:
            TypeError: a plain parameter would become a DTensor.
        """
        if hasattr(param, "device_mesh") and not hasattr(self._parameters.get(name), "device_mesh"):
            raise TypeError(
                f"{self.name or 'Linear'}.{name}: torch's tensor-parallel styles cannot split a layer that is "
                f"converted already (recipe {self.recipe.name!r}). Call parallelize_module first and ottava.convert "
                "after it, or take the styles of ottava.distributed, for which the order does not matter"
            )
        super().register_parameter(name, param)

    def forward(self, input: Tensor, *more: Any) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if self.sharding is not None:
            return self.sharding.forward(self, input, *more)  # type: ignore[no-any-return]
        return self.run(input, self.weight, None if self.returns_bias else self.bias, *more)

    def run(self, input: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> Tensor:
        """`forward` with the caller's weight (N, K) and bias (N,) or None: a module that keeps its weight in another
        way passes views of it."""
        if torch.compiler.is_compiling():
            settings = ambient()
            recipe = settings.recipe_for(self.name, self.resolved)
            call = Call(self.quantizers, recipe, produce=self.produce, exchange=self.exchange)
            lent = isinstance(weight, QuantizedWeight) and weight.lent is not None
            eager = lent or settings.session is not None or settings.batch_invariant
            eager = eager or (settings.recipe is None and settings.accumulator is not None)
            eager = eager or call.recipe.fprop.batch_invariant or self.takes_dw is not None
            if eager or self.sharding is not None or self._unprepared(call.recipe):
                from ottava.nn.compile import apart  # it imports Dynamo, which is loaded: it is tracing

                return apart(self.run, input, weight, bias, *more)  # type: ignore[no-any-return]  # torch.compiler.disable is untyped
            self._note_compiled()
        else:
            settings = AMBIENT.get()
            call = self.begin_call(input, settings)
            if settings.calibrating:
                return self._calibrate(input, weight, bias, settings, *more)
        if (
            not call.recipe.casts
            and self.exchange is None
            and self.takes_dw is None
            and not isinstance(weight, QuantizedWeight)  # torch's linear would keep the decoded numbers for backward
            and (
                torch.compiler.is_compiling()
                or not (input.is_cpu and torch_is_beaten())
                or _torchs_own(call.recipe, input, weight, bias)
            )
        ):
            if not input.ndim:
                _refuse_shape(self.name, input, weight)
            return self.plain(input if self.produce is None else self.rows(input), weight, bias, *more)
        if self.produce is not None:
            more = self._produced_with()
        input = ready_input(self, input, weight, bias, call)
        return self.formula(input, weight, bias, call, *more)

    def rows(self, input: Tensor) -> Tensor:
        """The rows that the GEMM multiplies: the input, or the result of `produce` as a separate operation."""
        return input if self.produce is None else produced(self.produce, input, *self._produced_with())

    def _produced_with(self) -> tuple[Tensor | None, ...]:
        parameters = self.produced_with()
        return parameters if self.sharding is None else self.sharding.parameters_of(parameters)

    def _unprepared(self, recipe: Recipe) -> bool:
        return recipe.predicted and torch.is_grad_enabled() and not self.quantizers.ready(recipe)

    def begin_call(self, input: Tensor, settings: Ambient) -> Call:
        """Notes a forward outside compiled code with its recipe, and informs the scaling state."""
        settings.ear.heard = True
        training, call = torch.is_grad_enabled() and not settings.calibrating, self.last_call
        # A forward inside a backward is a recomputation (torch.utils.checkpoint): it must repeat its forward under
        # any autocast, and is part of the same call.
        if call is not None and torch._C._current_graph_task_id() != -1:
            call.training |= training  # checkpoint(use_reentrant=True) runs its first forward without grad mode
        else:
            own = settings.recipe is None and settings.enabled and settings.accumulator is None
            unchanged = own and not settings.batch_invariant
            recipe = self.resolved if unchanged else settings.recipe_for(self.name, self.resolved)
            plain = type(input) is Tensor and not input.is_nested
            shape = tuple(input.shape if plain else dense(self.name or type(self).__name__, input))
            made = self.produce if not recipe.fprop.batch_invariant else invariant_producer(self.produce)
            call = Call(self.quantizers, recipe, self.plans, shape, made, self.exchange, training=training, before=call)
            call.takes_dw = self.takes_dw
            vars(self)["last_call"] = call  # not by nn.Module.__setattr__, which looks for parameters first
        if training and (call.recipe.predicted or not input.is_cpu):
            call.after_backward = self._announce(call, input, settings)
        return call

    @constant_in_graph  # runs while tracing: a side effect in the graph would forbid checkpointing
    def _note_compiled(self) -> None:
        recipe = traced_ambient().recipe_for(self.name, self.resolved)
        call = Call(self.quantizers, recipe, training=torch.is_grad_enabled(), before=self.last_call)
        self.last_call = call

    def _announce(self, call: Call, input: Tensor, settings: Ambient) -> Callable[[], None] | None:
        """Tells the scaling state, and an autocast that makes boundaries, that the layer uses predicted scales."""
        recipe = call.recipe
        if not recipe.predicted:
            if self.parameter.device.type not in ("cpu", "meta"):
                self._bound_state().listen(moves=False)  # after a step the kept cast of the weight is out of date
            return None
        state = self._bound_state()
        if self._unprepared(recipe):
            state.prepare(settings.asked_of)
        if recomputing() and (settings.session is not None or state.moved_by_autocast):
            raise RuntimeError(
                f"{self.name or 'Linear'}: with autocast(update='autocast') scales change between a forward and its "
                "recomputation by torch.utils.checkpoint. Use update='step', which every recomputation agrees with"
            )
        state.saw_forward(self.parameter, settings.group, moved_by_autocast=settings.session is not None)
        call.note = state.note
        if settings.session is None:
            return state.after_backward
        call.session_note = settings.session.note
        settings.session.touch(state)
        has_backward = any(t is not None and t.requires_grad for t in (input, self.parameter, self.bias))
        return (
            partial(settings.session.close, "backward") if has_backward and settings.session.claim_backward() else None
        )

    def _bound_state(self) -> ScalingState:
        if not self.scaling_state.bound:  # for a layer made by hand, or unpickled
            make_state(self)
        state: ScalingState = self.scaling_state
        return state

    def _calibrate(self, input: Tensor, weight: Tensor, bias: Tensor | None, settings: Ambient, *more: Any) -> Tensor:
        """torch's linear; each door notes the amax of the tensor that it would cast."""
        input = self.rows(input)
        weight = in_high_precision(weight)
        if self.exchange is None:
            y = nn.functional.linear(input, weight, bias)
        else:
            y = linear(input, weight, bias, Call(self.quantizers, TORCHS_OWN, exchange=self.exchange))
        quantizers = self.quantizers
        input = autocast_input(input)
        recipe, state, session = settings.asked_of(self.name, self.resolved), self._bound_state(), settings.session
        assert session is not None  # a calibration makes a boundary
        state.find_group(settings.group)
        if self._unprepared(recipe):
            state.prepare(settings.asked_of)
        specs = dict(quantizers.predicted(recipe))
        for door, tensor in ((quantizers.input, input), (quantizers.weight, weight)):
            if (spec := specs[door]) is not None:
                session.note(door.calibrated(tensor, spec))
        if (spec := specs[quantizers.grad_output]) is not None:
            observe_grad_output(y, quantizers.grad_output, spec, session.note)
        session.touch(state)
        return y

    def _save_to_state_dict(self, *where: Any) -> None:
        self.scaling_state.settle()
        super()._save_to_state_dict(*where)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.scaling_state.graded = ()
        for kind in ("weight", "bias"):  # a tensor for each projection becomes one
            names = [f"{prefix}{one.name}_{kind}" for one in self.projections]
            if kind in self._parameters and names and all(name in state_dict for name in names):
                state_dict[f"{prefix}{kind}"] = torch.cat([_whole(state_dict.pop(name)) for name in names])
        decode_codes(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """That of the class behind this one, and the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "last_call": None, "plans": {}, "exchange": None}  # a copy has run nothing


_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def _refuse_shape(name: str, input: Tensor, weight: Tensor) -> NoReturn:
    raise ValueError(
        f"{name or 'Linear'}: got an input of shape {tuple(input.shape)} in {input.layout}; needs a dense one of "
        f"(..., {weight.shape[-1]})"
    )


def ready_input(layer: Layer, input: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """The input in the dtype of torch.autocast; without autocast its dtype must be the weight's.

    Raises:
        TypeError: the dtypes differ.  ValueError: one of the tensors has no memory; the input is sparse or a number.
    """
    if weight.is_meta != input.is_meta:
        raise ValueError(
            f"{layer.name or 'Linear'}: got input on {input.device} for a weight on {weight.device}; needs one device. "
            "model.to_empty(device=...) gives a model memory, and load_state_dict numbers"
        )
    if not input.ndim or input.layout in _SPARSE:
        _refuse_shape(layer.name, input, weight)
    device = input.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # not by `autocast_dtype`: a warm step counts its calls
        call.dtype = torch.get_autocast_dtype(device)
        return input if call.produce is not None else input.to(call.dtype)  # a norm reads the input in its own dtype
    if weight.dtype != input.dtype or (bias is not None and bias.dtype != input.dtype):
        _refuse_mixed(layer.name, input, weight, bias)
    if input.dtype == torch.float32 and call.first and not torch.compiler.is_compiling():
        # Python shows the same warning from the same place once, so a model of 200 layers shows it once; and again
        # behind any `catch_warnings`, as pandas has many, so it belongs to a layer's first call
        warnings.warn(
            f"recipe {call.recipe.name!r} is running on float32 inputs: casts read twice the bytes and all that is not "
            "a GEMM stays in float32, which can make FP8 slower than BF16 (TransformerEngine #1119: 104 ms against "
            "44.6 ms). Use model.bfloat16() with bfloat16 inputs, or run the forward under torch.autocast(device_type, "
            "torch.bfloat16)",
            stacklevel=2,
        )
    return input


def invariant_producer(produce: Producer | None) -> Producer | None:
    """The Producer with rows that depend on no other row."""
    made = getattr(produce, "batch_invariant", None)
    return produce if made is None else made()


def autocast_dtype(input: Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast gives the operands of a linear; None: autocast is off."""
    device = input.device.type
    # torch.autocast knows no meta device
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def autocast_input(input: Tensor) -> Tensor:
    """The input in the dtype of torch.autocast, where that is on."""
    dtype = autocast_dtype(input)
    return input if dtype is None else input.to(dtype)


def _torchs_own(recipe: Recipe, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a layer in high precision runs torch's linear although another BF16 GEMM is faster here."""
    dtype = autocast_dtype(input)
    if recipe is TORCHS_OWN or (dtype or input.dtype) != torch.bfloat16:
        return True
    given = [t for t in (input, weight, bias) if t is not None]
    return not all(is_plain(t) and (dtype is not None or t.dtype == input.dtype) for t in given)


def _refuse_mixed(name: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for what, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and (dtype := parameter.dtype) != input.dtype:
            raise TypeError(
                f"{name or 'Linear'}: got {input.dtype} input for a {dtype} {what}; needs one dtype. Cast the "
                f"input (x.to({dtype})) or the layer, or run the forward under torch.autocast, which casts both"
            )


def recomputing() -> bool:
    """Whether this forward runs inside a backward: torch.utils.checkpoint repeats it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Linear(Layer, nn.Linear):
    """`torch.nn.Linear` under a recipe.

    Args:
        recipe: a Recipe or its name; the other arguments are torch's.
    Shapes: input (..., in_features) -> (..., out_features), any sizes; the layer zero-pads sizes where hardware needs
        multiples. dtypes: float32, bfloat16, float16; under torch.autocast it first casts the input, as torch does.
    Raises:
        ValueError: unknown recipe.
        TypeError: outside torch.autocast, an input whose dtype is not the weight's; torch raises there, too.
        NotImplementedError: a second derivative of a layer that did not run torch's linear.
    Edge cases: `autocast(enabled=False)` runs torch's linear, bit for bit. So does a recipe (or an override) in high
        precision, with one exception: if another BF16 GEMM is faster than torch's on this CPU (mostly one without BF16
        units), that GEMM multiplies plain BF16 tensors in eager code, with fp32 sums and one rounding, and the receipt
        names it. Recomputation by torch.utils.checkpoint uses the recipe of the layer's last forward.

    Example:
        >>> import ottava
        >>> layer = ottava.nn.Linear(64, 32, recipe="tensorwise", dtype=torch.bfloat16)
        >>> layer(torch.ones(2, 64, dtype=torch.bfloat16)).shape, list(layer.state_dict())
        (torch.Size([2, 32]), ['weight', 'bias'])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "tensorwise",
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.adopt(get_recipe(recipe), name="")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


class LayerView(Layer):
    """One matrix of a parameter of `owner`, as a layer.

    Args:
        owner: the module that holds the parameters, under the names below.
        weight: name of the parameter.
        bias: name of the bias, or None.
        piece: its part of the first dimension of both: a number (one matrix), a slice (some rows), or None: all.
        turned: whether the owner keeps the matrix as (K, N).
        of_bias: its third of the bias, if three weights share a bias; None: the same piece as of the weight.

    The owner calls `run` with views of a whole stack that it makes at once: the backward of separate views would make a
    gradient of the size of the stack for each.

    Example:
        >>> attention = nn.MultiheadAttention(64, 2)
        >>> part = LayerView(attention, "in_proj_weight", "in_proj_bias", slice(64, None))
        >>> part.out_features, part.in_features, part.bias.shape, list(part.parameters())
        (128, 64, torch.Size([128]), [])
    """

    def __init__(
        self,
        owner: nn.Module,
        weight: str,
        bias: str | None,
        piece: int | slice | None,
        *,
        turned: bool = False,
        of_bias: int | None = None,
    ) -> None:
        super().__init__()
        # the owner's dict: a copy, a pickle or a new parameter in its place keeps the two together
        self.held, self.names, self.piece, self.turned = owner._parameters, (weight, bias), piece, turned
        self.of_bias = of_bias
        self.first: int | None = None
        """The first piece of a stack that this rank holds; None: this process holds all."""
        self.share = 1.0
        """The number of the model's rows that this layer expects."""

    @property
    def parameter(self) -> Tensor:
        """The parameter that holds the weight."""
        held: Tensor | None = self.held[self.names[0]]
        assert held is not None
        return held

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a layer's own is an attribute
        """(N, K)."""
        whole, piece = self.parameter, self.piece
        if isinstance(piece, int) and self.first is not None:  # each rank holds some of the stack
            whole, piece = local(whole), piece - self.first
            if not 0 <= piece < len(whole):  # another rank's: its shape, without memory
                whole, piece = whole.new_zeros(()).expand(1, *whole.shape[1:]), 0
        matrix = whole if piece is None else whole[piece]
        return matrix.t() if self.turned else matrix

    @property
    def bias(self) -> Tensor | None:
        """(N,) or None."""
        whole = None if self.names[1] is None or self.first is not None else self.held[self.names[1]]
        if whole is None or (self.piece is None and self.of_bias is None):
            return whole
        return whole[self.piece] if self.of_bias is None else whole.chunk(3)[self.of_bias]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """N."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """K."""
        return self.weight.shape[1]

    def extra_repr(self) -> str:
        """Shape and recipe."""
        return f"{self.in_features} -> {self.out_features} of {self.names[0]}, recipe={self.recipe.name}"


class ViewOwner(nn.Module):
    """A module whose parameters have parts that are layers."""

    def bind(self, parts: Iterable[LayerView]) -> None:
        """Gives parts without a state (made by hand, or unpickled) one state, for their owner."""
        if torch.compiler.is_compiling() or any(not part.scaling_state.bound for part in parts):
            self._bind()

    @constant_in_graph  # a method without arguments: Dynamo of torch 2.11 takes no module as an argument of a constant
    def _bind(self) -> None:
        if any(not part.scaling_state.bound for part in self.modules() if isinstance(part, LayerView)):
            make_state(self)


def make_state(owner: nn.Module) -> None:
    """One state for the layers of a module; inside DDP of the wrapped model, so all ranks have the same layers."""
    wrapper = ddp_around([owner])
    ScalingState(owner if wrapper is None else wrapper.module)


def rows_of(layer: nn.Module, tokens: int) -> int:
    """The number of a forward's tokens that a layer expects; for predictions of speed."""
    return max(1, round(tokens * layer.share)) if isinstance(layer, LayerView) else tokens
