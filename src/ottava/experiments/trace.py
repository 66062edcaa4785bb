"""The trace of a step: every call of torch that the user's code and libraries make, with a fingerprint of its result.

Where two runs of one program part, the first call with other code or another value is the place of the fault. So the
watch notes the first two steps, with all that the script computes before them, and the steps of experiments:

    call       name, FILE:LINE of the innermost frame that is neither torch's nor ours, module, plain arguments, results
    given      a tensor that a call gets and no call made: data, a parameter, what a collective or the backward wrote
    gradient   a parameter's gradient at the end of a backward

A fingerprint is a hash of at most 1,024 evenly spread elements, and three sums of them, which tell a rounding from
another number. Calls are seen by a TorchFunctionMode, so code of torch.compile is not. A trace that is full notes
conversions to FP8 only.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import math
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ottava.experiments.handmade import CALL, COLLECTIVE, LIBRARIES, LOOKS_ON, NARROW, OURS, USER, kind_of
from ottava.experiments.program import Below

MOST = 4_000
"""Calls of a trace."""
_SAMPLED = 1024
_DEPTH = 96  # frames
_LINES = 3  # of a script, under which a library calls
_GRADIENTS = 48  # parameters
_SHOWN = 24  # numbers of a row
_KEPT = 64  # conversions
_ROUNDS = 0.1  # of the numbers: eight bits round by a few percent
_WRAPPERS = frozenset({"__torch_function__", "wrapped", "operation", "run", "_backward"})
"""Functions of a watch through which a call of the user's goes."""
_FACTS = frozenset(
    (
        "__get__", "size", "dim", "ndimension", "stride", "numel", "nelement", "is_floating_point",
        "is_complex", "is_signed", "data_ptr", "type", "__len__", "__repr__", "__format__", "__hash__",
        "element_size", "is_contiguous", "get_device", "untyped_storage", "storage", "storage_offset",
        "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "is_same_size",
        "is_inference", "is_pinned", "is_shared", "share_memory_", "has_names", "__deepcopy__", "__reduce_ex__",
        "__setstate__", "__dlpack__", "__dlpack_device__", "__array__", "numpy", "tolist", "is_conj", "is_neg",
        "is_set_to", "_is_view", "__dir__", "is_nonzero", "__contains__", "get_default_dtype",
    )
)  # fmt: skip
"""What computes nothing."""
_EMPTY = frozenset(
    (
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new", "resize_", "set_",
        "Tensor",
    )
)  # fmt: skip
"""What gives memory without values."""
_SHORT = (("float", "f"), ("bfloat", "bf"), ("int", "i"), ("uint", "u"), ("complex", "c"))


class _Place(NamedTuple):
    code: CodeType
    line: int
    caller: CodeType | None
    """The function of the user's that called this one."""
    script: tuple[tuple[CodeType, int], ...] = ()
    """The innermost lines above it that are not installed, at most three."""


class _Noted(NamedTuple):
    name: str
    place: _Place
    module: nn.Module | None
    arguments: list[str]
    sources: list[int]
    """The entries that made the tensors it gets."""
    results: list[Any]
    """[dtype and shape, hash, mean, rms, projection], or a sample on a device that waits to be read, or a number."""
    kind: int
    """1: in a backward; 2: a backward may come through its result."""


class _Made(NamedTuple):
    """Where FP8 codes came from, by samples."""

    codes: Tensor
    where: str = ""
    numbers: Tensor | None = None
    """What the script converted outside of a forward and a backward; None: codes of another kind."""


