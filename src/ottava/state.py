"""Predicted scales change here and nowhere else: at a step boundary, for one model.

Between two boundaries every scale is a constant, so recomputation, micro-batches, pipeline order and graph replay all
see the same one, without TransformerEngine's stash and restore. The boundary is found without the user: torch calls a
hook after every `optimizer.step()`, and a model's state moves on when the optimizer holds parameters of that model. The
hook holds the state weakly, the state holds the model weakly, and the layers hold the state: nothing outlives a model.

    one boundary = pack the staged amax of every door -> one all-reduce (MAX) -> roll every window, set every scale

on the device, without reading anything back.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ottava.quantized_tensor import QuantizationSpec
from ottava.quantizer import LinearQuantizers, Quantizer, WeightQuantizer
from ottava.scaling import compute_scale

_FORWARDS_BEFORE_WARNING = 256


class ScalingState:
    """The predicted-scale state of one model and the moment at which it moves on; a no-op where there is none.

    `convert` makes one, and that is enough for a plain loop with a torch optimizer. Make one yourself to name the
    process group, or to call `update` from a loop without one.

    Args:
        model: its ottava layers join this state; they leave an earlier one.
        group: over which amaxes are reduced. None finds it: that of the DistributedDataParallel around the model, or
            the mesh that its parameters are sharded over; else this process stands alone.

    Example:
        >>> import ottava
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
        >>> report = ottava.convert(model, "delayed")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()   # first step: current scales
        >>> optimizer.step()                                                  # the boundary
        >>> model[0].quantizers.input.scale                                   # 448 / amax 1
        tensor(448.)
    """

    def __init__(self, model: nn.Module | None, group: dist.ProcessGroup | None = None) -> None:
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self.group = group
        self.boundaries = 0
        """Updates so far."""
        self._found_group: dist.ProcessGroup | None = None
        self._handle: RemovableHandle | None = None
        self._forwards = 0
        self._weight_version: tuple[int, int] | None = None
        self._members: list[weakref.ref[Any]] | None = None
        if model is not None:
            for layer in _layers(model):
                layer.scaling_state = self

    def update(self) -> None:
        """Rolls every window with what was staged since the last boundary and sets the scales of the next step.

        Doors that saw nothing do not roll; calling it twice changes nothing the second time. With a group, every rank
        must call it; ranks on which a layer was idle take part with zeros.
        """
        self.roll(self.doors())

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Calls `update` after every step of this optimizer, whatever parameters it holds; for wrapped optimizers."""
        state = weakref.ref(self)

        def hook(*_: Any) -> None:
            if (alive := state()) is not None:
                alive.update()

        return optimizer.register_step_post_hook(hook)

    def reset(self) -> None:
        """Empties every history in place; the layers stay live and bootstrap again."""
        for door in self.doors():
            door.reset()

    def doors(self) -> list[Quantizer]:
        """Every door of the model in the order of its modules, stateless ones included."""
        return _doors(self._layers())

    def _layers(self) -> list[Any]:
        model = self._model()
        if self._members is None and model is not None:  # on first use: a copied state's layers are copied after it
            self._members = [weakref.ref(layer) for layer in _layers(model) if layer.scaling_state is self]
        return [layer for member in self._members or () if (layer := member()) is not None]

    def saw_forward(self, weight: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Told by a layer of each training forward with predicted scales: finds the group, watches for a boundary."""
        if self._handle is None:
            self.listen()
        self._found_group = group or self._found_group
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None:
            self._found_group = wrapper.process_group
        if self.boundaries == 0:
            self._watch(weight)

    def listen(self) -> None:
        """Registers the hook that torch calls after every optimizer step; it goes when this state goes."""
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(_AfterStep(weakref.ref(self)))
            weakref.finalize(self, self._handle.remove)

    def _watch(self, weight: Tensor) -> None:
        self._forwards += 1
        version = (id(weight), weight._version)
        if self._weight_version is None:
            self._weight_version = version
        same_weight = self._weight_version[0] == version[0]
        stepped = same_weight and self._weight_version[1] != version[1] and not dist.is_initialized()
        if (stepped or self._forwards > _FORWARDS_BEFORE_WARNING) and not weight.is_meta:
            self._weight_version = version
            # Python shows a warning of one text and place once
            warnings.warn(
                "delayed scaling: the weights have changed, or many forwards have passed, and no step boundary was "
                "seen, so the scales do not move. ottava sees the step() of torch optimizers; in another loop call "
                "ottava.ScalingState(model).update() after each weight update",
                stacklevel=4,
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """The boundary: doors of weights that were stepped, and of frozen ones, move on."""
        model = self._model()
        if model is None:
            return
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(p) in stepped for p in model.parameters()):
            due = [m for m in self._layers() if id(m.weight) in stepped or not m.weight.requires_grad]
            self.roll(_doors(due))

    def roll(self, doors: list[Quantizer]) -> None:
        """One boundary for these doors."""
        if not doors:
            return
        self.boundaries += 1  # on every rank, also where nothing ran
        live = [door for door in doors if door.spec is not None]
        group = self._group(live)
        if not live and group is None:
            return
        lanes = _lanes(doors, live[0].scale.device if live else self._device())
        if group is not None:
            dist.all_reduce(lanes, dist.ReduceOp.MAX, group=group)
        with torch.no_grad():
            roll_windows(doors, lanes)

    def _device(self) -> torch.device:
        model = self._model()
        first = next(model.parameters(), None) if model is not None else None
        return first.device if first is not None else torch.device("cpu")

    def _group(self, live: list[Quantizer]) -> dist.ProcessGroup | None:
        group = self.group or self._found_group or self._mesh_group()
        if group is not None:
            return group if dist.get_world_size(group) > 1 else None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and live:
            warnings.warn(
                "delayed scaling: several processes, but neither DistributedDataParallel nor sharded parameters were "
                "found, so each process predicts scales from its own amaxes only. Name the group: "
                "ottava.ScalingState(model, group=...)",
                stacklevel=4,
            )
        return None

    def _mesh_group(self) -> dist.ProcessGroup | None:
        model = self._model()
        mesh = next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None) if model else None
        if mesh is None:
            return None
        found: dist.ProcessGroup = mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # deepcopy has noted the copy of the model before it reaches its layers, unless only a part is copied
        model = self._model()
        copy = type(self)(None, self.group)
        memo[id(self)] = copy
        twin = memo.get(id(model)) if model is not None else None
        if twin is not None:
            copy._model = weakref.ref(twin)
        copy.boundaries = self.boundaries
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)  # processes and models are bound again where it is loaded

    @property
    def bound(self) -> bool:
        """Whether its model is known and alive."""
        return self._model() is not None


class _AfterStep:
    """torch's hook of one state, which it does not keep alive."""

    def __init__(self, state: weakref.ref[ScalingState]) -> None:
        self.state = state

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        state = self.state()
        if state is not None:
            state.after_step(optimizer)


class _Pack:
    """The buffers of all doors of one spec in four tensors, of which the doors' own are views.

    A boundary then costs some operations on vectors instead of some per door.
    """

    def __init__(self, doors: list[Quantizer]) -> None:
        self.doors = doors
        self.history = torch.stack([door.amax_history for door in doors])  # (T, L), newest first
        self.scale = torch.stack([door.scale for door in doors])
        self.nonfinite_count = torch.stack([door.nonfinite_count for door in doors])
        self.guard_count = torch.stack([door.guard_count for door in doors])
        for i, door in enumerate(doors):
            door.amax_history, door.scale = self.history[i], self.scale[i]
            door.nonfinite_count, door.guard_count = self.nonfinite_count[i], self.guard_count[i]
            door.pack = self


def roll_windows(doors: list[Quantizer], lanes: Tensor) -> None:
    """One fused update: every touched window takes its amax in, every scale follows; staging is cleared.

    The rule, per door, with `last` its amax since the previous boundary:
        last == 0   idle: neither window nor scale moves
        else        window = [last, *window[:-1]];  scale = fmt.max * 2**-margin / max(window)
    Source: TransformerEngine common/recipe/delayed_scaling.cu, except that a non-finite amax never arrives here.

    lanes: (3, doors): amax, non-finite and guard, as `Quantizer.staged`.
    """
    groups: dict[QuantizationSpec, list[int]] = {}
    for index, door in enumerate(doors):
        if door.spec is not None:
            groups.setdefault(door.spec, []).append(index)
    for spec, indices in groups.items():
        members = [doors[i] for i in indices]
        pack = members[0].pack
        if not isinstance(pack, _Pack) or pack.doors != members or any(door.pack is not pack for door in members):
            pack = _Pack(members)
        last, nonfinite, guard = lanes if len(indices) == len(doors) else lanes[:, indices]
        touched = last > 0
        rolled = torch.cat([last[:, None], pack.history[:, :-1]], dim=1)
        pack.history.copy_(torch.where(touched[:, None], rolled, pack.history))
        window = _window(spec, pack.history)
        scale = compute_scale(window, spec.format, scale_format=spec.scale_format, margin=spec.margin).scale
        pack.scale.copy_(torch.where(touched & (window > 0), scale, pack.scale))
        pack.nonfinite_count.add_(nonfinite.to(torch.int64))
        pack.guard_count.add_(guard.to(torch.int64))
    live = [door for door in doors if door.spec is not None]
    torch._foreach_zero_([door.staged for door in live])
    for door in live:
        if isinstance(door, WeightQuantizer):
            door.cached = None  # the next forward casts anew, and its amax enters the next window


def _window(spec: QuantizationSpec, history: Tensor) -> Tensor:
    algorithm = spec.amax_compute_algo
    if callable(algorithm):
        return torch.stack([algorithm(row) for row in history.unbind()])
    return history.amax(dim=1) if algorithm == "max" else history[:, 0].clone()


def _layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(getattr(m, "quantizers", None), LinearQuantizers)]


def _doors(layers: Iterable[Any]) -> list[Quantizer]:
    return [door for m in layers for door in m.quantizers.doors]


def _lanes(doors: list[Quantizer], device: torch.device) -> Tensor:
    """(3, doors) of what is staged; zeros for doors that keep no state, so that all ranks agree on the size."""
    nothing = torch.zeros(3, device=device)
    return torch.stack([door.staged if door.spec is not None else nothing for door in doors], dim=1)
