"""The recipe of the moment: the one ContextVar of ottava.

A recipe is run-time state, not a module type. Each ottava Linear carries the recipe of its conversion. `autocast`
overrules it for a while, in this thread or task only; autocasts may be nested. The forward of a layer reads the recipe
once and hands it to its backward.

torch.compile cannot trace a ContextVar, and a constant in its place would silently go stale. So `autocast` also writes
its settings into `_COMPILED_VIEW`, a plain object on which Dynamo guards: entering or leaving an autocast recompiles.
The price: compiled code sees the autocast that any thread entered or left last (docs/design.md, decision 10).
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace, TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ottava.base.errors import need_known
from ottava.kernels.gate import constant_in_graph
from ottava.numerics.accumulator import Accumulator, get_accumulator
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import GEMMS, Recipe, get_recipe

P = ParamSpec("P")
R = TypeVar("R")
Update = Literal["step", "autocast"]
Part = Literal["all", "forward", "backward"]
"""The doors of a boundary: all, input and weight ("forward"), or grad_output ("backward")."""


class Session:
    """The states that ran inside an autocast that makes boundaries: calibration, and TransformerEngine's timing.

    A boundary covers whole models, so a rank on which a layer was idle agrees with one on which it ran.
    """

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}  # each a `state.ScalingState`: that file imports this one
        self._claimed = False
        self._notes: list[Any] = []

    def touch(self, state: Any) -> None:
        """Notes that a layer of this state ran."""
        self._states[id(state)] = state  # by identity: two models may have equal states

    def note(self, notes: list[Any]) -> None:
        """Keeps what casts have seen until the boundary; an exception that ends the autocast drops it."""
        self._notes += notes

    def claim_backward(self) -> bool:
        """True for the first caller, because the backward of the first layer ends last."""
        first, self._claimed = not self._claimed, True
        return first

    def close(self, part: Part) -> None:
        """Makes the boundary."""
        notes, self._notes = self._notes, []
        for state in self._states.values():
            state.stage(notes)  # the doors of all states, once
            notes = []
            state.update(part)

    @property
    def predicts(self) -> bool:
        """Whether a model that ran here has predicted scales."""
        return any(state.predicts for state in self._states.values())


@dataclass(frozen=True)
class Ambient:
    """The settings of the innermost `autocast`."""

    recipe: Recipe | None = None
    """For every layer, under the accumulator below; None: each layer keeps its recipe."""
    enabled: bool = True
    """False: torch's linear everywhere."""
    calibrating: bool = False
    """High precision, but every door stages the amax of its tensor."""
    accumulator: Accumulator | None = None
    """The profile that an autocast has named, this one or one around it."""
    group: ProcessGroup | None = None
    """The ranks that share amaxes."""
    session: Session | None = None
    """Set if this autocast, or an autocast around it, makes boundaries."""
    batch_invariant: bool = False
    """Whether the bits of a row may not depend on the other rows."""
    ear: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(heard=False), repr=False, compare=False)
    """Notes that a layer has read these settings."""

    def recipe_for(self, layer: str, own: Recipe) -> Recipe:
        """The resolved recipe that the layer of that full name runs; `own` is the layer's resolved recipe."""
        return self.asked_of(layer, own) if self.enabled else TORCHS_OWN

    def asked_of(self, layer: str, own: Recipe) -> Recipe:
        """The same, but of a disabled autocast too: a calibration prepares for it."""
        if self.batch_invariant and not torch.compiler.is_compiling():
            # first the recipe that would run, then its twin that is batch invariant
            return made_invariant(replace(self, batch_invariant=False).asked_of(layer, own))
        if self.recipe is None:
            # compiled code takes no recipe that is made while it is traced: its layers run uncompiled then
            plain = self.accumulator is None or torch.compiler.is_compiling()
            return own if plain else _under(own, self.accumulator)
        if not self.recipe.overrides:  # one object for all layers: plans are kept by the identity of its specs
            return self.recipe
        if torch.compiler.is_compiling():
            return getattr(_COMPILED_VIEW, _view_name(id(self.recipe), layer))  # type: ignore[no-any-return]
        return self.recipe.for_layer(layer)


