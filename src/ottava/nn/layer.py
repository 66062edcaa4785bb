"""The forward of a quantized layer: it finds the recipe, informs the scaling state, and hands a `Call` to the formulas.

A layer is this class and a shape: `Linear` adds torch's constructor and nothing else. Its `produce` runs in front of
the cast, its `exchange` between cast and GEMM (see `functional`), and its `formula` multiplies the operands. This file
has no branch for any of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ottava.engine.autocast import AMBIENT, TORCHS_OWN, Ambient, ambient, traced_ambient
from ottava.engine.functional import Call, Exchange, Producer, build_ahead, linear, observe_grad_output, produced
from ottava.engine.groups import ddp_around
from ottava.engine.layer import QuantizedLayer
from ottava.engine.quantizer import LinearQuantizers
from ottava.engine.state import ScalingState
from ottava.kernels.custom_operator import constant_in_graph
from ottava.kernels.gate import is_plain
from ottava.nn.invariant import invariant_producer
from ottava.nn.pieces import Piece, joined_form
from ottava.ops.dispatch import torch_is_beaten
from ottava.recipe import Recipe
from ottava.weights.checkpoint import decode_codes
from ottava.weights.operands import in_high_precision
from ottava.weights.parameter import QuantizedWeight


class Layer(QuantizedLayer):
    """The base class of all quantized layers."""

    produce: Producer | None = None
    """Makes the rows in front of every forward, with or without a cast; None: the rows are the input."""
    exchange: Exchange | None = None
    """Gathers operands between cast and GEMM; None: this rank has all of them."""
    sharding: Any = None
    """A `nn.sharding.Sharding` if the weight is split over ranks."""
    returns_bias: bool = False
    """Whether the caller adds the bias to what `forward` returns."""
    pieces: tuple[Piece, ...] = ()
    """The weights that lie below each other in this one: q, k and v, or gate and up."""
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
            call = Call(
                self.quantizers, settings.recipe_for(self.name, self.resolved), None, None, self.produce, self.exchange
            )
            lent = isinstance(weight, QuantizedWeight) and weight.lent is not None
            apart = lent or settings.session is not None or settings.batch_invariant
            apart = apart or (settings.recipe is None and settings.accumulator is not None)
            apart = apart or call.recipe.fprop.batch_invariant
            if apart or self.sharding is not None or self._unprepared(call.recipe):
                from ottava.nn.compile import uncompiled  # it imports Dynamo, which is loaded: it is tracing

                return uncompiled(self, input, weight, bias, *more)  # type: ignore[no-any-return]  # torch.compiler.disable is untyped
            self._note_compiled()
        else:
            settings = AMBIENT.get()
            call = self.begin_call(input, settings)
            if settings.calibrating:
                return self._calibrate(input, weight, bias, settings, *more)
        if (
            not call.recipe.casts
            and self.exchange is None
            and not isinstance(weight, QuantizedWeight)  # torch's linear would keep the decoded numbers for backward
            and (
                torch.compiler.is_compiling()
                or not (input.is_cpu and torch_is_beaten())
                or _torchs_own(call.recipe, input, weight, bias)
            )
        ):
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
            shape = tuple(input.shape)
            made = self.produce if not recipe.fprop.batch_invariant else invariant_producer(self.produce)
            call = Call(self.quantizers, recipe, self.plans, shape, made, self.exchange, training=training, before=call)
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
        if _recomputing() and (settings.session is not None or state.moved_by_autocast):
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
            wrapper = ddp_around([self])
            # inside DDP the model is the wrapped module, so all ranks have one state of the same layers
            ScalingState(self if wrapper is None else wrapper.module)
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
        if (dtype := autocast_dtype(input)) is not None:
            input = input.to(dtype)
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
        joined_form(self, state_dict, prefix)
        decode_codes(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "last_call": None, "plans": {}, "exchange": None}  # a copy has run nothing


def ready_input(layer: Layer, input: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """The input in the dtype of torch.autocast; without autocast its dtype must be the weight's.

    Raises:
        TypeError: the dtypes differ.  ValueError: one of the tensors has no memory.
    """
    if weight.is_meta != input.is_meta:
        raise ValueError(
            f"{layer.name or 'Linear'}: got input on {input.device} for a weight on {weight.device}; needs one device. "
            "model.to_empty(device=...) gives a model memory, and load_state_dict numbers"
        )
    device = input.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        call.dtype = torch.get_autocast_dtype(device)
        return input if call.produce is not None else input.to(call.dtype)  # a norm reads the input in its own dtype
    if weight.dtype != input.dtype or (bias is not None and bias.dtype != input.dtype):
        _refuse_mixed(layer.name, input, weight, bias)
    if input.dtype == torch.float32 and not torch.compiler.is_compiling():
        _warn_fp32(call.recipe.name)
    return input


def autocast_dtype(input: Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast gives the operands of a linear; None: autocast is off."""
    device = input.device.type
    # torch.autocast knows no meta device
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


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


def _recomputing() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _warn_fp32(recipe: str) -> None:
    # Python shows the same warning from the same place once, so a model of 200 layers shows it once
    warnings.warn(
        f"recipe {recipe!r} is running on float32 inputs: casts read twice the bytes and all that is not a GEMM stays "
        "in float32, which can make FP8 slower than BF16 (TransformerEngine #1119: 104 ms against 44.6 ms). Use "
        "model.bfloat16() with bfloat16 inputs, or run the forward under torch.autocast(device_type, torch.bfloat16)",
        stacklevel=3,
    )
