"""The step of every optimizer here: read in FP32, update, write back.

    gradient, weight, states in FP32  ->  `update`, the rule of an optimizer  ->  weight and states as they are stored

A rule sees lists of FP32 tensors and changes them in place, with torch's foreach operations. The engine updates FP32
tensors where they lie, and decodes all others a few slices at a time, so that a step needs little memory beside the
state. A rule may have a kernel that does all this at once for some storages; `Engine.ran` names the code that ran, and
why. The rule and the storages do not know each other: a new optimizer is a subclass with a rule, a new storage an entry
of `storage.STORAGES` or a class of `weights`.
"""

from __future__ import annotations

import re
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from torch.utils.hooks import RemovableHandle

from ottava.base.errors import need, need_known, need_type
from ottava.kernels.gate import PLAIN
from ottava.optim.storage import STORAGES, Piece, Storage, WeightStore, choose
from ottava.weights.parameter import is_quantized_weight, local

STORAGE_OPTIONS = ("master", "moments", "stochastic_rounding", "capturable", "amax_every")
"""Options of an optimizer, not of its state: they stay when a state is loaded."""

BOUND = "amax_bound"
"""Name of the two FP64 numbers in the state of AdamW: the bound of |w|, and that of q (`rules.measure`)."""
POSITIVE = "exp_avg_sq"
"""The state that is a denominator."""
_STATES = frozenset({"exp_avg", POSITIVE, "momentum_buffer"})  # names of all rules here, and of torch's
_NUMBERS = frozenset({"lr", "eps", "weight_decay", "momentum"})  # options of groups, 0 or more
_FLAGS = frozenset({"stochastic_rounding", "capturable", "nesterov", "adamw"})
_SAVED_AT = "saved_at"  # the step up to which entries that torch's optimizers do not know are valid
_SLICE = 1 << 18  # elements decoded at once on a CPU: its FP32 numbers fit into a second-level cache
_ACCELERATOR_SLICE = 1 << 26
_WRAPPERS = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_Mark = tuple["weakref.ref[Tensor]", int, int]  # the memory of a weight, its version and its writes after a step


class State(NamedTuple):
    """One state of an update rule, by its name in `state_dict`."""

    name: str
    moments: str = ""
    """Its own storage; "": that of its group."""

    @property
    def positive(self) -> bool:
        """Whether it is a denominator (`storage`)."""
        return self.name == POSITIVE

    def storage(self, group: Mapping[str, Any]) -> Storage:
        """How it is kept under the options of a group."""
        return STORAGES[self.moments or group["moments"]]


class Work(NamedTuple):
    """The input of a rule: lists of equal length, FP32 or wider."""

    weights: list[Tensor]
    """Changed in place."""
    gradients: list[Tensor]
    """Read only: they may be the `.grad` of the parameters."""
    states: Mapping[str, list[Tensor]]
    """Changed in place."""
    steps: list[Tensor]
    """The number of each parameter's step, from 1."""


