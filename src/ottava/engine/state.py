"""Changes predicted scales, only here and only at a step boundary of one model.

Between two boundaries every scale is a constant, so recomputation, micro-batches, pipeline order and graph replay all
see the same scale, without TransformerEngine's stash and restore. The state finds the boundary itself: torch calls a
hook after every `optimizer.step()`, and the state of each model whose parameters the optimizer holds makes a boundary.
The hook holds the state weakly, the state holds the model weakly, and the layers hold the state, so none outlives its
model.

    one boundary = pack the staged amax of every door -> one all-reduce (MAX) -> roll every window, set every scale

on the device, and the host reads nothing back. The all-reduce has a place for every door of the model, so ranks that
ran other layers, or step other parameters (ZeroRedundancyOptimizer), cannot disagree on its size.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ottava.base.errors import need
from ottava.base.text import grouped, listed
from ottava.engine.autocast import Part
from ottava.engine.functional import QuantizedLayer, quantized_layers
from ottava.engine.groups import (
    agree,
    ddp_around,
    joining,
    mesh_group,
    need_plain,
    refusal,
    take_part_in_join,
    when_wrapped,
)
from ottava.engine.quantizer import Notes, Quantizer, WeightQuantizer, stage
from ottava.kernels.triton import step as triton_step
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import TENSORS, Recipe
from ottava.weights.parameter import is_quantized_weight, local

_UNREAD_BOUNDARIES = 8
_JOIN = "delayed scaling: DistributedDataParallel.join does not go with"


_FORWARDS = 256  # without a step before the hint: more than micro-batches and evaluations need
_ENOUGH = 16  # of one optimizer before the hint names idle layers: other optimizers may step less often


class DoorAmax(NamedTuple):
    """The amax that a boundary put into the window of one door."""

    layer: str
    """Full name of the layer."""
    tensor: str
    """input, weight or grad_output."""
    spec: QuantizationSpec
    """The predicted spec of the tensor."""
    amax: float
    """Largest finite magnitude since the boundary before, over all ranks; 0: idle."""


Boundaries = tuple[int, tuple[Any, ...]]
"""The number of boundaries, and the amaxes that they put into the windows."""


class ScalingState:
    """The predicted-scale state of one model; it decides when scales change. Without predicted scales it does nothing.

    `convert` makes one, and a plain loop with a torch optimizer needs no other. Make one yourself to name the process
    group, or to call `update` in a loop without a torch optimizer.

    Args:
        model: its ottava layers join this state, and leave an earlier one.
        group: the ranks that share amaxes. None: the group of the DistributedDataParallel (or of FSDP1 with
            use_orig_params=True) around the model, or the mesh of its sharded parameters; without either, this process
            stands alone. If the wrapper is older than the conversion, the state finds it in the wrapper's first eager
            forward; for compiled code pass the wrapper as `model`, or the group.
    Raises:
        RuntimeError: ranks run different recipes; the message names the ranks and the layer. A wrapper that takes the
            model raises it, or a boundary.

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
        if model is not None:
            need("ScalingState", model, nn.Module)
        # weak: a hook that kept its model alive would keep all its memory after `del model`
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self.group = group
        self.boundaries = 0
        """Updates so far."""
        self._found_group = model.process_group if isinstance(model, DistributedDataParallel) else None
        self.moved_by_autocast = False
        """Whether the last forward ran under autocast(update="autocast"): then an optimizer's step is no boundary."""
        self._excused: set[int] = set()
        self._wrapper: Callable[[], Any] = lambda: None
        self._agreed: list[QuantizationSpec | None] | None = None  # the specs on which all ranks agreed last
        self._exchanging = self._exchanged = False
        self._notes: dict[int, Notes] = {}  # of each backward that runs, or has failed
        self.graded: Sequence[weakref.ref[Tensor]] = ()
        """The parameters that had a gradient when a backward had ended and no optimizer has stepped since."""
        self._refusal = ""
        self._listening = self._moves = self._heard = False
        self._advice = Advice()
        self._members: list[weakref.ref[QuantizedLayer]] = []
        self._due_lanes: dict[tuple[bytes, torch.device], Tensor] = {}
        self._unread: deque[tuple[int, list[weakref.ref[Quantizer]], Tensor]] = deque(maxlen=_UNREAD_BOUNDARIES)
        if model is not None:
            for layer in quantized_layers(model):
                earlier = layer.scaling_state  # `ScalingState(model).update()` in a loop must not forget the group
                self._found_group = self._found_group or earlier.group or earlier._found_group
                # a state made in the middle of a run goes on counting: 0 would look like a start without a history
                self.boundaries = max(self.boundaries, earlier.boundaries)
                layer.scaling_state = self
            if self.predicts:
                self.listen()

    def update(self, part: Part = "all") -> None:
        """Makes a boundary: puts the staged amaxes into the windows and sets the scales of the next step.

        Args:
            part: "forward" (inputs and weights) or "backward" (gradients) only.

        The windows of idle doors stay, so a second call in a row changes nothing. With a group, every rank must call
        it; a rank on which a layer was idle contributes zeros. Weight doors drop their kept casts.
        """
        self.graded = ()
        doors = self.doors()
        for door in self.weight_doors():
            door.cached = None
        # the doors of a part; the others keep what they have staged for their own boundary
        backward = {id(layer.quantizers.grad_output) for layer in self._layers()}
        self._roll([door for door in doors if part == "all" or (id(door) in backward) == (part == "backward")])

    @property
    def without_steps(self) -> bool:
        """Whether a backward has ended since the last boundary, and no optimizer has stepped these weights yet."""
        return self._heard and not self._advice.began

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Calls `update` after every step of this optimizer, even if it holds no parameter of the model; for wrapped
        optimizers."""
        state = weakref.ref(self)

        def hook(*_: Any) -> None:
            if (alive := state()) is not None:
                alive.update()

        return optimizer.register_step_post_hook(hook)

    def reset(self) -> None:
        """Empties every history in place; the doors start again from current scales."""
        for door in self.doors():
            door.reset()

    def take_amax(self) -> list[DoorAmax]:
        """The amaxes of the boundaries since the last call, one entry for each door with predicted scales.

        One call after each optimizer step gives the amaxes of that step, even if two optimizers made a boundary each or
        the loop called `update` besides. A call reports an amax once; a door without a new one has 0. Each call reads
        numbers back from the device.

        Example:
            >>> import ottava
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).bfloat16()
            >>> report = ottava.convert(model, "delayed")
            >>> state = ottava.ScalingState(model)
            >>> model(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
            >>> state.update()
            >>> [(door.tensor, door.amax) for door in state.take_amax() if door.tensor != "weight"]
            [('input', 1.0), ('grad_output', 1.0)]
        """
        newest: dict[int, float] = {}
        while self._unread:
            _, doors, lanes = self._unread.popleft()
            for ref, value in zip(doors, lanes[0].tolist(), strict=True):
                # 0: the door was idle, and an earlier amax of this step stays
                if value > 0 and (alive := ref()) is not None:
                    newest[id(alive)] = value
        return [
            DoorAmax(layer.name, tensor, door.spec, newest.get(id(door), 0.0))
            for layer in self._layers()
            for tensor, door in zip(TENSORS, layer.quantizers.doors, strict=True)
            if door.spec is not None
        ]

    @property
    def predicts(self) -> bool:
        """Whether a door has a predicted scale."""
        return any(door.spec is not None for door in self.doors())

    def doors(self) -> list[Quantizer]:
        """Every door of the model in the order of its modules, stateless ones included."""
        return _doors(self._layers())

    def weight_doors(self) -> list[WeightQuantizer]:
        """The doors that keep casts."""
        return [layer.quantizers.weight for layer in self._layers()]

    def last_calls(self) -> list[Any]:
        """The last call of each layer. Each forward makes new objects."""
        return [layer.last_call for layer in self._layers()]

    def take_back(self, count: int) -> Boundaries:
        """Removes the boundaries after the first `count`.

        Python made them during the capture of a CUDA graph, which ran none of their kernels. `repeat` counts the
        replays.
        """
        entries = tuple(entry for entry in self._unread if entry[0] > count)
        for _ in entries:
            self._unread.pop()
        noted, self.boundaries = self.boundaries - count, count
        return noted, entries

    def repeat(self, boundaries: Boundaries) -> None:
        """Counts a replay of a CUDA graph with these boundaries; it writes their amaxes to the same memory."""
        noted, entries = boundaries
        self.boundaries += noted
        self._unread.extend(entries)  # the replay writes its amaxes into these very tensors
        for door in self.weight_doors():  # the graph may have changed the weights
            door.cached = None

    def _layers(self) -> list[QuantizedLayer]:
        model = self._model()
        if not self._members and model is not None:  # at first use, because deepcopy copies the layers after the state
            layers = quantized_layers(model)
            mine = [layer for layer in layers if layer.scaling_state is self]
            self._members = [weakref.ref(layer) for layer in mine or layers]  # `layers`: not converted yet
        return [layer for member in self._members if (layer := member()) is not None]

    def saw_forward(
        self, weight: Tensor, group: dist.ProcessGroup | None = None, *, moved_by_autocast: bool = False
    ) -> None:
        """A layer calls this in each training forward with predicted scales."""
        self.listen()
        self.moved_by_autocast = moved_by_autocast
        self._excused.clear()  # a forward that is not compiled lies between two steps again
        self.find_group(group)
        # said at the first forward that would predict, because a wrapped model without predicted scales is fine
        if self._refusal and self.group is None:
            raise RuntimeError(f"delayed scaling: {self._refusal}")
        if self.boundaries == 0:
            self._advice.saw_forward(weight)

    def find_group(self, named: dist.ProcessGroup | None = None) -> None:
        """A layer calls this in each forward. Takes the group of the autocast, or of the wrapper around the layer."""
        active = DistributedDataParallel._get_active_ddp_module()
        # in each forward, so the search in the wrapper's modules runs once a wrapper
        known = active is None or active is self._wrapper()
        if not known and (wrapper := ddp_around(self._layers())) is not None:
            self._wrapper, self._found_group = weakref.ref(wrapper), wrapper.process_group
        self._found_group = named or self._found_group

    def wrapped(self, wrapper: nn.Module) -> None:
        """Runs when a wrapper with a process group takes the model or a part of it."""
        self._wrapper, self._found_group = weakref.ref(wrapper), wrapper.process_group  # type: ignore[assignment]
        self._refusal = refusal(wrapper)
        if not self._refusal and (group := self._group([])) is not None:
            self._agree(group)

    def note(self, notes: Notes) -> None:
        """The backward of a layer calls this with what its casts and those of its forward have seen.

        A whole backward stages it at its end, so a forward without a backward, and a backward that fails, leave none.
        """
        task = torch._C._current_graph_task_id()
        if task not in self._notes:
            self.settle()
            self._notes[task] = []
            # torch calls it when this backward has run as a whole; one that fails never calls it, so its amaxes are
            # dropped
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._after_backward, task))
        self._notes[task] += notes

    def _after_backward(self, task: int) -> None:
        notes = self._notes.pop(task) + self._unlinked()
        self.stage(notes)
        # a gradient may lie on a parameter that the layer holds a piece of
        leaves = [parameter for layer in self._layers() if (parameter := layer.parameter).is_leaf]
        graded = [parameter for parameter in leaves if parameter.grad is not None]
        if notes and not graded and self._has_no_gradient():
            graded = leaves  # it was for x alone: its amaxes are dropped like those of a skipped step
        self.graded = [weakref.ref(parameter) for parameter in graded]

    def _has_no_gradient(self) -> bool:
        """Whether no parameter of the model has a gradient. False with several processes: shards get theirs later."""
        model = self._model()
        if model is None or (dist.is_available() and dist.is_initialized()):
            return False
        return all(parameter.grad is None for parameter in model.parameters() if parameter.is_leaf)

    def _unlinked(self) -> Notes:
        """What the last forwards of frozen layers have seen, which have no backward: once a backward of the model."""
        self._heard = True
        calls = [layer.last_call for layer in self._layers() if layer.last_call is not None]
        notes = [note for call in calls for note in call.unlinked]
        for call in calls:
            call.unlinked = []
        return notes

    def stage(self, notes: Notes) -> None:
        """Raises the staged amaxes of doors to what casts have seen."""
        with torch.no_grad():
            stage(notes)

    def settle(self) -> None:
        """Drops the staged amaxes of a step that was skipped: its gradients are gone, and no optimizer has stepped."""
        alive = [ref() for ref in self.graded]
        # a loss scaler that found an infinity skips the step, and zero_grad follows: no other sign is given
        if alive and all(p is not None and p.grad is None for p in alive):
            self.discard()

    def discard(self) -> None:
        """Drops the amaxes since the last boundary, as if their forwards and backwards had not been.

        Gradients that are None tell the state by themselves that a step was skipped. Two loops have to call it then:
        one that writes zeros into gradients (`zero_grad(set_to_none=False)`), and one with a compiled model.
        """
        self.graded = ()
        # an amax that is not finite is still counted: it may be why the step was skipped
        staged = [door.staged[::2] for door in self.doors() if door.spec is not None]
        if staged:
            torch._foreach_zero_(staged)

    def _agree(self, group: dist.ProcessGroup) -> None:
        specs = [door.spec for door in self.doors()]
        if specs != self._agreed:
            agree(group, [f"{layer.name}.{tensor}" for layer in self._layers() for tensor in TENSORS], specs)
            self._agreed = specs

    @property
    def after_backward(self) -> Callable[[], None] | None:
        """A function that each layer calls when its backward ends. Inside DistributedDataParallel.join ranks exchange
        amaxes at that moment, before the step, because ranks without batches can take part then."""
        wrapper = self._wrapper()
        if not (joining(wrapper) and wrapper.require_backward_grad_sync):
            return None
        if not wrapper.broadcast_buffers:
            raise RuntimeError(f"{_JOIN} broadcast_buffers=False: set it")
        return self._exchange_later

    def _exchange_later(self) -> None:
        if not self._exchanging:
            self._exchanging = True
            torch.autograd.Variable._execution_engine.queue_callback(self.exchange)

    def exchange(self, *, joined: bool = False) -> None:
        """Raises the staged amaxes to the largest of all ranks; joined: this rank has no batch and adds zeros."""
        doors = self.doors()
        live = [door for door in doors if door.spec is not None]
        group = self._group(live)
        self._exchanging, self._exchanged = False, True
        if group is None or not live:
            return
        staged = _staged(doors, live[0].scale.device)
        # zeros leave a largest value as it is
        dist.all_reduce(staged.zero_() if joined else staged, dist.ReduceOp.MAX, group=group)
        for door, column in zip(doors, staged.unbind(1), strict=True):
            if door.spec is not None and not joined:
                door.staged.copy_(column)

    def prepare(self, recipe_of: Callable[[str, Recipe], Recipe]) -> None:
        """With several processes: if one layer needs buffers, makes them for all layers, because another rank may run
        other layers; recipe_of: (full name, resolved recipe of the layer) -> the layer's recipe of the moment."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        for layer in self._layers():
            for door, spec in layer.quantizers.predicted(recipe_of(layer.name, layer.resolved)):
                if spec is not None and door.spec is None:
                    door.prepare(spec, layer.weight.device)

    def listen(self, *, moves: bool = True) -> None:
        """Watches every optimizer step from now on, for the changed weights; with `moves` also as a boundary."""
        self._moves = self._moves or moves
        if not self._listening:
            self._listening = True
            _STEPS.tell(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """Runs before a step; the closure of an LBFGS changes weights before the boundary."""
        model = self._model()
        if not self._advice.began and self._moves and model is not None and self._holds_ours(optimizer):
            self._advice.first_step(model, self._layers(), boundaries=self.boundaries)

    def after_step(self, optimizer: Optimizer) -> None:
        """The boundary: covers the doors of stepped weights and of frozen ones."""
        if not self._holds_ours(optimizer):
            return
        self.graded = ()
        stepped = _stepped(optimizer)
        for layer in self._layers():
            if id(layer.parameter) in stepped and type(layer.parameter) is nn.Parameter:  # FSDP gathers others
                layer.quantizers.weight.stepped()
        if not self._moves:
            return
        if self.moved_by_autocast and id(optimizer) not in self._excused:  # a second step in a row means that compiled
            self._excused.add(id(optimizer))  # layers ran in between, which call no `saw_forward`
            return
        self.moved_by_autocast = False
        self._roll(_doors(m for m in self._layers() if id(m.parameter) in stepped or not m.parameter.requires_grad))
        self._advice.after_step(optimizer, stepped, self._layers())

    def _holds_ours(self, optimizer: Optimizer) -> bool:
        model, stepped = self._model(), _stepped(optimizer)
        return model is not None and any(id(p) in stepped for p in model.parameters())

    def _roll(self, due: list[Quantizer]) -> None:
        """One boundary for these doors, and for the doors that are due on another rank."""
        self.boundaries += 1  # on every rank, even if nothing ran
        task = torch._C._current_graph_task_id()  # the number of the running backward, -1 outside
        if task in self._notes:  # a hook steps inside of a backward
            self.stage(self._notes[task])
            self._notes[task] = []
        elif task == -1:
            self._notes.clear()
            if not self._heard:  # no layer has had a backward
                self.stage(self._unlinked())
            self._heard = False
        doors = self.doors()
        live = [door for door in doors if door.spec is not None]
        group = self._group(live)
        if group is None and not any(door.spec is not None for door in due):
            return
        device = live[0].scale.device if live else self._device()
        # one tensor for one collective: every door of the model has a column, whether it ran here or not
        lanes = torch.cat([_staged(doors, device), self._due_lane(doors, due, device)])  # (4, doors)
        if group is not None:
            self._agree(group)
            if not joining(self._wrapper()):
                dist.all_reduce(lanes, dist.ReduceOp.MAX, group=group)
            elif self.moved_by_autocast:
                raise RuntimeError(f"{_JOIN} autocast(update='autocast'): use 'step'")
            elif not self._exchanged:
                raise RuntimeError(
                    f"{_JOIN} compiled code, which cannot exchange amaxes at the end of a backward: use one of the two"
                )
        # what is not due on any rank contributes zeros, and zeros change nothing
        lanes = lanes * lanes[3]
        # read later, if somebody asks: reading here would wait for the device in every step
        self._unread.append((self.boundaries, [weakref.ref(door) for door in doors], lanes))
        with torch.no_grad():
            roll_windows(doors, lanes)

    def _due_lane(self, doors: list[Quantizer], due: list[Quantizer], device: torch.device) -> Tensor:
        """(1, doors): 1 for a door that is due. The state keeps it, because making one waits for the device."""
        # by identity: two doors with equal buffers are two doors
        wanted = {id(door) for door in due}
        # one byte a door: a mask that a dict can hold
        key = bytes(id(door) in wanted for door in doors), device
        if key not in self._due_lanes:
            self._due_lanes[key] = torch.tensor([list(key[0])], dtype=torch.float32, device=device)
        return self._due_lanes[key]

    def _device(self) -> torch.device:
        model = self._model()
        first = next(model.parameters(), None) if model is not None else None
        return first.device if first is not None else torch.device("cpu")

    def _group(self, live: list[Quantizer]) -> dist.ProcessGroup | None:
        group = self.group or self._found_group or mesh_group(self._model())
        if group is not None:
            return group if dist.get_world_size(group) > 1 else None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and live:
            warnings.warn(
                "delayed scaling: there are several processes, but neither DistributedDataParallel nor sharded "
                "parameters, so each process predicts scales from its own amaxes only. Name the group: "
                "ottava.ScalingState(model, group=...)",
                stacklevel=4,
            )
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # deepcopy copies the model before its layers, unless the user copies only a part
        model = self._model()
        copy = type(self)(None, self.group)
        memo[id(self)] = copy
        twin = memo.get(id(model)) if model is not None else None
        if twin is not None:
            copy._model = weakref.ref(twin)
        copy.boundaries = self.boundaries  # 0 would look like a start without a history
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)  # the first forward after loading finds model and group again

    @property
    def bound(self) -> bool:
        """Whether it has a living model."""
        return self._model() is not None


class _Steps:
    """torch's hooks around every optimizer step; they call the living states in the order of their registration.

    This module registers one pair for the process. torch iterates over its hooks while they run, so a pair that came
    and went with a model would break a step of another model (garbage collection, threads).
    """

    def __init__(self) -> None:
        self._states: tuple[weakref.ref[ScalingState], ...] = ()  # replaced, never changed: safe to iterate
        self.others: tuple[weakref.ref[Any], ...] = ()
        self._lock = threading.Lock()
        register_optimizer_step_pre_hook(self.before)
        register_optimizer_step_post_hook(self.after)

    def tell(self, state: ScalingState) -> None:
        """Adds a state and forgets dead ones."""
        with self._lock:
            self._states = (*(ref for ref in self._states if ref() is not None), weakref.ref(state))

    def living(self) -> list[ScalingState]:
        """The states that the hooks call."""
        return [state for ref in self._states if (state := ref()) is not None]

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        """Before a step."""
        for state in self.living():
            state.before_step(optimizer)

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """After a step."""
        for state in self.living():
            state.after_step(optimizer)
        # after all states: what others see is the step as a whole
        for ref in self.others:
            if (other := ref()) is not None:
                other(optimizer)


_STEPS = _Steps()


def after_steps(call: Any) -> None:
    """Calls `call` with the optimizer after every step of one and after all states, while somebody else holds it."""
    _STEPS.others = (*(ref for ref in _STEPS.others if ref() is not None), weakref.ref(call))


def living_states() -> list[ScalingState]:
    """Every state of this process that watches optimizer steps."""
    return _STEPS.living()


def _wrapped(wrapper: nn.Module, model: nn.Module) -> None:
    """Tells the states of a model about its wrapper; ranks compare their specs, ranks without layers too."""
    # a model may be two converted halves, each with a state
    states = list(dict.fromkeys(layer.scaling_state for layer in quantized_layers(model)))
    if states:
        need_plain(wrapper, model)
    for state in states:
        state.wrapped(wrapper)
    if isinstance(wrapper, DistributedDataParallel):
        with torch.no_grad():
            # all ranks get the codes of the first; DDP later sends their numbers, which changes nothing
            for weight in (p for p in model.parameters() if is_quantized_weight(p)):
                # codes, not numbers: sent numbers would be cast again, and a second rounding is another weight
                dist.broadcast(weight.detach(), group_src=0, group=wrapper.process_group)
                weight.sent = True
        if not states:
            agree(wrapper.process_group, (), ())
    take_part_in_join(wrapper, _shadow)


def _shadow(wrapper: nn.Module) -> None:
    """A rank without a batch takes part in the exchange at the end of the others' backward."""
    for state in dict.fromkeys(layer.scaling_state for layer in quantized_layers(wrapper)):
        state.exchange(joined=True)


when_wrapped(_wrapped)


def _doors(layers: Iterable[QuantizedLayer]) -> list[Quantizer]:
    return [door for layer in layers for door in layer.quantizers.doors]


def _staged(doors: list[Quantizer], device: torch.device) -> Tensor:
    """(3, doors): the staged values; zeros for doors without state, so that all ranks agree on the size."""
    nothing = torch.zeros(3, dtype=torch.float32, device=device)
    return torch.stack([door.staged.to(device) if door.spec is not None else nothing for door in doors], dim=1)


def _stepped(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


# --- a boundary: one update for all doors of a spec ---


class _Pack:
    """Stacked buffers of all doors of one spec; the doors hold views.

    So a boundary runs a few operations on vectors, and not a few for each door.
    """

    def __init__(self, doors: list[Quantizer], columns: list[int]) -> None:
        self.ids, self.columns = [id(door) for door in doors], columns  # a reference to a door would keep both alive
        device = doors[0].scale.device
        self.index = torch.tensor(columns, device=device)  # made once: making it waits for the device
        self.history = torch.stack([door.amax_history for door in doors])  # (T, L), newest first
        self.scale = torch.stack([door.scale for door in doors])
        self.nonfinite_count = torch.stack([door.nonfinite_count for door in doors])
        self.guard_count = torch.stack([door.guard_count for door in doors])
        self.staged = torch.stack([door.staged for door in doors])  # (T, 3)
        for i, door in enumerate(doors):
            door.amax_history, door.scale = self.history[i], self.scale[i]
            door.nonfinite_count, door.guard_count = self.nonfinite_count[i], self.guard_count[i]
            door.staged = self.staged[i]
            door.pack = self

    def holds(self, doors: list[Quantizer], columns: list[int]) -> bool:
        """Whether all doors still hold views: a moved, copied or newly prepared door has buffers of its own."""
        # the doors of a spec change when a layer gets another recipe or device
        same = self.columns == columns and self.ids == [id(door) for door in doors]
        return same and all(door.pack is self for door in doors)


def roll_windows(doors: list[Quantizer], lanes: Tensor) -> None:
    """One fused update: each window takes its door's amax, each scale follows, and the staged amaxes become 0.

    The rule for a door that is due, with `last` its amax since the previous boundary:
        last == 0   idle: window and scale stay
        else        window = [last, *window[:-1]];  scale = fmt.max * 2**-margin / max(window)
    Source: TransformerEngine common/recipe/delayed_scaling.cu; but here no non-finite amax arrives.

    lanes: (4, doors): amax, non-finite and guard, as `Quantizer.staged`, and 1 for a door that is due. For other doors
        all four are 0.
    """
    groups = grouped(((door.spec, door.staged.device), i) for i, door in enumerate(doors) if door.spec is not None)
    for (spec, device), columns in groups.items():
        members = [doors[i] for i in columns]
        pack = members[0].pack
        if not isinstance(pack, _Pack) or not pack.holds(members, columns):
            pack = _Pack(members, columns)
        # one launch for all doors of a spec
        if triton_step.supports_roll(spec, pack.history, lanes) is None:
            counts = pack.nonfinite_count, pack.guard_count
            triton_step.roll(spec, lanes, pack.index, pack.history, pack.scale, *counts, pack.staged)
            continue
        last, nonfinite, guard, due = lanes.to(device)[:, pack.index]
        touched = last > 0
        # (T, L): the newest first, the oldest falls off
        rolled = torch.cat([last[:, None], pack.history[:, :-1]], dim=1)
        pack.history.copy_(torch.where(touched[:, None], rolled, pack.history))
        scale, usable = spec.from_window(pack.history, pack.scale)
        pack.scale.copy_(torch.where(touched & usable, scale, pack.scale))
        pack.nonfinite_count.add_(nonfinite.to(torch.int64))
        pack.guard_count.add_(guard.to(torch.int64))
        pack.staged.mul_(1 - due[:, None])  # the others wait for their own boundary
    for door in doors:
        if isinstance(door, WeightQuantizer) and door.spec is not None:
            door.cached = None  # the next forward casts again, so that its amax enters the next window


# --- hints, each once: predicted scales do not change, or start without a history. None is an error ---


class Advice:
    """The memory of one `ScalingState`: the events that it counted, and the hints that it gave."""

    def __init__(self) -> None:
        self._forwards = 0
        self._weight_version: tuple[int, int] | None = None
        self._steps: dict[int, int] = {}
        self._stepped: set[int] = set()
        self.began = self._asked_idle = False

    def copy(self) -> Advice:
        """A copy for a replay, which must leave no trace."""
        twin = Advice()
        vars(twin).update(vars(self), _steps=self._steps.copy(), _stepped=self._stepped.copy())
        return twin

    def saw_forward(self, weight: Tensor) -> None:
        """Counts training forwards before the first boundary; warns if the weights change and no boundary comes."""
        if self.began or weight.is_meta:
            return
        # torch counts writes to a tensor: an optimizer that nobody told us of moves the version all the same
        version = (id(weight), weight._version)
        if self._weight_version is None:
            self._weight_version = version
        if self._weight_version[0] != version[0]:
            return  # count the forwards of one layer only
        self._forwards += 1
        stepped = self._weight_version[1] != version[1] and not dist.is_initialized()
        if stepped or self._forwards > _FORWARDS:
            self._weight_version = version
            # Python shows a warning of one text and place once
            warnings.warn(
                "delayed scaling: the weights have changed, or many forwards have passed, and ottava saw no step "
                "boundary, so the scales do not move. ottava sees the step() of torch optimizers; in another loop call "
                "ottava.ScalingState(model).update() after each weight update",
                stacklevel=4,
            )

    def first_step(self, model: nn.Module, layers: Iterable[Any], *, boundaries: int) -> None:
        """Runs before the first step of an optimizer of the model: warns of a start without a history.

        It warns only if the model looks trained: the elements of some norm's weight differ.
        """
        self.began = True
        if not _readable(model):
            return
        doors = [door for layer in layers for door in layer.quantizers.doors if door.spec is not None]
        if not doors or boundaries or not _looks_trained(model) or any(bool(door.amax_history.any()) for door in doors):
            return
        start = "the current scale of each tensor" if doors[0].spec.bootstrap else "scale 1, whatever the tensor"
        warnings.warn(
            "delayed scaling starts on weights that look trained, and has no history: the first step casts with "
            f"{start}, the next ones with scales predicted from the few amaxes since then. To fill the histories from "
            "some batches before the first step: ottava.calibrate(model, batches, loss=loss)",
            stacklevel=2,
        )

    def after_step(self, optimizer: object, stepped: Collection[int], layers: Iterable[Any]) -> None:
        """Runs after the boundary of an optimizer's step: names trainable layers that no optimizer steps.

        stepped: ids of the optimizer's parameters. Another rank's step (ZeroRedundancyOptimizer) counts too: its
            boundary has cleared the layer's staged amaxes.
        """
        if self._asked_idle:
            return
        layers = list(layers)
        self._stepped.update(id(layer.parameter) for layer in layers if id(layer.parameter) in stepped)
        count = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if count < _ENOUGH or not all(_readable(layer) for layer in layers):
            return
        self._asked_idle = True
        left = (m for m in layers if m.parameter.requires_grad and id(m.parameter) not in self._stepped)
        # a door of theirs has staged an amax that no boundary has taken
        idle = [m for m in left if any(d.spec is not None and bool(d.staged[0] > 0) for d in m.quantizers.doors)]
        if idle:
            names = listed((layer.name or type(layer).__name__ for layer in idle), most=3)
            warnings.warn(
                f"delayed scaling: in {_ENOUGH} steps no optimizer has stepped the trainable weights of {names}, so "
                "their scales do not move. Give these weights to the optimizer, or freeze them with "
                "requires_grad_(False), or call ottava.ScalingState(model).update() after each step",
                stacklevel=2,
            )


def _readable(module: nn.Module) -> bool:
    """Whether Python may read parameters now: not on meta, in the capture of a CUDA graph, or while compiling."""
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return False
    return not any(p.is_meta for p in module.parameters())


def _looks_trained(model: nn.Module) -> bool:
    """Whether the elements of a norm's weight differ. All parameters of a norm are vectors, and its weight starts with
    equal elements."""
    for module in model.modules():
        parameters = dict(module.named_parameters(recurse=False))
        weight = parameters.get("weight")
        flat = "_fsdp_flattened"  # torch's mark of a part of a matrix that FSDP1 keeps as a vector
        if weight is None or any(p.dim() != 1 or hasattr(p, flat) for p in parameters.values()):
            continue
        # every rank looks at its own rows
        shard: Tensor = local(weight)
        if shard.numel() and bool((shard != shard[0]).any()):
            return True
    return False
