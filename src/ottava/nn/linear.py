"""A Linear whose three GEMMs run as a recipe says, and is in every other way `torch.nn.Linear`.

It is a real subclass with the same Parameters, so optimizers, PEFT, FSDP, checkpoints and `isinstance` see what they
know. Its own recipe comes from `convert` or the constructor; an `autocast` around the call has the last word.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ottava.ambient import Ambient, ambient, traced_ambient
from ottava.functional import build_ahead, linear, observe_grad_output
from ottava.kernels.custom_operator import constant_in_graph
from ottava.ops import GemmRecord
from ottava.quantizer import LinearQuantizers
from ottava.ranks import ddp_around
from ottava.recipe import Recipe, get_recipe
from ottava.state import ScalingState


class LastCall:
    """What a layer's last forward and backward ran; filled by the engine, read by `receipt`.

    training: whether it was a training forward: one in grad mode that was no calibration.
    before: the layer's call before this one, of which the last training call is kept: evaluation must not hide it.
    """

    __slots__ = ("high_precision_bytes", "input_shape", "recipe", "records", "saved_bytes", "trained", "training")

    def __init__(
        self, recipe: Recipe, input_shape: tuple[int, ...] | None, *, training: bool, before: LastCall | None
    ) -> None:
        self.recipe = recipe
        self.training = training
        self.trained = None if training or before is None else before.last_training
        self.input_shape = input_shape  # None: the call was compiled, and is not seen when it runs
        self.records: dict[str, GemmRecord] = {}
        self.saved_bytes = self.high_precision_bytes = 0

    @property
    def last_training(self) -> LastCall | None:
        """This call if it was one of training, else the last one that was."""
        return self if self.training else self.trained

    def gemm(self, name: str, record: GemmRecord) -> None:
        """Keeps the record of one GEMM."""
        self.records[name] = record

    def saved(self, nbytes: int, high_precision: int) -> None:
        """Keeps the bytes that wait for backward, and what torch's own linear would keep."""
        self.saved_bytes, self.high_precision_bytes = nbytes, high_precision


