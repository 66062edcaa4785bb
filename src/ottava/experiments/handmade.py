"""Casts that a script makes by itself: finds each in a replayed step, and runs the step without them.

A layer of a library is known by its class. A script that writes `x.to(torch.float8_e4m3fn)` in a function, a hook of
saved tensors or a backward of its own has no such class, so torch's conversions themselves are seen, wherever they lie.
The codes stay what they are, in their dtype; beside each storage of codes lie the numbers that were cast. They go along
when codes are viewed, copied or joined, and come back when codes are converted back or multiplied. A clamp to the
format's largest number goes with its cast. Scales remain. Rounding by other means, such as a table of the values of
FP4, is not seen.

`derivatives` runs handwritten functions of autograd by the derivative of their own forward.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ottava.numerics.formats import FORMATS

_NAMES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
NARROW = frozenset(getattr(torch, name) for name in _NAMES)
"""The dtypes whose conversions count. Not E8M0: it holds scales."""
_CODES = NARROW | frozenset((torch.uint8, torch.int8))
_LARGEST = frozenset((240.0, *(f.max for f in FORMATS.values() if f.bits <= 8)))
_STEPS = ("round", "floor", "ceil", "trunc", "sign", "bucketize", "searchsorted", "argmin", "heaviside")
"""Operations whose derivative is not what anybody means by them."""
TORCH, CALL, COLLECTIVE, LOOKS_ON, OURS, USER = 0, 1, 2, 3, 4, 5
"""Whose code a frame runs."""
_PASSES_ON = frozenset({"__torch_function__", "__torch_dispatch__", "operation", "apply"})
"""Functions of ours between a call of the user's and torch."""
LIBRARIES = (f"{os.sep}torchao{os.sep}", f"{os.sep}transformer_engine{os.sep}")
"""Their layers are switched by class."""


