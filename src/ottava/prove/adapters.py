"""What `ottava certify` runs: a function that hands somebody's kernel the tensors of a case.

`adapter(KIND, **what)` marks the function, and returns it. docs/certify.md has the signature of each kind. An adapter
that raises NotImplementedError says that its kernel does not take this case; then the case is not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from ottava.base.errors import need_known

Function = TypeVar("Function", bound=Callable[..., Any])
KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "encode": (("x",), (), ("codes",)),
        "decode": (("codes",), (), ("values",)),
        "cast": (("x",), ("data", "scale_inv"), ("data", "scale_inv")),
        "gemm": (("a", "b", "scale_inv_a", "scale_inv_b"), ("out",), ("out",)),
        "grouped": (("a", "b", "scale_inv_a", "scale_inv_b", "ends"), ("out",), ("out",)),
        "linear": (("x", "weight", "grad"), (), ("y", "dx", "dw")),
        "attention": (("q", "k", "v", "grad"), (), ("o", "dq", "dk", "dv")),
        "optimizer": (("parameter", "grad", "state", "step"), (), ("parameter",)),
    }
)
"""Kind -> its inputs, the buffers that follow them, and its results."""
READ: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "encode": ("format", "rounding", "overflow"),
        "decode": ("format",),
        "cast": ("recipe", "operand"),
        "gemm": ("recipe", "out", "accumulator"),
        "grouped": ("recipe", "out", "accumulator"),
        "linear": ("recipe", "dtype"),
        "attention": ("recipe", "causal", "dtype"),
        "optimizer": ("rule", "lr", "betas", "eps", "weight_decay", "moments", "dtype"),
    }
)
"""Kind -> the facts in `what` that are read; others are kept in the certificate, for people."""


@dataclass(frozen=True)
class KernelAdapter:
    """A function under test, and what it says of itself."""

    name: str
    """module:function, or the name of a ready one."""
    function: Callable[..., Any]
    kind: str
    what: Mapping[str, Any]


def adapter(kind: str, **what: Any) -> Callable[[Function], Function]:
    """Marks a function as an adapter of that kind; returns the function itself.

    Args:
        kind: one of `KINDS`.
        what: format, recipe and so on; docs/certify.md lists the facts of each kind.
    Raises:
        ValueError: unknown kind.

    Example:
        >>> @adapter("decode", format="e4m3")
        ... def mine(codes):
        ...     return codes.float()
        >>> mine.adapter_kind, mine.adapter_what
        ('decode', {'format': 'e4m3'})
    """
    need_known("adapter", "kind", kind, KINDS)

    def mark(function: Function) -> Function:
        function.adapter_kind, function.adapter_what = kind, what  # type: ignore[attr-defined]
        return function

    return mark