class Linear(nn.Linear):
    """`torch.nn.Linear` under a recipe.

    Args:
        recipe: a Recipe or its name; the other arguments are torch's.
    Shapes: input (..., in_features) -> (..., out_features), any sizes; what hardware wants in multiples is zero-padded
        inside. dtypes: float32, bfloat16, float16; under torch.autocast the input is cast first, as torch does.
    Raises:
        ValueError: unknown recipe.
        TypeError: outside torch.autocast, an input whose dtype is not the weight's; where torch raises, too.
    Edge cases: a recipe (or an override) that is high precision runs torch's own linear, bit for bit. Recomputation by
        torch.utils.checkpoint uses the recipe of the layer's last forward.

    Example:
        >>> import ottava
        >>> layer = ottava.nn.Linear(64, 32, recipe="tensorwise", dtype=torch.bfloat16)
        >>> layer(torch.ones(2, 64, dtype=torch.bfloat16)).shape, list(layer.state_dict())
        (torch.Size([2, 32]), ['weight', 'bias'])
    """

    recipe: Recipe
    """As given to `convert`, overrides included."""
    resolved: Recipe
    """The recipe with this layer's overrides applied."""
    name: str
    """Full name in the converted model, which override patterns are matched against."""
    quantizers: LinearQuantizers
    last_call: LastCall | None
    scaling_state: ScalingState
    """When predicted scales move on; shared by the layers of a model."""

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

    def adopt(self, recipe: Recipe, name: str) -> None:
        """Takes a recipe and its full name in the model; `convert` calls it on a layer whose class it has changed."""
        if not isinstance(getattr(self, "quantizers", None), LinearQuantizers):
            self.quantizers = LinearQuantizers()
        self.recipe, self.name, self.last_call = recipe, name, None
        if getattr(self, "scaling_state", None) is None:
            self.scaling_state = ScalingState(None)
        self.resolved = recipe.for_layer(name)
        self.quantizers.prepare(self.resolved, self.weight.device)
        if self.weight.device.type == "cpu" and self.resolved.quantized:
            build_ahead(self.weight.dtype)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's; refuses to make a plain parameter a DTensor, which is how tensor parallelism begins. FSDP2 does
        not come this way.

        Raises:
            TypeError: it would.
        """
        if hasattr(param, "device_mesh") and not hasattr(self._parameters.get(name), "device_mesh"):
            raise TypeError(
                f"{self.name or 'Linear'}.{name}: got a DTensor for a layer under recipe {self.recipe.name!r}: FP8 "
                "under tensor parallelism is not supported. Call parallelize_module before ottava.convert, "
                "which then leaves such layers in BF16 and says so; or shard with torch.distributed.fsdp.fully_shard"
            )
        super().register_parameter(name, param)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        said = ambient()
        after_backward = None
        if torch.compiler.is_compiling():
            log, recipe = None, said.recipe_for(self.name, self.resolved)
            if said.session is not None or self._unprepared(recipe):
                from ottava.nn.compile import uncompiled  # it imports Dynamo, which is here already: it is tracing

                return uncompiled(self, input)  # type: ignore[no-any-return]  # torch.compiler.disable is untyped
            self._note_compiled()
        else:
            log = self._begin_call(input, said)
            recipe = log.recipe
            if said.calibrating:
                return self._calibrate(input, said)
            if torch.is_grad_enabled():
                after_backward = self._announce(recipe, input, said)
        if not (recipe.fprop.quantized or recipe.dgrad.quantized or recipe.wgrad.quantized):
            return nn.functional.linear(input, self.weight, self.bias)
        if (dtype := _autocast_dtype(input)) is not None:
            input = input.to(dtype)
        else:
            _refuse_mixed(self.name, input, self.weight, self.bias)
            if input.dtype == torch.float32 and log is not None:
                _warn_fp32(recipe.name)
        return linear(input, self.weight, self.bias, self.quantizers, recipe, log=log, after_backward=after_backward)

    def _unprepared(self, recipe: Recipe) -> bool:
        if not (recipe.predicted and torch.is_grad_enabled()):
            return False
        doors = self.quantizers.predicted(recipe)  # mostly one object: comparing specs by their fields takes longer
        return any(spec is not None and door.spec is not spec and door.spec != spec for door, spec in doors)

    def _begin_call(self, input: Tensor, said: Ambient) -> LastCall:
        # A forward inside a backward is a recomputation (torch.utils.checkpoint): it must repeat its forward, whatever
        # autocast has been entered or left since, and is part of the same call.
        training = torch.is_grad_enabled() and not said.calibrating
        before = self.last_call
        if before is not None and _recomputing():
            before.training |= training  # checkpoint(use_reentrant=True) runs its first forward without grad mode
            return before
        recipe = said.recipe_for(self.name, self.resolved)
        call = LastCall(recipe, tuple(input.shape), training=training, before=before)
        vars(self)["last_call"] = call  # past nn.Module.__setattr__, which looks for parameters first
        return call

    @constant_in_graph  # runs while tracing: a side effect in the graph would forbid checkpointing
    def _note_compiled(self) -> None:
        recipe = traced_ambient().recipe_for(self.name, self.resolved)
        self.last_call = LastCall(recipe, None, training=torch.is_grad_enabled(), before=self.last_call)

    def _announce(self, recipe: Recipe, input: Tensor, said: Ambient) -> Callable[[], None] | None:
        """Tells the scaling state, and an autocast that is a boundary of its own, that predicted scales are used."""
        if not recipe.predicted:
            if self.weight.device.type not in ("cpu", "meta"):
                self._bound_state().listen(moves=False)  # where a kept cast of the weight is out of date
            return None
        state = self._bound_state()
        if self._unprepared(recipe):
            state.prepare(said.asked_of)
        if _recomputing() and (said.session is not None or state.moved_by_autocast):
            raise RuntimeError(
                f"{self.name or 'Linear'}: with autocast(update='autocast') scales change between a forward and its "
                "recomputation by torch.utils.checkpoint. Use update='step', which every recomputation agrees with"
            )
        state.saw_forward(self.weight, said.group, moved_by_autocast=said.session is not None)
        if said.session is None:
            return state.after_backward
        said.session.touch(state)
        has_backward = any(t is not None and t.requires_grad for t in (input, self.weight, self.bias))
        return partial(said.session.close, "backward") if has_backward and said.session.claim_backward() else None

    def _bound_state(self) -> ScalingState:
        if not self.scaling_state.bound:  # a layer made by hand, or unpickled
            wrapper = ddp_around([self])
            # its model is what DDP wraps, so that all ranks have one state of the same layers; else the layer itself
            ScalingState(self if wrapper is None else wrapper.module)
        return self.scaling_state

    def _calibrate(self, input: Tensor, said: Ambient) -> Tensor:
        """torch's own linear; each door notes the amax of the tensor that it would cast."""
        y = nn.functional.linear(input, self.weight, self.bias)
        quantizers = self.quantizers
        if (dtype := _autocast_dtype(input)) is not None:
            input = input.to(dtype)
        recipe, state = said.asked_of(self.name, self.resolved), self._bound_state()
        state.find_group(said.group)
        if self._unprepared(recipe):
            state.prepare(said.asked_of)
        specs = dict(quantizers.predicted(recipe))
        for door, tensor in ((quantizers.input, input), (quantizers.weight, self.weight)):
            if (spec := specs[door]) is not None:
                door.calibrate(tensor, spec)
        if (spec := specs[quantizers.grad_output]) is not None:
            observe_grad_output(y, quantizers.grad_output, spec)
        if said.session is not None:
            said.session.touch(state)
        return y

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        """torch's, and the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "last_call": None}  # a copy has run nothing


def _autocast_dtype(input: Tensor) -> torch.dtype | None:
    device = input.device.type
    # torch.autocast knows no meta device
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def _refuse_mixed(name: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for what, own in (("weight", weight), ("bias", bias)):
        if own is not None and own.dtype != input.dtype:
            raise TypeError(
                f"{name or 'Linear'}: got {input.dtype} input for a {own.dtype} {what}; needs one dtype. Cast the "
                f"input (x.to({own.dtype})) or the layer, or run the forward under torch.autocast, which casts both"
            )


def _recomputing() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _warn_fp32(recipe: str) -> None:
    # Python shows a warning of one text and place once, so a model of 200 layers says it once.
    warnings.warn(
        f"recipe {recipe!r} is running on float32 inputs: casts read twice the bytes and all that is not a GEMM stays "
        "in float32, which can make FP8 slower than BF16 (TransformerEngine #1119: 104 ms against 44.6 ms). Use "
        "model.bfloat16() with bfloat16 inputs, or run the forward under torch.autocast(device_type, torch.bfloat16)",
        stacklevel=3,
    )