class Exact(TorchDispatchMode):
    """Runs torch as if its conversions to FP8 lost nothing.

    Args:
        only: sites that run so, as in `sites`, with their callers or without; None: all of them.
        libraries: whether conversions inside of torchao and TransformerEngine count.

    Example:
        >>> x = torch.tensor([0.3, 1000.0])
        >>> with Exact() as exact:
        ...     y = x.to(torch.float8_e4m3fn).view(torch.uint8).clone().view(torch.float8_e4m3fn).float()
        >>> y.tolist() == x.tolist(), y.dtype, len(exact.sites)
        (True, torch.float32, 1)
    """

    def __init__(self, only: Collection[str] | None = None, *, libraries: bool = True) -> None:
        super().__init__()
        self.only, self._libraries = only, libraries
        self.sites: dict[str, dict[str, float]] = {}
        """"FILE:LINE, called at FILE:LINE" -> the worst that its casts did, as shares: error, flushed, clipped, and
        nonfinite, finite numbers whose codes are none."""
        self.codes: set[CodeType] = set()
        """The user's functions around them."""
        self._clamped: tuple[Tensor, Tensor] | None = None  # what a clamp gave, held for its address, and what it got
        self._cast: dict[int, tuple[Any, Tensor]] = {}
        """Address of a storage of codes -> itself, and the numbers that were cast, one for every byte."""

    def begin(self) -> None:
        """A run begins: forgets the numbers of the last one."""
        self._cast.clear()

    def forget(self) -> None:
        """Forgets the numbers of codes that nobody else holds."""
        for key, (storage, _) in [*self._cast.items()]:
            if torch._C._storage_Use_Count(key) == 1:
                del self._cast[key], storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default:
            return self._converted(func(*args, **kwargs), args[0])
        if func is torch.ops.aten.copy_.default and args[0].dtype is not args[1].dtype:
            return self._converted(func(*args, **kwargs), args[1])
        if func in (torch.ops.aten.clamp.default, torch.ops.aten.clamp_.default) and _to_largest(*args[1:], **kwargs):
            if self.only is None or self.only:
                return args[0] if func is torch.ops.aten.clamp_.default else args[0].clone()
            before = args[0].detach().clone() if func is torch.ops.aten.clamp_.default else args[0]
            result = func(*args, **kwargs)
            self._clamped = result, before
            return result
        if func is torch.ops.aten._scaled_mm.default:
            near = [self._numbers(x) for x in args[:2]]
            if any(x is not None for x in near):
                operands = [x.float() if n is None else n for x, n in zip(args, near, strict=False)]
                return _multiplied(*operands, *args[2:], **kwargs)
        result = func(*args, **kwargs)
        if self._cast:
            self._follow(func, args, kwargs, result)
        return result

    def _converted(self, result: Tensor, x: Tensor) -> Tensor:
        """A conversion or a copy between dtypes was made."""
        if not _plain(result) or not _plain(x):
            return result
        numbers = self._numbers(x)
        if result.dtype in NARROW:
            site = self._site(sys._getframe(2)) if x.is_floating_point() else ""
            if site and numbers is None:
                self._note(site, x, result)
            # in a replay the caller may be unknown
            wanted = self.only is None or any(site == one or site.startswith(f"{one}, ") for one in self.only)
            if numbers is not None or (site and wanted):
                self._keep(result, x if numbers is None else numbers)
            else:
                self._cast.pop(result.untyped_storage()._cdata, None)
        elif numbers is not None and x.dtype in NARROW and result.is_floating_point():
            result.copy_(numbers)
        return result

    def _site(self, frame: FrameType | None) -> str:
        """FILE:LINE of the user's that converts, and of its caller in a replay; "" for layers with switches of their
        own. One function may cast all operands, so the line alone is no site."""
        found: list[str] = []
        while frame is not None and len(found) < 2:
            code = frame.f_code
            kind = kind_of(code)
            if kind == OURS and not found:
                return ""
            if kind == OURS or (kind == LOOKS_ON and code.co_name not in _PASSES_ON):
                break
            if kind == USER:
                if not self._libraries and any(name in code.co_filename for name in LIBRARIES):
                    return ""
                self.codes.add(code)
                found.append(f"{Path(code.co_filename).name}:{frame.f_lineno}")
            frame = frame.f_back
        # autograd gives the gradient the dtype of the codes
        outside = "the backward of a conversion" if torch._C._current_graph_task_id() != -1 else ""
        return ", called at ".join(found) or outside

    def _note(self, site: str, x: Tensor, codes: Tensor) -> None:
        if self._clamped is not None and x.is_set_to(self._clamped[0]):  # no view: that would be other numbers
            x = self._clamped[1]
        self._clamped = None
        values, near = x.detach().float(), codes.detach().float()
        size = float(values.norm())
        far = float((near.nan_to_num() - values).norm()) / size if size > 0 else 0.0
        count = max(values.numel(), 1)
        now = {
            "error": far,
            "flushed": int(((near == 0) & (values != 0)).sum()) / count,
            "clipped": int((values.abs() > torch.finfo(codes.dtype).max).sum()) / count,
            "nonfinite": int((values.isfinite() & ~near.isfinite()).sum()) / count,
        }
        before = self.sites.get(site, now)
        self.sites[site] = {k: max(v, before[k]) for k, v in now.items()}

    def _numbers(self, x: Any) -> Tensor | None:
        """The numbers behind codes, as a view with their shape; None if they are not known."""
        if not self._cast or not _plain(x) or x.dtype not in _CODES:
            return None
        known = self._cast.get(x.untyped_storage()._cdata)
        return None if known is None else known[1].as_strided(x.size(), x.stride(), x.storage_offset())

    def _keep(self, codes: Tensor, numbers: Tensor) -> None:
        storage = codes.untyped_storage()
        if storage._cdata not in self._cast:
            whole = codes.new_empty(0).set_(storage).float() if codes.dtype in NARROW else None
            if whole is None:
                whole = torch.zeros(storage.nbytes(), dtype=torch.float32, device=codes.device)
            self._cast[storage._cdata] = storage, whole
        view = self._numbers(codes)
        assert view is not None
        view.copy_(numbers)

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Does with the numbers what was done with codes; what cannot be done with them is forgotten."""
        made = [x for x in pytree.tree_leaves(result) if _plain(x) and x.dtype in _CODES]
        given = [x for x in pytree.tree_leaves((args, kwargs)) if self._numbers(x) is not None]
        if not made or not given or func._schema.name.startswith(("aten::empty", "aten::new_")):
            return
        if all(self._numbers(x) is not None for x in made) and not func._schema.is_mutable:
            return  # views
        try:
            written: Any = args[0] if args else None
            if func._schema.is_mutable and _plain(written) and self._numbers(written) is None:
                self._keep(written, written.float())

            def number(x: Any) -> Any:
                near = self._numbers(x)
                return x if near is None else near

            new = func(*pytree.tree_map(number, args), **pytree.tree_map(number, kwargs))
            if not func._schema.is_mutable:
                for x, numbers in zip(made, pytree.tree_leaves(new), strict=True):
                    self._keep(x, numbers)
        except Exception:  # an operation that floats do not have
            for x in made:
                self._cast.pop(x.untyped_storage()._cdata, None)


def _plain(x: Any) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided and not x.is_meta


def _to_largest(low: Any = None, high: Any = None, **bounds: Any) -> bool:
    low, high = bounds.get("min", low), bounds.get("max", high)
    return isinstance(high, (int, float)) and isinstance(low, (int, float)) and -low == high and high in _LARGEST


def _multiplied(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Any = None,
    _: Any = None,
    out_dtype: Any = None,
    *more: Any,
) -> Tensor:
    """`torch._scaled_mm` of operands that were not cast."""
    product = (a.float() * scale_a.float()) @ (b.float() * scale_b.float())
    product = product if bias is None else product + bias.float()
    return product if out_dtype is None else product.to(out_dtype)


@contextmanager
def derivatives(codes: Collection[CodeType], functions: dict[str, str]) -> Iterator[None]:
    """Runs functions of autograd by the derivative of their own forward, instead of the backward that a user wrote.

    Args:
        codes: functions with a forward or a backward among these.
        functions: gets name -> "" for each that ran so, and for others why not.
    """
    owner: Any = torch.autograd.function._SingleLevelFunction

    def apply(cls: Any, *args: Any) -> Any:
        plain = super(owner, cls).apply
        mine = {getattr(inspect.unwrap(f), "__code__", None) for f in (cls.forward, cls.backward)}
        if not mine & {*codes} or not any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return plain(*args)
        seen = _Steps()
        with torch.enable_grad(), seen, _Through():
            own = cls.setup_context is not owner.setup_context
            result = cls.forward(*args) if own else cls.forward(_Context(), *args)
        cut = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
        why = "it rounds" if seen.found else "" if all(x.requires_grad for x in cut) else "it hides its graph"
        functions[cls.__name__] = why
        return plain(*args) if why else result

    owner.apply = classmethod(apply)
    try:
        yield
    finally:
        del owner.apply


class _Steps(TorchDispatchMode):
    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or func._schema.name.removeprefix("aten::").rstrip("_") in _STEPS
        return func(*args, **(kwargs or {}))


class _Through(TorchFunctionMode):
    """A clamp to the largest number of a format is a part of the cast: a backward around it passes gradients on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        clamps = getattr(func, "__name__", "").rstrip("_") in ("clamp", "clip")
        return args[0] * 1 if clamps and _to_largest(*args[1:], **kwargs) else func(*args, **kwargs)


