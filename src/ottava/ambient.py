"""Which recipe runs at this moment: the one ContextVar of ottava.

A recipe is run-time state, not a module type: each ottava Linear carries the recipe it was converted with, and
`autocast` overrules it for a while, in this thread or task only, nested as deep as you like. The forward of a layer
reads it once and hands it to its backward, which never looks here.

torch.compile cannot trace a ContextVar, and a constant in its place would go stale without a word. So `autocast` also
writes what it set into `_COMPILED_VIEW`, a plain object that Dynamo does guard on: entering or leaving it recompiles.
The price: compiled code sees what the thread says that entered or left an `autocast` last, whichever thread that is
(docs/design.md, decision 9).
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, ParamSpec, Protocol, TypeVar, get_args

import torch
from torch.distributed import ProcessGroup

from ottava.errors import unknown_name
from ottava.kernels.custom_operator import constant_in_graph
from ottava.recipe import Recipe, get_recipe

P = ParamSpec("P")
R = TypeVar("R")
Update = Literal["step", "autocast"]
Part = Literal["all", "forward", "backward"]
"""Whose boundary it is: the doors of input and weight, of grad_output, or all."""


class Rolls(Protocol):
    """The state of one model, as far as an autocast needs to know it; see `state.ScalingState`."""

    def update(self, part: Part = "all") -> None:
        """A boundary of all its doors, or of those of the forward or the backward."""

    @property
    def predicts(self) -> bool:
        """Whether a door of it has a predicted scale, so that there is something to calibrate."""


class Session:
    """What ran inside an autocast that is a boundary of its own: calibration, and TransformerEngine's timing.

    A boundary is one of whole models, so that ranks on which a layer was idle agree with those on which it ran.
    """

    def __init__(self) -> None:
        self._states: dict[int, Rolls] = {}
        self._claimed = False

    def touch(self, state: Rolls) -> None:
        """Notes that a layer of this state ran."""
        self._states[id(state)] = state

    def claim_backward(self) -> bool:
        """True for the first layer that asks: when its backward ends, the whole backward has."""
        first, self._claimed = not self._claimed, True
        return first

    def close(self, part: Part) -> None:
        """The boundary."""
        for state in self._states.values():
            state.update(part)

    @property
    def predicts(self) -> bool:
        """Whether a model that ran has predicted scales."""
        return any(state.predicts for state in self._states.values())


class Ear:
    """Whether a layer has asked what an autocast says."""

    __slots__ = ("heard",)

    def __init__(self) -> None:
        self.heard = False


@dataclass(frozen=True)
class Ambient:
    """What the innermost `autocast` says."""

    recipe: Recipe | None = None
    """For every layer; None leaves each layer its own."""
    enabled: bool = True
    """False: torch's own linear everywhere."""
    calibrating: bool = False
    """High precision, but every door sees its tensor."""
    group: ProcessGroup | None = None
    """Over which amaxes are reduced."""
    session: Session | None = None
    """There when this autocast, or one around it, is a boundary of its own."""
    ear: Ear = field(default_factory=Ear, repr=False, compare=False)
    """Notes the layers that ask."""

    def recipe_for(self, layer: str, own: Recipe) -> Recipe:
        """The recipe to run in the layer of that full name, whose own resolved recipe is `own`; no overrides left."""
        return self.asked_of(layer, own) if self.enabled else TORCHS_OWN

    def asked_of(self, layer: str, own: Recipe) -> Recipe:
        """The same, whether enabled or not: what a calibration prepares for."""
        if self.recipe is None:
            return own
        if not self.recipe.overrides:
            return self.recipe
        if torch.compiler.is_compiling():
            return getattr(_COMPILED_VIEW, _view_name(id(self.recipe), layer))  # type: ignore[no-any-return]
        return self.recipe.for_layer(layer)


@constant_in_graph  # Dynamo traces no fnmatch; both arguments are guarded on
def _view_name(ambient_recipe: int, layer: str) -> str:
    """Puts the resolved recipe where Dynamo finds it as an attribute, the only kind of object it lets code ask.

    The ambient recipe is named by its id: torch 2.11's Dynamo hands no frozen dataclass over, and guards on an id too.
    """
    recipe = _COMPILED_VIEW.ambient.recipe
    assert recipe is not None
    assert id(recipe) == ambient_recipe
    name = f"{hash(recipe)}:{layer.replace('.', '/')}"  # Dynamo takes no dot in an attribute's name
    setattr(_COMPILED_VIEW, name, recipe.for_layer(layer))
    return name


TORCHS_OWN = replace(get_recipe("bf16"), name="autocast(enabled=False)")
"""What runs where nothing is enabled: no GEMM of ottava's, but torch's own linear with every derivative that it has."""
_NOTHING_SAID = Ambient()
AMBIENT: contextvars.ContextVar[Ambient] = contextvars.ContextVar("ottava_autocast", default=_NOTHING_SAID)


class _CompiledView:
    """Where torch.compile's guards read the ambient recipe."""

    def __init__(self) -> None:
        self.ambient = _NOTHING_SAID
        self.traced = False
        """Whether there may be compiled layers, which ask nobody when they run."""


_COMPILED_VIEW = _CompiledView()


def ambient() -> Ambient:
    """What the innermost `autocast` of this thread or task says."""
    if torch.compiler.is_compiling():
        return _COMPILED_VIEW.ambient
    said = AMBIENT.get()
    said.ear.heard = True
    return said


def traced_ambient() -> Ambient:
    """The same for a layer that is being compiled; called while tracing, not by the graph."""
    _COMPILED_VIEW.traced = True
    return _COMPILED_VIEW.ambient


