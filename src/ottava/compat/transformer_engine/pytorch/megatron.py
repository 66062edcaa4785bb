"""What Megatron asks of a TransformerEngine module besides its numbers: gradients, random states, shards.

fuse_wgrad_accumulation    main_grad (N, K) += dw, from the sums of the GEMM, which round to main_grad's dtype
delay_wgrad_compute        backward makes dx; dw when somebody calls backward_dw()
get_rng_state_tracker      initial weights and attention's dropout draw from a state of this rank
tp_group, tp_size          each rank builds its shard of a module, as plain parameters

`nn.sharding` runs the shards: ranks exchange codes, and scales are those of the whole tensors. Each rank holds some
parameters whole, but computes their gradients from its own tokens only. As with TransformerEngine, the trainer must sum
these gradients; their parameters have the attribute `sequence_parallel`, True. Split weights have the attributes
`tensor_model_parallel` and `partition_dim`.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from ottava.compat.transformer_engine.common.recipe import DecodedRecipe
from ottava.compat.transformer_engine.pytorch.quantization import FP8GlobalStateManager, debug_tool, quantizer_of_weight
from ottava.compat.transformer_engine.pytorch.refused import refuse
from ottava.compat.transformer_engine.pytorch.state import Advising, TEState
from ottava.compat.transformer_engine.pytorch.tensors import QuantizedTensor as TheirTensor
from ottava.compat.transformer_engine.pytorch.tensors import cast_rows_alone
from ottava.engine.autocast import AMBIENT
from ottava.nn.layer import Layer, recomputing
from ottava.nn.sharding import Sharding
from ottava.numerics.tensor import QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.weights.parameter import QuantizedWeight

Run = Callable[[torch.dtype], Tensor]
"""Multiplies the operands of dw and returns it in a dtype."""


_OWN = ("fuse_wgrad_accumulation", "delay_wgrad_compute", "get_rng_state_tracker", "rng_tracker_name")


class Extras(NamedTuple):
    """What a constructor starts from."""

    given: dict[str, Any]
    """Its arguments, without the module itself."""
    before: tuple[Tensor, ...]
    """Random states of the CPU and the GPU in front of it."""

    def initial(self) -> AbstractContextManager[Any]:
        """`drawn`, for initial weights: as if ottava's constructor, whose values they replace, had drawn nothing."""
        for state, give in zip(self.before, (torch.set_rng_state, torch.cuda.set_rng_state), strict=False):
            give(state)
        return self.drawn()

    def drawn(self) -> AbstractContextManager[Any]:
        """Draws from the tracker's state inside."""
        tracker, state = (self.given.get(name) for name in _OWN[2:])
        if tracker is None:
            return nullcontext()
        return tracker().fork(*(() if state is None else (state,)))  # type: ignore[no-any-return]  # a script's own


def extras_of(where: str, given: Mapping[str, Any]) -> Extras:
    """The settings in a constructor's locals(); `refuse` sees `others`, without those of this file.

    Example:
        >>> extras_of("Linear", {"others": {"fuse_wgrad_accumulation": True, "name": "fc1"}}).given
        {'fuse_wgrad_accumulation': True, 'name': 'fc1'}
    """
    given = {name: one for name, one in given.items() if name not in ("self", "where", "__class__")}
    others = given.pop("others")
    refuse(where, {name: value for name, value in others.items() if name not in _OWN}, (*given, *_OWN))
    before = (torch.get_rng_state(), *((torch.cuda.get_rng_state(),) if torch.cuda.is_initialized() else ()))
    return Extras({**given, **others}, before)