class Engine(Optimizer):
    """The base of all optimizers here; see `AdamW` for their common arguments.

    A subclass has the names of its states and its rule.
    """

    gradient = "grad"
    """The attribute of a parameter that a step reads."""
    ran: Sequence[Counter[str]] = ()
    """The code of the last step, for each group: "triton", or "foreach" with the reason -> number of parameters."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        need(type(self).__name__, params, Iterable, "parameters: model.parameters()")
        super().__init__(params, defaults)
        self._marks: dict[Tensor, _Mark] = {}
        self._said = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's, which also calls it for a loaded state: nobody knows then what the weights were."""
        super().__setstate__(state)
        self._marks, self._said = {}, False

    def states(self, group: Mapping[str, Any]) -> tuple[State, ...]:
        """The states of the rule under the options of a group."""
        raise NotImplementedError

    def update(self, work: Work, group: Mapping[str, Any]) -> None:
        """The rule."""
        raise NotImplementedError

    def refuses(self, piece: Piece, group: Mapping[str, Any]) -> str | None:
        """Why no kernel updates this whole parameter, so that `update` has to; None if `fused` does."""
        return "no kernel has this rule"

    def fused(self, pieces: Sequence[Piece], group: Mapping[str, Any]) -> None:
        """Updates whole parameters, which `refuses` has not refused, by a kernel of this rule."""
        raise NotImplementedError

    def known_amax(self, index: int, piece: Piece, work: Work, group: Mapping[str, Any]) -> Tensor | None:
        """After an update: the largest magnitude that the weight of a piece can have, or None: nobody knows.

        index: of the piece in `work`.
        """
        return None

    def elementwise(self, group: Mapping[str, Any]) -> bool:
        """Whether the rule treats each element alone, so that the engine may update slice after slice."""
        return True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; refuses parameters and options that this optimizer cannot take."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check(self, group: Mapping[str, Any]) -> None:
        who = type(self).__name__
        need_known(who, "moments", group["moments"], STORAGES)
        for name in _FLAGS & group.keys():
            need_type(f"{who}: {name}", group[name], bool)
        for name in _NUMBERS & group.keys():
            _check_number(who, name, group[name])
        if "betas" in group:
            _check_betas(who, group["betas"])
        for parameter in group["params"]:
            if not parameter.is_floating_point() or parameter.itemsize < 2 or parameter.layout != torch.strided:
                raise TypeError(
                    f"{who}: updates dense parameters of a floating-point dtype with 16 bits or more; got "
                    f"{parameter.dtype}, {parameter.layout}. Leave it to an optimizer of torch"
                )
            choose(local(parameter), group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient.

        Args:
            closure: computes the loss anew, with gradients; it is called once, before the update.
        Returns:
            What the closure returned.
        Raises:
            TypeError: a gradient is sparse.
        Edge cases: an infinity or NaN in a gradient makes the element's states and weight NaN, as torch's optimizers
            do, but not other elements of its group in FP8 or int8. GradScaler skips such a step: no recipe's casts
            hide from it what BF16 would show. What was written to a weight since the last step is the weight from
            then on: its master follows (`weights`).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        place, self.ran = 0, [Counter() for _ in self.param_groups]
        for group, ran in zip(self.param_groups, self.ran, strict=True):
            for pieces in _batches(self._pieces(group, place, ran)):
                self._update(pieces, group)
            place += len(group["params"])
        for parameter in self._marks:
            if getattr(parameter, self.gradient, None) is not None:
                self._marks[parameter] = _mark(parameter)
        return loss

    def _pieces(self, group: Mapping[str, Any], place: int, ran: Counter[str]) -> Iterator[tuple[WeightStore, Piece]]:
        """What foreach updates at once: whole parameters where all states lie in FP32, else slices."""
        kept = {one.name: one.storage(group).groups for one in self.states(group)}
        ready = []
        for index, parameter in enumerate(group["params"]):
            gradient = local(getattr(parameter, self.gradient, None))
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise TypeError(
                    f"{type(self).__name__}: got a gradient of layout {gradient.layout}; it takes dense ones"
                )
            store = choose(weight := local(parameter), group)
            known, state = self._prepare(parameter, store, group), self.state[parameter]
            ready.append((index, parameter, weight, store, known, state, local(state["step"])))
        if ready:
            torch._foreach_add_([step for *_, step in ready], 1)
        whole = []
        for index, parameter, weight, store, known, state, step in ready:
            gradient = local(summed(parameter, getattr(parameter, self.gradient)))
            masters = {key: local(state[key]) for key in store.keys}
            moments = {one: {name: local(state[one + name]) for name in names} for one, names in kept.items()}
            stream, looks = _stream(group, index, place + index), not group["capturable"]
            piece = Piece(parameter, weight, gradient, step, masters, moments, stream, 0)
            reason = self.refuses(piece, group)
            if store.keys:
                written = not _holds(self._marks.get(parameter), parameter) if looks else reason is not None
                if known and written:  # what nobody has to count a kernel follows by itself
                    self._follow(parameter, store, masters, look=looks)
                self._marks[parameter] = _mark(parameter)
            ran["triton" if reason is None else f"foreach ({reason})"] += 1
            if reason is None:
                whole.append(piece)
            elif self.elementwise(group) and not store.whole and not _wide(store, piece) and _flat(piece):
                yield from ((store, one) for one in _slices(piece, kept))
            else:
                yield store, piece
        if whole:
            self.fused(whole, group)

    def _prepare(self, parameter: Tensor, store: WeightStore, group: Mapping[str, Any]) -> bool:
        """Makes missing parts of a parameter's state: at its first step, and after a state of another kind.

        Returns:
            Whether the master is older than this call.
        """
        state, own = self.state[parameter], local(parameter)
        if "step" not in state:
            device = parameter.device if group["capturable"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        missing = [one for one in self.states(group) if one.name not in state]
        known = all(key in state for key in store.keys)
        entries = 1 + len(store.keys) + sum(len(one.storage(group).groups) for one in self.states(group))
        if missing or not known or len(state) > entries:
            shards = {name: local(value) for name, value in state.items()}
            store.prepare(own, shards)
            for one in missing:
                shards.update({one.name + suffix: value for suffix, value in one.storage(group).empty(own).items()})
            state.clear()
            state.update({name: _sharded(value, parameter) for name, value in shards.items()})
        return known

    def _follow(self, parameter: Tensor, store: WeightStore, masters: Mapping[str, Tensor], *, look: bool) -> None:
        """Somebody may have written to a weight since the last step: its master follows, and a warning says so once.

        look: count what was written, which waits for a GPU. Only a write or a loaded state comes here.
        """
        kept, state = store.follow(local(parameter), masters), self.state[parameter]
        if kept is None or not look or (self._said and BOUND not in state):
            return
        if written := kept.numel() - int(kept.sum()):
            state.pop(BOUND, None)
            if not self._said:
                self._said = True
                warnings.warn(
                    f"{type(self).__name__}: {written} of {kept.numel()} elements of a weight {tuple(kept.shape)} are "
                    f"not what its master in this optimizer was stored as; somebody has written them since. Their "
                    "masters start from what was written. This is said once",
                    stacklevel=5,
                )

    def _update(self, batch: Sequence[tuple[WeightStore, Piece]], group: Mapping[str, Any]) -> None:
        store, pieces = batch[0][0], [piece for _, piece in batch]
        weights = store.read(pieces)
        gradients = [
            piece.gradient.to(weight.dtype).view_as(weight) for piece, weight in zip(pieces, weights, strict=True)
        ]
        states = {}
        for one in self.states(group):
            values = one.storage(group).read([piece.moments[one.name] for piece in pieces], positive=one.positive)
            states[one.name] = [value.view_as(weight) for value, weight in zip(values, weights, strict=True)]
        work = Work(weights, gradients, states, [piece.step for piece in pieces])
        self.update(work, group)
        amaxes = [self.known_amax(index, piece, work, group) for index, piece in enumerate(pieces)]
        if any(amax is not None for amax in amaxes):
            pieces = [piece._replace(amax=amax) for piece, amax in zip(pieces, amaxes, strict=True)]
        store.write(pieces, weights)
        for one in self.states(group):
            stored = [piece.moments[one.name] for piece in pieces]
            one.storage(group).write(stored, states[one.name], positive=one.positive)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class, or of torch's optimizer of the same name.

        It casts FP32 moments to its storage, and turns a master in FP32 into its kind of master at the parameter's next
        step. The options `master`, `moments`, `stochastic_rounding` and `capturable` do not change.

        Raises:
            TypeError, ValueError: no state of an optimizer, other groups, or a state of another rule (amsgrad; Lion's
                for AdamW). Nothing has been changed then.
        """
        self._check_state(state_dict)
        arrived: dict[str, Any] = {}

        def take(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            arrived.update(given)  # torch would cast the states to the dtype of the parameter
            return {**given, "state": {}}

        options = [{name: group[name] for name in STORAGE_OPTIONS if name in group} for group in self.param_groups]
        with self.register_load_state_dict_pre_hook(take):
            super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, options, strict=True):
            for name, value in (self.defaults | own).items():
                if name in own or name not in group:
                    group[name] = value
        self._take_state(arrived)

    def _check_state(self, arrived: Mapping[str, Any]) -> None:
        """Refuses what is no state of this rule."""
        who = type(self).__name__
        need(f"{who}.load_state_dict", arrived, Mapping, "what state_dict() of an optimizer has returned")
        for name, kind in (("param_groups", Sequence), ("state", Mapping)):
            if not isinstance(arrived.get(name), kind):
                raise ValueError(
                    f"{who}.load_state_dict: has {'no' if name not in arrived else 'a damaged'} {name}; needs what "
                    "state_dict() of an optimizer has returned"
                )
        refused = [key for group in arrived["param_groups"] for key in ("amsgrad", "maximize") if group.get(key)]
        if refused:
            raise ValueError(f"{who}: has no {refused[0]}; got the state of an optimizer with it")
        for own, group in zip(self.param_groups, arrived["param_groups"], strict=False):
            wanted = {one.name for one in self.states({**own, **group})}
            for parameter, key in zip(own["params"], group["params"], strict=False):
                given, shape = arrived["state"].get(key, {}), local(parameter).shape
                found = {name for name in _STATES & given.keys() if isinstance(given[name], Tensor)}
                for name in found:
                    if (got := local(given[name]).shape) != shape:
                        raise ValueError(f"{name}: has shape {tuple(got)}; the parameter has {tuple(shape)}")
                if found and found != wanted:
                    raise ValueError(
                        f"{who}: got the state of another rule, with {' and '.join(sorted(found))}; it keeps "
                        f"{' and '.join(sorted(wanted)) or 'no state'}. Start it without a state, or load the "
                        "optimizer that the state belongs to"
                    )

    def _take_state(self, arrived: Mapping[str, Any]) -> None:
        for group, saved in zip(self.param_groups, arrived["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                given = arrived["state"].get(key)
                if given is None:
                    continue
                names = [one.name for one in self.states(group)]
                step = torch.as_tensor(given.get("step", 0.0), dtype=torch.float32)
                stale = float(given.get(_SAVED_AT, step)) != float(step)
                state = self.state[parameter] = {
                    name: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                    for name, value in given.items()
                    if name != _SAVED_AT and (name in names or not stale)
                }
                state["step"] = step.to(parameter.device if group["capturable"] else "cpu", copy=True)
                for one in self.states(group):
                    if one.name in given:
                        _store(state, one, one.storage(group), parameter)
                if is_quantized_weight(weight := local(parameter)) and state.keys() & {"master", "remainder"}:
                    weight.drop_high_precision()

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's: moments in FP32, by torch's names, so that torch's optimizer loads it.

        With moments in FP8 or int8 it also holds their scales, so that loading gives the same codes. A master has its
        own entry. torch's optimizer carries these entries along unchanged; if it has stepped since, this optimizer
        notices when it loads the state, and makes them anew. Sharded parameters have no scales there, because other
        shards may load the state.
        """
        result = super().state_dict()
        groups = zip(self.param_groups, result["param_groups"], strict=True)
        order = {id(p): key for g, s in groups for p, key in zip(g["params"], s["params"], strict=True)}
        for group in self.param_groups:
            for parameter in group["params"]:
                key = order[id(parameter)]
                if key not in result["state"]:
                    continue
                state = result["state"][key] = dict(result["state"][key])
                if len(state) > 1 + len(self.states(group)):
                    state[_SAVED_AT] = state["step"].clone()
                for one in self.states(group):
                    if one.name in state and state[one.name].itemsize < 4:
                        storage = one.storage(group)
                        stored = {name: local(state[one.name + name]) for name in storage.groups}
                        (wide,) = storage.read([stored], positive=one.positive)
                        state[one.name] = _sharded(wide.view(stored[""].shape), parameter)
                        for name in storage.groups.keys() - {""} if hasattr(parameter, "to_local") else ():
                            del state[one.name + name]  # of this division into shards
                if hasattr(parameter, "to_local"):
                    state.pop(BOUND, None)  # of this shard
        return result


def _check_number(who: str, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        return  # it is not read back
    if not isinstance(value, Real):
        raise TypeError(f"{who}: {name} is {value!r}; needs a number")
    if not float(value) >= 0.0:
        raise ValueError(f"{who}: {name} is {value}; needs 0 or more")


def _check_betas(who: str, betas: Any) -> None:
    try:
        fit = len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas)
    except TypeError:
        raise TypeError(f"{who}: betas is {betas!r}; needs two numbers such as (0.9, 0.95)") from None
    if not fit:
        raise ValueError(f"{who}: betas are {betas}; needs two numbers, each 0 or more, and less than 1")


def _store(state: dict[str, Any], one: State, storage: Storage, parameter: Tensor) -> None:
    """Casts a moment in FP32 (or already in this storage's codes) to the optimizer's storage."""
    arrived = {one.name: local(state.pop(one.name))}
    arrived |= {one.name + name: state.pop(one.name + name) for name in group_scales() if one.name + name in state}
    given, own = arrived[one.name], storage.empty(local(parameter))
    scales = {key.removeprefix(one.name): value for key, value in arrived.items() if key != one.name}
    same = scales.keys() == own.keys() - {""}
    if same:
        own.update(scales)
    if given.dtype == own[""].dtype:
        own[""].copy_(given)
    else:
        wide = widened(arrived)[one.name] if given.itemsize == 1 else given.to(torch.float32, copy=True)
        storage.write([own], [wide], positive=one.positive, keep=same and bool(scales))
    state.update({one.name + name: _sharded(value, parameter) for name, value in own.items()})


def widened(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter as torch's optimizers keep it: moments in FP32, without masters and scales.

    Example:
        >>> widened({"step": torch.ones(()), "exp_avg": torch.ones(2).bfloat16(), "master": torch.ones(2)})
        {'step': tensor(1.), 'exp_avg': tensor([1., 1.])}
    """
    plain = {}
    for name, value in state.items():
        scales = {suffix: state[name + suffix] for suffix in group_scales() if name + suffix in state}
        storage = next((one for one in STORAGES.values() if one.groups.keys() - {""} == scales.keys() and scales), None)
        if storage is not None:
            (wide,) = storage.read([{"": value, **scales}], positive=name == POSITIVE)
            plain[name] = wide.view(value.shape)
        elif not any(name.endswith(suffix) for suffix in group_scales()) and name not in ("master", "remainder", BOUND):
            plain[name] = value.to(torch.float32) if isinstance(value, Tensor) else value
    return plain


def group_scales() -> set[str]:
    """Ends of the names of the scales of all storages, such as "_amax"."""
    return {name for storage in STORAGES.values() for name in storage.groups if name}


def _mark(parameter: Tensor) -> _Mark:
    """Each write moves it, but one through `.data` of a plain tensor. Views of codes have versions of their own."""
    weight = local(parameter)
    if is_quantized_weight(weight):
        return weakref.ref(weight.codes), weight.codes._version, weight.common.writes
    return weakref.ref(weight), weight._version, 0


def _holds(mark: _Mark | None, parameter: Tensor) -> bool:
    """Whether nobody has written to a parameter since its mark, as far as a version can tell."""
    now = _mark(parameter)
    return mark is not None and mark[0]() is now[0]() and mark[1:] == now[1:]


def _stream(group: Mapping[str, Any], index: int, place: int) -> int:
    """The key of a parameter's random numbers: its name as the model has it, if the optimizer knows names."""
    names = group.get("param_names")
    return zlib.crc32(_WRAPPERS.sub("", names[index]).encode()) if names else place


def summed(parameter: Tensor, gradient: Any) -> Any:
    """The gradient, split as the parameter is. Ranks that each see a part of the tokens may hold parts of a sum."""
    if any(place.is_partial() for place in getattr(gradient, "placements", ())):
        return gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return gradient


def _sharded(tensor: Any, like: Tensor) -> Any:
    """Makes a DTensor of a tensor with an entry for each element of a shard; returns anything else unchanged."""
    if not hasattr(like, "to_local") or not isinstance(tensor, Tensor) or tensor.shape != local(like).shape:
        return tensor
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    whole = {"shape": like.shape, "stride": like.stride()}
    return type(like.data).from_local(tensor, mesh, placements, run_check=False, **whole)  # type: ignore[attr-defined]


def _wide(store: WeightStore, piece: Piece) -> bool:
    """Whether nothing needs decoding."""
    wide = all(one[""].itemsize >= 4 for one in piece.moments.values())
    return store.in_place and wide and piece.gradient.dtype == piece.weight.dtype


def _flat(piece: Piece) -> bool:
    # slices of a subclass need not be its memory
    return type(piece.weight) in PLAIN and piece.weight.is_contiguous() and piece.gradient.is_contiguous()


def _slices(piece: Piece, kept: Mapping[str, Mapping[str, int]]) -> Iterator[Piece]:
    """Slices of a parameter's flat elements, of whole groups; kept: the `groups` of each state."""
    most = _SLICE if piece.weight.device.type == "cpu" else _ACCELERATOR_SLICE
    for start in range(0, piece.weight.numel(), most):
        stop = min(start + most, piece.weight.numel())

        def cut(tensor: Tensor, every: int = 1, start: int = start, stop: int = stop) -> Tensor:
            return tensor.view(-1)[start // every : -(-stop // every)]

        moments = {
            state: {name: cut(tensor, kept[state][name]) for name, tensor in stored.items()}
            for state, stored in piece.moments.items()
        }
        masters = {key: cut(tensor) for key, tensor in piece.state.items()}
        yield piece._replace(
            weight=cut(piece.weight), gradient=cut(piece.gradient), state=masters, moments=moments, start=start
        )


def _batches(
    pieces: Iterable[tuple[WeightStore, Piece]],
) -> Iterator[list[tuple[WeightStore, Piece]]]:
    """Pieces to update together, of one storage, device and dtype: all that need no decoding, else a few."""
    open_batches: dict[Any, list[tuple[WeightStore, Piece]]] = {}
    for store, piece in pieces:
        wide = _wide(store, piece)
        key = store, piece.weight.device, piece.weight.dtype, piece.gradient.dtype, wide
        batch = open_batches.setdefault(key, [])
        batch.append((store, piece))
        most = _SLICE if piece.weight.device.type == "cpu" else _ACCELERATOR_SLICE
        if not wide and sum(one.weight.numel() for _, one in batch) >= most:
            yield open_batches.pop(key)
    yield from open_batches.values()


# --- gradients of 16-bit parameters, accumulated in FP32 ---


def accumulate_fp32(parameters: Iterable[Tensor]) -> None:
    """Makes the `.grad` of 16-bit parameters FP32, so that the sum over micro-batches is not rounded to BF16.

    Each backward still gives BF16 numbers; their sum is FP32 (Megatron's `main_grad`). torch's clipping, GradScaler and
    `zero_grad` work as before. It costs 2 bytes an element, and torch's optimizers refuse such gradients.

    Args:
        parameters: of a model, before its first backward.
    Raises:
        RuntimeError: a parameter has a gradient already.  TypeError: no parameters, such as a model.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> accumulate_fp32([weight])
        >>> for part in (1.0, 0.001, 0.001, 0.001):
        ...     (weight * part).sum().backward()
        >>> weight.grad                                 # in BF16 it would have stayed 1
        tensor([1.0030])
    """
    need("accumulate_fp32", parameters, Iterable, "parameters: model.parameters()")
    for parameter in parameters:
        need("accumulate_fp32", parameter, Tensor, "parameters: model.parameters()")
        if parameter.is_floating_point() and parameter.itemsize < 4:
            if parameter.grad is not None:
                raise RuntimeError(
                    "accumulate_fp32: a parameter has a gradient in 16 bits already; call zero_grad first"
                )
            parameter.grad_dtype = torch.float32


# --- a second warm-up of the learning rate, after a change of precision ---


def rewarm_factor(done: int, steps: int) -> float:
    """Share of the learning rate in the step after `done` steps of a warm-up of `steps`.

    Example:
        >>> [rewarm_factor(done, 3) for done in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min(1.0, (done + 1) / (steps + 1))


def rewarm(optimizer: Optimizer, steps: int, *, done: int = 0) -> RemovableHandle:
    """Lowers the learning rate in the next steps of an optimizer, and lets it rise to its schedule.

    After a switch to FP8, or to another storage of states, gradients and moments do not fit each other for a while, and
    full steps may throw the model back. The factor applies only within each step, on top of any schedule.

    Args:
        optimizer: any of torch's or of `ottava.optim`; its lr are numbers.
        steps: number of steps with a lower rate: the first with 1 / (steps + 1), the last with steps / (steps + 1).
        done: how many of these steps a resumed run has done.
    Returns:
        A handle; `.remove()` ends the warm-up at once.
    Raises:
        ValueError: steps or done below 0.  TypeError: no optimizer, or no whole numbers.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> handle = rewarm(optimizer, 1)
        >>> for _ in range(3):
        ...     weight.grad = -torch.ones(1)
        ...     optimizer.step()
        ...     print(float(weight.detach()), optimizer.param_groups[0]["lr"])
        0.5 1.0
        1.5 1.0
        2.5 1.0
    """
    need("rewarm", optimizer, Optimizer, "a torch.optim.Optimizer; its scheduler stays as it is")
    need_type("rewarm: steps", steps, int)
    need_type("rewarm: done", done, int)
    if steps < 0 or done < 0:
        raise ValueError(f"rewarm: steps is {steps} and done {done}; each needs 0 or more")
    count = done
    wanted: list[Any] = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        wanted[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * rewarm_factor(count, steps)

    def after(optimizer: Optimizer, *_: Any) -> None:
        nonlocal count
        count += 1
        for group, lr in zip(optimizer.param_groups, wanted, strict=False):  # none, if it was removed meanwhile
            group["lr"] = lr
        wanted.clear()
        if count >= steps:
            handle.remove()

    handle = optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return handle