@functools.lru_cache(maxsize=256)
def _interned(recipe: Recipe) -> Recipe:
    """One object for all equal recipes: Dynamo guards on identity, and a recipe made anew each step would recompile."""
    return recipe


class Autocast(AbstractContextManager[None]):
    """What `autocast` returns: a context, and a decorator of functions. It may be entered again."""

    def __init__(
        self, recipe: Recipe | None, *, enabled: bool, calibrating: bool, update: Update, group: ProcessGroup | None
    ) -> None:
        self._said = (recipe, enabled, calibrating, update, group)
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = _saying(*self._said)
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function under this autocast, entered anew at every call.

        Raises:
            TypeError: a generator or coroutine function: a call of one runs nothing of its body.
        """
        lazy = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_lazy(function) for is_lazy in lazy):
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                f"@ottava.autocast: {name} is a generator or coroutine function, whose body runs after the call has "
                "returned, and so after the autocast has ended. Write `with ottava.autocast(...):` inside its body"
            )

        @functools.wraps(function)
        def under(*args: P.args, **kwargs: P.kwargs) -> R:
            with _saying(*self._said):
                return function(*args, **kwargs)

        return under


def autocast(
    recipe: Recipe | str | None = None,
    *,
    enabled: bool = True,
    calibrating: bool = False,
    update: Update = "step",
    group: ProcessGroup | None = None,
) -> Autocast:
    """Runs ottava layers under another recipe, or in high precision, or calibrates them; a context or a decorator.

    Args:
        recipe: a Recipe or its name for every layer; None leaves each layer the one it was converted with.
        enabled: False runs torch's own linear in every layer, to evaluate in BF16 without touching the model.
        calibrating: runs in high precision, bit for bit as without, while the doors of predicted scales (delayed,
            guarded) note every amax of the forward and of a backward inside the context. Leaving it without an
            exception is one step of their histories.
        update: "step" moves predicted scales at optimizer steps. "autocast" is TransformerEngine's timing: forward
            scales when the outermost autocast is left, gradient scales when the backward ends.
        group: over which amaxes are reduced; None finds it, see `ScalingState`.
    Raises:
        ValueError: unknown recipe or update.
        TypeError: as a decorator of a generator or coroutine function, whose body runs after the autocast has ended.
    Warns: when it ends without an exception and did nothing: no ottava layer ran in it, or it calibrated and no layer
        that ran has predicted scales. High precision is what unconverted layers run anyway, so enabled=False and a
        recipe like bf16 are silent. Compiled layers ask nobody when they run: once one was compiled in this process,
        only a calibration and update="autocast" can tell.
    Edge cases: layers that were not converted do not listen. A backward uses the recipe of its forward, also where
        torch.utils.checkpoint recomputes it after the context has ended. In a torch.compile'd model calibrating and
        update="autocast" run the layers uncompiled, which fullgraph=True refuses.

    Example:
        >>> import ottava
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
        >>> report = ottava.convert(model, "tensorwise")
        >>> x = torch.randn(4, 64, dtype=torch.bfloat16)
        >>> with ottava.autocast(ottava.RECIPES["tensorwise"].override("0", wgrad=None)):
        ...     model(x).sum().backward()                  # one GEMM of one layer in BF16
        >>> with torch.no_grad(), ottava.autocast(enabled=False):
        ...     y = model(x)                               # BF16 evaluation
    """
    if update not in get_args(Update):
        raise ValueError(f"autocast: {unknown_name('update', update, get_args(Update))}")
    asked = _interned(get_recipe(recipe)) if recipe is not None else None
    return Autocast(asked, enabled=enabled, calibrating=calibrating, update=update, group=group)


@contextmanager
def _saying(
    asked: Recipe | None, enabled: bool, calibrating: bool, update: Update, group: ProcessGroup | None
) -> Iterator[None]:
    """One entering of an `autocast`."""
    outer = AMBIENT.get()
    own = Session() if calibrating or (update == "autocast" and outer.session is None) else None
    entered = Ambient(asked, enabled and not calibrating, calibrating, group or outer.group, own or outer.session)
    token = AMBIENT.set(entered)
    _COMPILED_VIEW.ambient = entered
    try:
        yield
        if own is not None and calibrating:
            own.close("all")
        elif own is not None and torch.is_grad_enabled():
            own.close("forward")
        if reason := _did_nothing(entered, own):
            warnings.warn(reason, stacklevel=4)  # this, contextlib, Autocast, and who left it
    finally:
        outer.ear.heard |= entered.ear.heard
        AMBIENT.reset(token)
        _COMPILED_VIEW.ambient = AMBIENT.get()  # not what it was on entering: another thread may have left that since


def _did_nothing(said: Ambient, session: Session | None) -> str | None:
    """Why an autocast that has ended was for nothing; None if it was not."""
    name = said.recipe.name if said.recipe is not None else None
    if said.ear.heard:
        if not said.calibrating or session is None or session.predicts:
            return None
        return (
            "ottava.autocast(calibrating=True) filled no history: no layer that ran has predicted scales. Name a "
            'recipe that has some: ottava.autocast("delayed", calibrating=True)'
        )
    wanted = said.calibrating or (said.enabled and (said.recipe is None or said.recipe.quantized))
    if not wanted or (_COMPILED_VIEW.traced and said.session is None):
        return None
    effect = "no history was filled" if said.calibrating else "nothing ran in FP8 by it"
    line = f'ottava.convert(model, "{name or ("delayed" if said.calibrating else "tensorwise")}")'
    return (
        f"ottava.autocast: no ottava layer ran in it, so {effect}. Before it, convert the model that runs in it: {line}"
    )