class _Context:
    """What a forward gets for its ctx where nobody will call its backward."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("save_", "mark_", "set_")):
            return lambda *args: None
        raise AttributeError(name)


@functools.cache
def _folders() -> tuple[str, tuple[str, ...], str, str]:
    """(ours, those of ours that look on, torch's, Python's)."""
    ours = Path(__file__).resolve().parents[1]
    looking = (str(ours / "watching") + os.sep, str(ours / "experiments") + os.sep)
    # with the separator: torchao lies beside torch
    return (
        str(ours) + os.sep,
        looking,
        str(Path(torch.__file__).parent) + os.sep,
        str(Path(os.__file__).parent) + os.sep,
    )


@functools.lru_cache(maxsize=4096)
def kind_of(code: CodeType) -> int:
    """Whose code this is: `TORCH` to `USER`."""
    ours, looking, torchs, pythons = _folders()
    name = code.co_filename
    if name.startswith(torchs):
        if code.co_name == "_call_impl":
            return CALL
        return COLLECTIVE if name.endswith("distributed_c10d.py") else TORCH
    if name.startswith(looking):
        return LOOKS_ON
    if name.startswith(ours):
        return OURS
    own = name.startswith("<frozen") or (name.startswith(pythons) and "-packages" not in name)
    return TORCH if own else USER