@constant_in_graph  # Dynamo traces no fnmatch; both arguments are guarded on
def _view_name(ambient_recipe: int, layer: str) -> str:
    """Makes the resolved recipe an attribute of `_COMPILED_VIEW`, because Dynamo reads objects only from attributes.

    The argument is the id of the ambient recipe: torch 2.11's Dynamo passes no frozen dataclass, but guards on an id.
    """
    recipe = _COMPILED_VIEW.ambient.recipe
    assert recipe is not None
    assert id(recipe) == ambient_recipe
    name = f"{hash(recipe)}:{layer.replace('.', '/')}"  # Dynamo takes no dot in an attribute's name
    # an attribute stays: the number of recipes times the number of layers bounds them
    setattr(_COMPILED_VIEW, name, recipe.for_layer(layer))
    return name


TORCHS_OWN = replace(get_recipe("bf16"), name="autocast(enabled=False)")
"""Layers under autocast(enabled=False) run torch's own linear, with all its derivatives, and no GEMM of ottava."""
_NO_AUTOCAST = Ambient()
AMBIENT: contextvars.ContextVar[Ambient] = contextvars.ContextVar("ottava_autocast", default=_NO_AUTOCAST)


class _CompiledView:
    """torch.compile's guards read the ambient recipe here."""

    def __init__(self) -> None:
        self.ambient = _NO_AUTOCAST
        self.traced = False
        """Whether torch has compiled a layer. A compiled layer reads no autocast when it runs."""


_COMPILED_VIEW = _CompiledView()


def ambient() -> Ambient:
    """The settings of the innermost `autocast` of this thread or task."""
    if torch.compiler.is_compiling():
        return _COMPILED_VIEW.ambient
    innermost = AMBIENT.get()
    # each layer passes here, so an autocast that no layer heard had no effect and says so at its end
    innermost.ear.heard = True
    return innermost


def traced_ambient() -> Ambient:
    """The same for a layer under compilation. Code calls it while tracing; the graph does not."""
    _COMPILED_VIEW.traced = True
    return _COMPILED_VIEW.ambient


@functools.lru_cache(maxsize=256)
def _under(recipe: Recipe, accumulator: Accumulator | None) -> Recipe:
    """One object for all equal recipes: Dynamo guards on identity, so a new object in each step would recompile."""
    return recipe if accumulator is None else recipe.under(accumulator)


class Autocast(AbstractContextManager[None]):
    """The result of `autocast`: a context, and a decorator of functions. Code may enter it again."""

    def __init__(self, entering: Callable[[], AbstractContextManager[None]]) -> None:
        self._entering = entering
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._entering()
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function; each call enters this autocast.

        Raises:
            TypeError: a generator or coroutine function: a call runs nothing of its body.
        """
        lazy = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        # silence here would run the body outside of the autocast, in another recipe
        if any(is_lazy(function) for is_lazy in lazy):
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                f"@ottava.autocast: {name} is a generator or coroutine function: its body runs after the call has "
                "returned, and so after the autocast has ended. Write `with ottava.autocast(...):` inside its body"
            )

        @functools.wraps(function)
        def under(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._entering():
                return function(*args, **kwargs)

        return under


def autocast(
    recipe: Recipe | str | None = None,
    *,
    enabled: bool = True,
    calibrating: bool = False,
    update: Update = "step",
    group: ProcessGroup | None = None,
    accumulator: Accumulator | str | None = None,
    batch_invariant: bool | None = None,
) -> Autocast:
    """Runs ottava layers under another recipe, or in high precision, or calibrates them; a context or a decorator.

    Autocasts nest: what is None in the inner one is as in the autocast around it.

    Args:
        recipe: a Recipe or its name, for every layer; None, and no autocast around it names one: each layer keeps the
            recipe of its conversion.
        enabled: False runs torch's own linear in every layer, for a BF16 evaluation of the unchanged model.
        calibrating: layers run torch's own linear in high precision. Meanwhile the doors of predicted scales (delayed,
            guarded) stage every amax of the forward and of a backward inside the context. If the context ends without
            an exception, their histories take one step.
        update: "step" changes predicted scales at optimizer steps. "autocast" is TransformerEngine's timing: forward
            scales change when the outermost autocast ends, gradient scales when the backward ends.
        group: the ranks that share amaxes; None: ottava finds them, see `ScalingState`.
        accumulator: a profile or its name; every GEMM on codes is then emulated as that tensor core sums it, on any
            device; see `Accumulator`. None: the recipe's own, else that of an autocast around it, else the device's.
        batch_invariant: the bits of a row, in the forward and in the gradient of the input, depend on neither the batch
            nor its padding nor the cuts of a sequence; recipes with one scale for all rows are refused
            (docs/serving.md). False ends it inside of an autocast with True. On a CPU, in ottava's linears,
            norms, activations and attention.
    Raises:
        ValueError: unknown recipe, update or accumulator; batch_invariant with enabled=False or calibrating=True. In a
            forward: a recipe or a kernel that cannot be batch invariant.
        TypeError: it decorates a generator or coroutine function, whose body runs after the autocast has ended.
    Warns: if it ends without an exception and had no effect: no ottava layer ran in it, or it calibrated and no layer
        that ran has predicted scales. enabled=False and recipes like bf16 do not warn, because unconverted layers run
        in high precision anyway. A compiled layer does not read the autocast when it runs. So once torch has compiled
        one in this process, only a calibration and update="autocast" can warn.
    Edge cases: unconverted layers ignore it. A thread that is started inside it sees no autocast; it does with
        `threading.Thread(target=contextvars.copy_context().run, args=(function,))`; tasks of asyncio see it.
        A backward uses the recipe of its forward, even if torch.utils.checkpoint recomputes that forward after the
        context has ended. In a torch.compile'd model calibrating, update="autocast", and an accumulator without a
        recipe run the layers uncompiled; fullgraph=True refuses that.

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
    need_known("autocast", "update", update, get_args(Update))
    if batch_invariant and (calibrating or not enabled):
        raise ValueError(
            "autocast: batch_invariant=True holds for ottava's GEMMs; needs enabled=True, calibrating=False"
        )
    profile = None if accumulator is None else get_accumulator(accumulator)
    asked = None if recipe is None else get_recipe(recipe)
    return Autocast(functools.partial(_entering, asked, enabled, calibrating, update, group, profile, batch_invariant))