class WeightGradients(Advising):
    """A module that may add its weights' gradients to `main_grad`, and may make them later."""

    fuse_wgrad_accumulation = False
    save_original_input = False
    """Megatron sets it; it changes nothing: backward reads codes that the forward has made, as it must."""
    is_first_forward: bool | None = None
    """is_first_microbatch of the last forward."""
    delays = False
    _shared_under: Any = None
    """The recipe of the last forward with is_first_microbatch."""
    _told: Any = None
    """The recipe of the last forward whose autocast was compared with that of stored weights."""

    def gives(self, extras: Extras) -> None:
        """Takes the settings. A constructor calls this after it has built its layers."""
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        self.fuse_wgrad_accumulation, self.delays = (bool(extras.given.get(name)) for name in _OWN[:2])
        self.remembers(extras.given)
        self._waiting: list[deque[Callable[[], None]]] = []
        self._workspaces: dict[str, Any] = {}
        if not (self.fuse_wgrad_accumulation or self.delays):
            return
        for layer in (module for module in self.modules() if isinstance(module, Layer)):
            self._waiting.append(deque())
            layer.takes_dw = partial(_take, self, layer, self._waiting[-1])
            if self.delays:  # Megatron's hooks then wait for `backward_dw`
                layer.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def begins(self, is_first_microbatch: bool | None) -> None:
        """Notes which micro-batch a forward reads. The first one of a step moves predicted scales.

        Megatron's optimizers step copies of the weights, so that no hook of an optimizer tells of the step's end.
        """
        self.is_first_forward = is_first_microbatch
        self._tell_of_another_recipe()
        layers = [module for module in self.modules() if isinstance(module, Layer)]
        for layer in layers if isinstance(AMBIENT.get().recipe, DecodedRecipe) else ():
            if "_decodes" not in vars(layer):  # its doors cast rows alone, and decode rows in place of columns
                vars(layer)["_decodes"] = True
                for tensor, door in layer.quantizers.named_children():
                    door.register_forward_hook(partial(_decoded, layer, tensor))
        if is_first_microbatch is not None and FP8GlobalStateManager.is_fp8_enabled():
            self._shared_under = FP8GlobalStateManager.get_fp8_recipe()
            for name, shared in self._workspaces.items() if is_first_microbatch else ():
                shared.quantize_(self._named_layers()[name].weight.detach())
        first = is_first_microbatch is True
        looks = debug_tool() is not None and debug_tool().on  # such a script may have no optimizer, and reads scales
        if not (first or looks) or not self.training or recomputing():
            return
        for layer in layers if first else ():
            layer.quantizers.weight.stepped()
        for state in dict.fromkeys(layer.scaling_state for layer in layers):
            if state.bound and state.predicts and not state.moved_by_autocast and (first or state.without_steps):
                state.update()

    def _named_layers(self) -> dict[str, Layer]:
        """Each layer, by the name of its weight in TransformerEngine."""
        found = {path: layer for path, layer in self.named_modules() if isinstance(layer, Layer)}
        return {
            f"weight{path[7:]}" if path.startswith("groups.") else f"{path}_weight".lstrip("_"): layer
            for path, layer in found.items()
        }

    def _get_weight_quantizers(self) -> list[Any]:
        """For each weight a quantizer that casts as the recipe of the autocast; None: outside of one."""
        recipe = FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None
        return [recipe and quantizer_of_weight(recipe, one) for one in self._named_layers().values()]

    @property
    def _fp8_workspaces(self) -> dict[str, Any]:
        """The casts of weights that micro-batches share (none before a forward with is_first_microbatch, or of weights
        stored as codes), cast anew with each step's first one. A door keeps the same codes in ottava's layout."""
        for name, layer in self._named_layers().items() if self._shared_under is not None else ():
            if name not in self._workspaces and not isinstance(layer.weight, QuantizedWeight | TheirTensor):
                own = quantizer_of_weight(self._shared_under, layer)
                self._workspaces[name] = own.quantize(layer.weight.detach())
        return self._workspaces

    def _tell_of_another_recipe(self) -> None:
        """Warns if weights were stored under one recipe, and a new autocast runs them under another."""
        now = AMBIENT.get()
        if self._told is now.recipe or not now.enabled or now.recipe is None:
            return
        self._told = now.recipe
        alone = not getattr(FP8GlobalStateManager.get_fp8_recipe(), "reduce_amax", True)
        for layer in (one for one in self.modules() if isinstance(one, Layer)):
            if alone and layer.sharding is not None:
                why = "is not in ottava where ranks share a tensor (tp_size): the codes that they send need one scale"
                raise NotImplementedError(f"{type(self).__name__}: reduce_amax=False {why}. Set it to True")
            if isinstance(layer.weight, QuantizedWeight) and layer.recipe not in (None, now.recipe):
                text = "Quantizer is being updated, this may affect model behavior: weights were stored under "
                warnings.warn(f"{text}{layer.recipe.name} with other settings; give both one recipe", stacklevel=4)
                return

    def need_backward_dw(self) -> bool:
        """Whether the gradients of weights wait for `backward_dw`."""
        return self.delays

    def backward_dw(self) -> None:
        """Makes the gradients of the weights for the first backward that still waits; does nothing without one.

        Raises:
            RuntimeError: no backward waits.
        """
        if not self.delays:
            return
        if not any(self._waiting):
            raise RuntimeError(
                f"{type(self).__name__}.backward_dw: no backward waits for its weight gradients; call it once after "
                "each backward"
            )
        for waiting in self._waiting:
            if waiting:
                waiting.popleft()()
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: Any) -> None:
        """Calls a function after each `backward_dw`."""
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)