class Trace(Below):
    """Notes calls from `enter` to `close`.

    Args:
        inside: whether a forward of a watched model runs.
        before: the trace of the step before; it says which of its entries made what is given to this step.

    Example:
        >>> trace = Trace().enter()
        >>> _ = torch.ones(2).mul(3).to(torch.float8_e4m3fn)
        >>> trace.close()
        >>> [call[0] for call in trace.facts(lambda module: "")["calls"]], trace.outside is not None
        (['ones', 'mul', 'to'], True)
    """

    def __init__(self, inside: Callable[[], bool] = lambda: False, before: Trace | None = None) -> None:
        super().__init__()
        self._inside = inside
        self.model: str | None = None
        """FILE:LINE of the first conversion to FP8 inside a forward or a backward."""
        self.outside: str | None = None
        """The same of the first one elsewhere: in an optimizer, in a collective, at loading."""
        self.full = False
        self.failed = ""
        """Why it ended early."""
        self._calls: list[_Noted] = []
        self._known: dict[int, tuple[weakref.ref[Tensor] | None, int, int, int]] = {}
        """id of a tensor -> itself, its version, the entries that wrote it last and first."""
        self._before = {} if before is None else before._known
        self._of_codes: dict[int, _Made] = {}
        """Entry -> the FP8 codes that it was made from."""
        self._before_codes = {} if before is None else before._of_codes
        self._firsts: dict[tuple[Any, ...], Tensor] = {}
        """Address and shape -> a sample of a tensor's numbers before the step first changes them."""
        self._kept: list[tuple[str, Tensor, Tensor, Tensor]] = []
        """Place of a conversion, and samples of what was kept before, of what it is to be, and of what it is then."""
        self._room = MOST

    def more(self) -> None:
        """The first forward begins: makes room for it after a long preparation."""
        self._room = len(self._calls) + MOST
        self.full = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not self.active or torch._C._get_tracing_state() is not None:
            return func(*args, **kwargs)
        self.heed_compiler()
        name = getattr(func, "__name__", type(func).__name__)
        if name == "__get__" or name.startswith("_record_function"):
            return func(*args, **kwargs)
        if func is Tensor.backward or func is torch.autograd.backward:
            return self._backward(inspect.unwrap(func), args, kwargs)
        # nothing that goes wrong here may reach the training
        note = self.safely(self._begin_call, func, name, args, kwargs, sys._getframe(1))
        result = func(*args, **kwargs)
        if note is not None:
            self.safely(note, result)
        return result

    def safely(self, does: Callable[..., Any], *about: Any) -> Any:
        """Calls it; what it raises ends the trace alone, is kept in `failed`, and None comes back."""
        try:
            return does(*about)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            self.failed = f"the trace of this step's calls ended: {type(error).__name__}: {lines[0][:200]}"
            self.active = False
            return None

    def _begin_call(
        self, func: Any, name: str, args: Any, kwargs: Any, frame: FrameType
    ) -> Callable[[Any], None] | None:
        """Notes what a call gets; returns what notes its result, None if the call is ours."""
        if self.full:  # of thousands of calls more, to ask each for its place takes long
            return None if name in _FACTS else lambda result: self._converted(name, result, args, frame)
        found = self._where(frame)
        if found is None:
            return None
        place, module, collective = found
        given = [*_tensors((args, kwargs.values()))]
        # what a call writes to may be memory without values; its result says what it wrote
        writes = name == "__setitem__" or (name[-1] == "_" != name[-2:-1])
        if not collective and name not in _FACTS and "out" not in kwargs:
            self._note_given(given[1:] if writes else given, place, module, frame)
        # before the call: it may write to them
        sources = [self._known[id(x)][2] for x in given[:8] if id(x) in self._known]
        read = given[int(name == "copy_") : 8]  # a copy leaves nothing of what was there
        codes = next((codes for x in read if (codes := self._codes_of(x)) is not None), None)
        if writes and given and torch._C._len_torch_dispatch_stack() == 0:
            self._note_write(name, given)
        arguments = [_shown(x) for x in args] + [f"{k}={_shown(v)}" for k, v in kwargs.items()]

        def end_call(result: Any) -> None:
            if collective:
                for x in given:
                    self._known.pop(id(x), None)
                self._add(f"dist.{collective}", place, module, [a for a in arguments if "[" in a], ())
            elif name not in _FACTS:
                number = isinstance(result, (bool, int, float))
                made = [] if number else [*_tensors(result)]
                converted = self._note_conversion(name, made, args, place, module)
                set_of = getattr(getattr(func, "__self__", None), "__name__", "")
                said = f"set {set_of}".strip() if name == "__set__" else name
                made = given[:1] if name == "__setitem__" else made
                if given or made:
                    values = made or ([result] if number else ())
                    self._add(said, place, module, arguments, values, sources, converted or codes)

        return end_call

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """torch calls a function without the mode that saw it. So the mode is entered again where the engine runs."""
        owner: Any = torch.autograd
        engine: Any = getattr(owner, "_engine_run_backward", None)

        def run(*args: Any, **kwargs: Any) -> Any:
            owner._engine_run_backward = engine
            with self:
                return engine(*args, **kwargs)

        if engine is not None:
            owner._engine_run_backward = run
        try:
            return func(*args, **kwargs)
        finally:
            if engine is not None:
                owner._engine_run_backward = engine

    # --- what is noted --------------------------------------------------------------------------------------------

    def gradients(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """A backward has ended: notes the gradients, those of the last parameters first."""
        self.safely(self._note_gradients, parameters, sys._getframe(1))

    def _note_gradients(self, parameters: Iterable[tuple[str, Tensor]], frame: FrameType) -> None:
        with torch._C.DisableTorchFunction():
            held = [(name, p.grad) for name, p in parameters if p.grad is not None]
        if held and not self.full and (found := self._where(frame, looked=True)) is not None:
            for name, gradient in held[:: -(-len(held) // _GRADIENTS)][::-1]:
                self._add("gradient", found[0], None, [name], (gradient,))

    def _note_given(self, given: Iterable[Tensor], place: _Place, module: nn.Module | None, frame: FrameType) -> None:
        for number, x in enumerate(given):
            known = self._known.get(id(x))
            if known is None or not _is(known[0], x) or known[1] != _version(x):
                old = self._before.get(id(x))
                origin = [] if old is None or not _is(old[0], x) else [f"entry {old[3]} of the step before"]
                about = [str(number + 1), *origin]
                self._add("given", place, module, about, (x, *_argument(x, frame)), codes=self._codes_of(x))

    def _add(
        self,
        name: str,
        place: _Place,
        module: nn.Module | None,
        arguments: list[str],
        made: Sequence[Any],
        sources: Sequence[int] = (),
        codes: _Made | None = None,
    ) -> None:
        if len(self._calls) >= self._room:
            self.full = True
            return
        results = [_empty(x) if self._blank(name, x) else fingerprint(x) for x in made]
        for x in made:
            if isinstance(x, Tensor):
                old, now = self._known.get(id(x)), len(self._calls)
                first = old[3] if old is not None and _is(old[0], x) else now
                # torch swaps no parameter to which somebody has a weak reference: a conversion would fail
                kept = None if isinstance(x, nn.Parameter) else weakref.ref(x)
                self._known[id(x)] = kept, _version(x), now, first
        with torch._C.DisableTorchFunction():
            kind = 2 * any(isinstance(x, Tensor) and x.requires_grad for x in made)
            narrow = (x for x in made if isinstance(x, Tensor) and x.dtype in NARROW and not _hidden(x))
            if (codes := codes or next((_Made(_sample(x)) for x in narrow), None)) is not None:
                self._of_codes[len(self._calls)] = codes
        kind += torch._C._current_graph_task_id() != -1
        self._calls.append(_Noted(name, place, module, arguments, [*sources], results, kind))

    def _codes_of(self, x: Tensor) -> _Made | None:
        """The FP8 codes that x was made from, in this step or in the one before."""
        for known, of_codes in ((self._known, self._of_codes), (self._before, self._before_codes)):
            if (one := known.get(id(x))) is not None:
                return of_codes.get(one[2]) if _is(one[0], x) and one[1] == _version(x) else None
        return None

    def _blank(self, name: str, x: Any) -> bool:
        """Whether x is memory without values, or a view of such that nobody has written to since."""
        if name in _EMPTY or not isinstance(x, Tensor):
            return name in _EMPTY
        with torch._C.DisableTorchFunction():
            base = x._base if x._is_view() else None
            old = None if base is None else self._known.get(id(base))
            return old is not None and old[1] == _version(x) and self._calls[old[2]].name in _EMPTY

    def _converted(self, name: str, result: Any, args: Any, frame: FrameType) -> None:
        made = [*_tensors(result)]
        with torch._C.DisableTorchFunction():
            narrow = any(x.dtype in NARROW for x in made)
        if narrow and (found := self._where(frame)) is not None:
            self._note_conversion(name, made, args, *found[:2])

    def _note_write(self, name: str, given: Sequence[Tensor]) -> None:
        """Something is to be written over: numbers that were made from codes may take the place of those before."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if any(map(_hidden, given[:2])):
                return
            key = (given[0].data_ptr(), *given[0].shape)
            if name != "copy_":
                if key not in self._firsts and len(self._firsts) < _KEPT:
                    self._firsts[key] = _sample(given[0])
                return
            made = self._codes_of(given[1]) if len(given) > 1 else None
            if made is None or made.numbers is None or given[0].shape != given[1].shape or len(self._kept) >= _KEPT:
                return
            old, new = self._firsts.get(key), _sample(given[1])
            old = _sample(given[0]) if old is None else old
            if len(new) == len(made.codes):  # as the script decodes them; a sum over ranks is no decoding
                rounded = made.numbers.float() / made.codes.float()
                rounded = rounded.where((rounded - 1).abs() < _ROUNDS, math.nan)
                self._kept.append((made.where, old, new * rounded, new))

    def _note_conversion(self, name: str, made: list[Tensor], args: Any, place: _Place, module: Any) -> _Made | None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            codes = next((x for x in made if x.dtype in NARROW), None)
            # in a copy the codes are what is written to
            source = next((x for x in args[int(name == "copy_") :] if isinstance(x, Tensor)), None)
            if codes is None or source is None or source.dtype in NARROW:
                return None
            where = f"{Path(place[0].co_filename).name}:{place[1]}"
            if module is not None or self._inside() or torch._C._current_graph_task_id() != -1:
                if not any(name in place[0].co_filename for name in LIBRARIES):
                    self.model = self.model or where
                return None
            self.outside = self.outside or where
            plain = source.is_floating_point() and source.shape == codes.shape  # bytes are read as codes, too
            if torch._C._len_torch_dispatch_stack() or not plain or _hidden(source) or _hidden(codes):
                return None
            found = _Made(_sample(codes), where, _sample(source))
            if (old := self._codes_of(source)) is not None and len(self._kept) < _KEPT:
                self._kept.append((where, old.codes, _sample(source), found.codes))
            return found

    def kept(self) -> dict[str, float]:
        """Of what the script keeps in FP8 from step to step, as weights without masters, averages or moments: place of
        the conversion -> how far it moves, over the change that it should take along.

        A change below half a step of the format is rounded away. Random rounding moves it further than the change.
        """
        sums: dict[str, list[float]] = {}
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for where, *samples in self._kept:
                old, now, new = (x.cpu().float().double().flatten() for x in samples)
                if old.shape == now.shape == new.shape:
                    known, sides = now.isfinite(), sums.setdefault(where, [0.0, 0.0])
                    for i, side in enumerate((new - old, now - old)):
                        sides[i] += float(side[known].square().sum())
        known_places = {where: pair for where, pair in sums.items() if pair[1] > 0 and math.isfinite(sum(pair))}
        return {where: float(f"{math.sqrt(moved / change):.3g}") for where, (moved, change) in known_places.items()}

    # --- where ----------------------------------------------------------------------------------------------------

    def _where(self, frame: FrameType | None, *, looked: bool = False) -> tuple[_Place, nn.Module | None, str] | None:
        """(code and line of the user's, the innermost module, name of a collective); None if the call is ours."""
        user: tuple[CodeType, int] | None = None
        caller: CodeType | None = None
        script: tuple[tuple[CodeType, int], ...] = ()
        module, collective = None, ""
        for _ in range(_DEPTH):
            if frame is None:
                break
            code = frame.f_code
            kind = kind_of(code)
            if kind == CALL and module is None:
                module = frame.f_locals.get("self")
            elif user is not None:
                if kind == USER:
                    caller = caller or code
                    script += () if _installed(code) else ((code, frame.f_lineno),)
            else:
                if kind == USER:
                    user = code, frame.f_lineno
                elif kind == OURS or (kind == LOOKS_ON and not looked and code.co_name not in _WRAPPERS):
                    return None
                elif kind == COLLECTIVE:
                    collective = code.co_name
            if caller is not None and module is not None and len(script) == _LINES:
                break
            frame = frame.f_back
        if user is None:
            return None
        return _Place(*user, caller, script[:_LINES]), module, collective

    # --- what is written ------------------------------------------------------------------------------------------

    def facts(self, name_of: Callable[[nn.Module], str]) -> dict[str, Any]:
        """The trace as a line of trace.jsonl: `places` [file, line, function, source, caller, whether a library's
        (1), and the script's lines above it], `modules`, and `calls`
        [name, number of the place, number of the module, arguments, entries that made its tensors, results, and 1 for
        a call in a backward, 2 for one through which a backward may come, 3 for both]."""
        places: dict[_Place, int] = {}
        modules: dict[str, int] = {"": 0}
        calls = []
        for call in self._calls:
            module = "" if call.module is None else name_of(call.module)
            place = places.setdefault(call.place, len(places))
            results = [_read(x) if isinstance(x, tuple) else x for x in call.results]
            calls.append(
                [call.name, place, modules.setdefault(module, len(modules)), call.arguments, call.sources, results]
            )
            calls[-1] += [call.kind] if call.kind else []
        return {"full": self.full, "places": [*map(_source, places)], "modules": list(modules), "calls": calls}


def _source(place: _Place) -> list[Any]:
    text = linecache.getline(place.code.co_filename, place.line).strip()
    caller = "" if place.caller is None else f"{Path(place.caller.co_filename).name}:{place.caller.co_qualname}"
    lines = [f"{Path(code.co_filename).name}:{line}" for code, line in place.script]
    about = [place.code.co_qualname, text[:160], caller, int(_installed(place.code))]
    return [Path(place.code.co_filename).name, place.line, *about, *lines]


def _installed(code: CodeType) -> bool:
    return "-packages" in code.co_filename


def _tensors(tree: Any, depth: int = 0) -> Iterator[Tensor]:
    """The first tensors of nested lists and tuples."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)) or type(tree).__name__ == "dict_values":
        for value in [*tree][:16]:
            if depth < 3:
                yield from _tensors(value, depth + 1)


def _argument(x: Tensor, frame: FrameType | None) -> Iterator[str]:
    """NAME = NUMBERS, where x is a whole number's tensor that a module is given: what the first row begins with."""
    with torch._C.DisableTorchFunction():
        if x.is_floating_point() or x.is_complex() or not 0 < x.dim() < 3 or x.device.type != "cpu" or not x.numel():
            return
        row = x.detach().reshape(-1, x.shape[-1])[0, :_SHOWN].tolist()
    for _ in range(_DEPTH):
        if frame is None:
            return
        if kind_of(frame.f_code) == CALL and isinstance(given := frame.f_locals.get("kwargs"), dict):
            try:
                places = [*inspect.signature(frame.f_locals["self"].forward).parameters]
            except (TypeError, ValueError):  # of a scripted module
                places = []
            named = {**dict(zip(places, frame.f_locals.get("args", ()), strict=False)), **given}
            if name := next((name for name, value in named.items() if value is x), ""):
                runs = [(value, len([*same])) for value, same in itertools.groupby(row)]
                yield f"{name} = {', '.join(f'{v} x {n}' if n > 1 else str(v) for v, n in runs)}"
                return
        frame = frame.f_back


def _is(kept: weakref.ref[Tensor] | None, x: Tensor) -> bool:
    """Whether `kept` refers to x. None stands for a parameter, which lives as long as its model."""
    return isinstance(x, nn.Parameter) if kept is None else kept() is x


def _version(x: Tensor) -> int:
    try:
        return x._version
    except (RuntimeError, AttributeError):  # a tensor of inference_mode has none
        return 0


def _label(x: Tensor) -> str:
    """dtype and shape: f32[2, 3]."""
    name = str(x.dtype).removeprefix("torch.")
    for long, short in _SHORT:
        if name.startswith(long) and name[len(long) :].isdigit():
            name = short + name[len(long) :]
    return f"{name}{[*map(int, x.shape)]}"


def _shown(x: Any, depth: int = 0) -> str:
    """An argument in a form that is equal in equal runs: no addresses."""
    if isinstance(x, Tensor):
        with torch._C.DisableTorchFunction():
            return _label(x)
    if isinstance(x, (bool, int, float, complex, type(None), type(...), torch.dtype, torch.device)):
        return str(x).removeprefix("torch.")
    if isinstance(x, str):
        return repr(x[:60])
    if isinstance(x, slice):
        return ":".join("" if part is None else _shown(part, depth + 1) for part in (x.start, x.stop, x.step))
    if isinstance(x, (list, tuple)) and depth < 2:
        shown = ", ".join(_shown(value, depth + 1) for value in x[:6]) + (", ..." if len(x) > 6 else "")
        return f"[{shown}]"
    shape = getattr(x, "shape", None)
    return (
        f"{type(x).__name__}{list(shape)}"
        if isinstance(shape, tuple)
        else str(getattr(x, "__name__", type(x).__name__))
    )


def fingerprint(x: Any) -> Any:
    """[label, hash, mean, rms, projection]; (label, sample) on another device; a number; [label] if it has none."""
    if not isinstance(x, Tensor):
        return x if not isinstance(x, float) or math.isfinite(x) else str(x)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        label = _label(x)
        if _hidden(x):
            return [label]
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                sample = _sample(x)
        else:
            sample = _sample(x)
        return _read((label, sample)) if sample.device.type == "cpu" else (label, sample.clone())


def _hidden(x: Tensor) -> bool:
    """Whether a tensor has no numbers that can be read now."""
    hidden = type(x) not in (Tensor, nn.Parameter) or x.is_meta or x.layout != torch.strided
    if hidden or torch._C._functorch.is_functorch_wrapped_tensor(x) or x.is_quantized or not x.numel():
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _empty(x: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return [_label(x)] if isinstance(x, Tensor) else None


def _sample(x: Tensor) -> Tensor:
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    x = x.resolve_neg()
    while x.numel() > 4 * _SAMPLED and not x.is_contiguous():  # a copy of all would cost memory
        largest = max(range(x.dim()), key=lambda d: x.shape[d])
        x = x[(slice(None),) * largest + (slice(None, None, 2),)]
    flat = x.reshape(-1)
    # a copy: a number may be written over, and NumPy's view would keep a storage from being resized
    return flat[:: -(-flat.numel() // _SAMPLED)].clone(memory_format=torch.contiguous_format)


def _read(waiting: tuple[str, Tensor]) -> list[Any]:
    """The fingerprint of a sample."""
    label, sample = waiting
    with torch._C.DisableTorchFunction(), torch.no_grad():
        sample = sample.cpu()
        code = zlib.crc32(sample.view(torch.uint8).numpy().tobytes())
        values = sample.float().numpy().astype(np.float64)
    finite = np.isfinite(values)
    values = np.where(finite, values, 0.0)
    count = max(int(finite.sum()), 1)
    # the places matter, so that an exchange of elements shows
    turned = float(values @ np.cos(1.7 * np.arange(len(values)))) / math.sqrt(count)
    sums = float(values.sum()) / count, math.sqrt(float(values @ values) / count), turned
    return [label, code, *(float(f"{v:.6g}") for v in sums), int(len(values) - finite.sum())]