@contextmanager
def _entering(
    asked: Recipe | None,
    enabled: bool,
    calibrating: bool,
    update: Update,
    group: ProcessGroup | None,
    accumulator: Accumulator | None,
    batch_invariant: bool | None,
) -> Iterator[None]:
    """One entering of an `autocast`."""
    if torch.compiler.is_compiling():  # torch would break the graph at the ContextVar, and name that
        torch._dynamo.graph_break(
            msg="ottava.autocast: compiled code cannot enter an autocast, because it reads none when it runs. Enter it "
            "around the call of the compiled function, or leave out fullgraph=True"
        )
    # not `ambient()`: entering an autocast inside of another is not what a layer does, and must not be heard
    outer = AMBIENT.get()
    recipe = asked or outer.recipe
    # a recipe that names its accumulators keeps them under an autocast that names another around it
    own = asked is not None and any(getattr(asked, gemm).accumulator is not None for gemm in GEMMS)
    profile = accumulator or (None if own else outer.accumulator)
    if recipe is not None:
        # one object for equal recipes, so that a loop with an autocast in each step compiles once
        recipe = _under(recipe, profile)
    # only the outermost autocast with TransformerEngine's timing makes boundaries: an inner one would change scales in
    # the middle of a forward
    session = Session() if calibrating or (update == "autocast" and outer.session is None) else None
    on, around = enabled and not calibrating, session or outer.session
    invariant = on and (outer.batch_invariant if batch_invariant is None else batch_invariant)
    entered = Ambient(recipe, on, calibrating, profile, group or outer.group, around, invariant)
    token = AMBIENT.set(entered)
    # compiled code guards on this attribute: it recompiles here, and finds its graph again when the autocast ends
    _COMPILED_VIEW.ambient = entered
    try:
        yield
        # not in `finally`: an exception leaves histories as they were
        if session is not None and calibrating:
            session.close("all")
        elif session is not None and torch.is_grad_enabled():
            session.close("forward")
        if reason := _did_nothing(entered, session):
            warnings.warn(reason, stacklevel=4)  # this, contextlib, Autocast, and the user's line
    finally:
        outer.ear.heard |= entered.ear.heard
        AMBIENT.reset(token)
        _COMPILED_VIEW.ambient = AMBIENT.get()  # not the one at the start: another thread may have left that one