def _decoded(layer: Layer, tensor: str, door: nn.Module, args: Any, both: Any) -> Any:
    row, col = both
    recipe = None if layer.last_call is None else layer.last_call.recipe
    if not isinstance(recipe, DecodedRecipe):
        return None
    x = args[0].detach()
    if (tensor, "row") in recipe.rows_alone and isinstance(row, QuantizedTensor):
        row = cast_rows_alone(x, row.spec)
    if tensor in recipe.decoded and isinstance(row, QuantizedTensor) and col is not None:
        x = row.dequantize(col.dtype)
        col = x.t() if isinstance(col, Tensor) else quantize(x.t().contiguous(), col.spec)
    if (tensor, "col") in recipe.rows_alone and isinstance(col, QuantizedTensor):
        col = cast_rows_alone(x.t(), col.spec)
    return row, col


def _take(owner: WeightGradients, layer: Layer, waiting: deque[Callable[[], None]], run: Run) -> Tensor | None:
    """Stands in a layer's backward where dw is made."""
    fuse, overwrite = owner.fuse_wgrad_accumulation, owner.is_first_forward is True
    if owner.delays:
        waiting.append(partial(_put_later, layer, run, fuse, overwrite))
        return None
    return _add_to_main(layer, run, overwrite)


def _put_later(layer: Layer, run: Run, fuse: bool, overwrite: bool) -> None:
    with torch.no_grad():
        if fuse:
            _add_to_main(layer, run, overwrite)
        else:
            own = run(layer.weight.dtype)
            layer.weight.grad = own if layer.weight.grad is None else layer.weight.grad.add_(own)


def _add_to_main(layer: Layer, run: Run, overwrite: bool) -> Tensor | None:
    """Adds dw to main_grad. Returns zeros for autograd, if the parameter says that its trainer looks for them."""
    parameter: Any = layer.weight
    main = parameter.get_main_grad() if hasattr(parameter, "get_main_grad") else getattr(parameter, "main_grad", None)
    if main is None:
        raise RuntimeError(
            f"fuse_wgrad_accumulation: {layer.name or type(layer).__name__} has a weight {tuple(parameter.shape)} "
            "without main_grad; give it a tensor of that shape, as Megatron's DistributedDataParallel does, or leave "
            "fuse_wgrad_accumulation out"
        )
    own, place = run(main.dtype), main.view(parameter.shape)
    if overwrite or getattr(parameter, "overwrite_main_grad", False):
        place.copy_(own)
    else:
        place.add_(own)
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return get_dummy_wgrad(own.shape, layer.weight.dtype, device=own.device)


def get_dummy_wgrad(
    shape: Sequence[int], dtype: torch.dtype, zero: bool = False, *, device: torch.device | str | None = None
) -> Tensor:
    """What autograd gets in place of a gradient that lies in main_grad: zeros; TransformerEngine's are not written.

    device: None: the GPU, or without one the CPU.
    """
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.zeros(tuple(shape), dtype=dtype, device=default if device is None else device)


# --- tensor parallelism -----------------------------------------------------------------------------------------------


MODES = (None, "column", "row")


class Shards(NamedTuple):
    """How the ranks of a group share a module."""

    where: str
    """The module's class, for errors."""
    group: dist.ProcessGroup | None = None
    """None: this rank holds the whole module, or `set_tensor_parallel_group` gives the group later."""
    size: int = 1
    """Number of ranks."""
    sequence: bool = False
    """Whether each rank holds a part of the tokens (the first dimension) between the split linears."""

    def of(self, what: str, count: int) -> int:
        """This rank's share of heads or features.

        Raises:
            ValueError: the ranks cannot share them evenly.

        Example:
            >>> Shards("MultiheadAttention", size=2).of("heads", 12)
            6
        """
        if count % self.size:
            raise ValueError(f"{self.where}: got {what}={count} for {self.size} ranks; needs a multiple")
        return count // self.size


def shards_for(
    where: str, tp_group: dist.ProcessGroup | None, tp_size: int, sequence_parallel: bool, *, split: bool
) -> Shards:
    """Checks the arguments for tensor parallelism, and returns them as `Shards`.

    Args:
        split: whether a parallel mode is set.
    Raises:
        TypeError: tp_group is no group.  ValueError: tp_size is no number of ranks.
        NotImplementedError: there are several ranks, but no parallel mode is set.
    """
    if tp_group is not None and not isinstance(tp_group, dist.ProcessGroup):
        raise TypeError(f"{where}: tp_group={tp_group!r} is no process group; torch.distributed.new_group makes one")
    size = tp_size if tp_group is None else dist.get_world_size(tp_group)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{where}: got tp_size={size!r}; needs the number of ranks, 1 or more")
    if size > 1 and not split and where not in ("Linear", "LayerNormLinear", "DotProductAttention"):
        raise NotImplementedError(
            f"{where}: {size} ranks with set_parallel_mode=False are not in ottava; use set_parallel_mode=True"
        )
    if not split:
        return Shards(where)
    return Shards(where, tp_group if size > 1 else None, size, bool(sequence_parallel) and size > 1)


class Sharded(TEState, WeightGradients):
    """A TransformerEngine module. Each rank of a group may hold a shard of it."""

    def finish(self, extras: Extras, shards: Shards, *keys: Any, mode: Any = "column") -> None:
        """What a constructor does after it has built its layers: keys of TransformerEngine, as `uses_their_keys` takes
        them, names of the layers, initial values, this rank's share, and the settings of `extras`."""
        self.uses_their_keys(*keys)
        self.names_layers(extras.given.get("name"))
        with extras.initial():
            self.starts(extras.given["init_method"], extras.given.get("output_layer_init_method"))
        self.share(shards, mode)
        self.gives(extras)

    def share(self, shards: Shards, mode: str | None = "column") -> None:
        """Marks this module as a shard.

        Args:
            mode: the parallel mode of a module that is itself a linear.
        """
        self._shards, self._mode = shards, mode
        if shards.group is not None:
            self.set_tensor_parallel_group(shards.group)
        elif shards.size > 1:
            for layer in (module for module in self.modules() if isinstance(module, Layer)):
                layer.sharding = _NoGroup(shards)

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Sets the group of ranks that share the module. Does nothing if tp_size is 1.

        Raises:
            ValueError: the group's size is not tp_size.
        """
        if self._shards.size == 1 or tp_group is None:
            return
        size, sequence = dist.get_world_size(tp_group), self._shards.sequence
        if size != self._shards.size:
            raise ValueError(f"{self._shards.where}: got a group of {size} ranks; needs {self._shards.size} (tp_size)")
        tokens: Placement = Shard(0) if sequence else Replicate()
        for name, module in self.named_modules():
            parameters: Mapping[str, Any] = module._parameters
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):  # each rank norms a part of the tokens or of the heads
                for parameter in parameters.values():
                    mark(parameter, sequence_parallel=sequence or name.endswith(("q_norm", "k_norm")))
            if not isinstance(module, Layer):
                continue
            row = name.endswith(("out", "fc2")) or (name == "" and self._mode == "row")
            mesh = DeviceMesh.from_group(tp_group, "cuda" if module.weight.is_cuda else "cpu")
            places: tuple[Placement, Placement] = (Shard(-1), tokens) if row else (tokens, Shard(-1))
            module.sharding = Sharding(mesh, int(row), *places)
            mark(parameters["weight"], tensor_model_parallel=True, partition_dim=int(row), partition_stride=1)
            if row:
                mark(parameters["bias"], sequence_parallel=sequence)
            else:
                mark(parameters["bias"], tensor_model_parallel=True, partition_dim=0, partition_stride=1)


def mark(parameter: nn.Parameter | None, **attributes: Any) -> None:
    """Sets attributes that tell a trainer which parameters are split."""
    for name, value in attributes.items() if parameter is not None else ():
        setattr(parameter, name, value)


def one_of_modes(where: str, parallel_mode: str | None) -> str | None:
    """Checks the mode and returns it.

    Raises:
        ValueError: the mode is unknown.
    """
    if parallel_mode not in MODES:
        raise ValueError(f"{where}: parallel_mode is {parallel_mode!r}; needs None, 'column' or 'row'")
    return parallel_mode


class _NoGroup:
    """The sharding of a module that has no group yet: its forward raises an error."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def forward(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            f"{self.shards.where}: tp_size is {self.shards.size}, but the module has no group; give tp_group, or call "
            "set_tensor_parallel_group(group) before the first forward"
        )