def _did_nothing(ended: Ambient, session: Session | None) -> str | None:
    """Why an autocast had no effect; None if it had one."""
    name = ended.recipe.name if ended.recipe is not None else None
    if ended.ear.heard:
        if not ended.calibrating or session is None or session.predicts:
            return None
        return (
            "ottava.autocast(calibrating=True) filled no history: no layer that ran has predicted scales. Name a "
            'recipe that has some: ottava.autocast("delayed", calibrating=True)'
        )
    wanted = ended.calibrating or (ended.enabled and (ended.recipe is None or ended.recipe.quantized))
    if not wanted or (_COMPILED_VIEW.traced and ended.session is None):
        return None
    effect = "it filled no history" if ended.calibrating else "nothing ran in FP8 by it"
    line = f'ottava.convert(model, "{name or ("delayed" if ended.calibrating else "tensorwise")}")'
    return (
        f"ottava.autocast: no ottava layer ran in it, so {effect}. Before it, convert the model that runs in it: {line}"
    )


# --- batch invariance: the bits of a row depend on no other row, batch, padding or cut of a sequence ---

LANES = 64
"""Rows of a multiple of this many elements have no end inside a vector register."""
_TILE = 32_768
"""Elements of a tile; torch gives a thread no fewer."""


@functools.lru_cache(maxsize=256)
def made_invariant(recipe: Recipe) -> Recipe:
    """A resolved recipe whose GEMMs are batch invariant.

    Raises:
        ValueError: rows share a scale, or random bits.

    Example:
        >>> from ottava.recipe import RECIPES
        >>> made_invariant(RECIPES["rowwise"]).name
        'rowwise/batch_invariant'
        >>> made_invariant(RECIPES["tensorwise"])
        Traceback (most recent call last):
        ValueError: recipe 'tensorwise' cannot be batch invariant: fprop.lhs is E4M3[tensor], and rows share its scale.
        Take a recipe with scales for rows or blocks of a row, such as 'rowwise', 'blockwise' or 'mxfp8'
    """
    for gemm in ("fprop", "dgrad"):  # the gradient of a weight is a sum over rows
        spec = getattr(recipe, gemm).lhs
        if reason := "" if spec is None else _shared(spec):
            raise ValueError(
                f"recipe {recipe.name!r} cannot be batch invariant: {gemm}.lhs is {spec}, and {reason}.\n"
                "Take a recipe with scales for rows or blocks of a row, such as 'rowwise', 'blockwise' or 'mxfp8'"
            )
    gemms = {gemm: replace(getattr(recipe, gemm), batch_invariant=True) for gemm in GEMMS}
    return replace(recipe, name=f"{recipe.name}/batch_invariant", **gemms)


def _shared(spec: QuantizationSpec) -> str:
    """What rows share in a cast; "" if nothing."""
    if spec.granularity.rows != 1:
        return "rows share its scale"
    if spec.scale_format == "e4m3":
        return "its scales of blocks share one of the tensor"
    if spec.transform is not None:
        return f"rows share the numbers of its transform ({spec.transform})"
    return "random bits depend on the place of a row" if spec.rounding == "stochastic" else ""


def in_tiles(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """An elementwise function of rows (..., K), in tiles of one number of rows.

    Args:
        function: operands (T, K_i) -> (T, K); elementwise within a row.
        operands: of equal leading dimensions.

    Example:
        >>> x = torch.randn(5, 64)
        >>> torch.equal(in_tiles(torch.exp, x)[3:], in_tiles(torch.exp, x[3:]))
        True
    """
    leading = operands[0].shape[:-1]
    rows = [x.reshape(-1, x.shape[-1]) for x in operands]
    count, wide = rows[0].shape[0], max(x.shape[-1] for x in rows)
    whole = all(x.shape[-1] % (2 * LANES) == 0 for x in rows)  # also in the halves of a gated activation
    # torch runs the ends of a tensor by scalar code with other roundings than its vectors: tiles of one size have no
    # such ends at all, or all rows have them
    tile = max(1, _TILE // max(wide, 1)) if whole else 1  # rows alone, where a row itself ends inside a vector
    if short := -count % tile:
        rows = [torch.nn.functional.pad(x, (0, 0, 0, short)) for x in rows]
    made = [function(*(x[i : i + tile].contiguous() for x in rows)) for i in range(0, max(count, 1), tile)]
    y = (torch.cat(made) if len(made) > 1 else made[0])[:count]
    return y.view(*leading, y.shape[-1])
