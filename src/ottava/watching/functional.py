"""Watches GEMMs outside of layers: F.linear, matmul, einsum and grouped GEMMs with a parameter of the running module.

Experts of a mixture (one parameter of three dimensions), routers and custom linears multiply in their own forward,
where a layer has no hook. A TorchFunctionMode sees those calls. It is on only while the code of a module with such a
parameter runs, and off inside the modules that this code calls. Compiled regions and modes of the user never meet it.

The tap reads every product as an einsum. The labels of both operands and of the result say which dimension counts
experts, which counts rows, and over which the product sums.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from ottava.base.errors import Guard
from ottava.watching.adapters import Part
from ottava.watching.operands import autocast_dtype

GATHERED = (
    "its module gathers one matrix for each token first, so that no GEMM has a W; the watch sees experts that run as "
    "'eager' or 'grouped_mm'"
)
"""The reason for experts that index their weights by token (Hugging Face's "batched_mm")."""
_SEARCH = 16
"""Longest chain of views and casts between a parameter and an operand."""
_FRUITLESS = 16
"""The tap ignores a module after so many forwards without a GEMM."""
_GEMM_NODE = re.compile("(Addmm|Mm|Bmm|Baddbmm|GroupedMm|Linear)Backward[0-9]*")
_SAME_NUMBERS = re.compile(
    "(Select|ToCopy|T|Transpose|Permute|View|UnsafeView|ReshapeAlias|Unsqueeze|Squeeze|Expand|Slice|Split|SplitWithSizes"
    "|Chunk|Alias|Clone|Unbind|Index|ToTorchTensor)Backward[0-9]*"
)
"""Nodes of the graph whose result is a view or a rounded copy of their input."""


class Product(NamedTuple):
    """y = einsum("a,b->y", a, b); with `ends` a grouped GEMM: the rows of a up to each end times one matrix of b."""

    a: Tensor
    b: Tensor
    labels: tuple[str, str, str]
    ends: Tensor | None = None


class Origin(NamedTuple):
    """The parameter behind an operand."""

    parameter: Tensor
    first: int
    """Index of the parameter's matrix with which the operand begins."""
    gathered: bool = False


def product(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Product | None:
    """The product that a torch function computes; None if it does not multiply two tensors.

    Example:
        >>> product("linear", (torch.ones(5, 2, 4), torch.ones(3, 4)), {}).labels
        ('BAk', 'nk', 'BAn')
    """
    entry = _PRODUCTS.get(name)
    if entry is None:
        return None
    names, labels = entry
    values = [kwargs.get(key, args[i] if i < len(args) else None) for i, key in enumerate(names) if key]
    if name == "einsum":
        operands = args[1:] if len(args) != 2 or isinstance(args[1], Tensor) else tuple(args[1])
        if len(operands) != 2 or not isinstance(args[0], str):
            return None
        equation, values = args[0].replace(" ", ""), list(operands)
        left, arrow, right = equation.partition("->")
        if not arrow or "." in equation or left.count(",") != 1 or any(len(set(s)) < len(s) for s in left.split(",")):
            return None
        of_a, of_b = left.split(",")
        labels = of_a, of_b, right
    a, b, *rest = values
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dim() < 2 - (name == "linear") or b.dim() < 2:
        return None
    if name == "__rmatmul__":
        a, b = b, a
    ends = next((x for x in [*rest, kwargs.get("offs")] if isinstance(x, Tensor)), None)
    if ends is not None and (a.dim(), b.dim()) == (2, 3):
        return Product(a, b, ("mk", "ekn", "mn"), ends)
    return None if ends is not None else Product(a, b, _spelt(labels, a, b))


_PRODUCTS: Mapping[str, tuple[tuple[str, ...], tuple[str, str, str]]] = MappingProxyType(
    {
        "linear": (("input", "weight"), ("k", "nk", "n")),
        **dict.fromkeys(("matmul", "__matmul__", "__rmatmul__"), (("input", "other"), ("mk", "kn", "mn"))),
        **dict.fromkeys(("mm", "bmm"), (("input", "mat2"), ("mk", "kn", "mn"))),
        "addmm": (("", "mat1", "mat2"), ("mk", "kn", "mn")),
        "baddbmm": (("", "batch1", "batch2"), ("mk", "kn", "mn")),
        "einsum": ((), ("", "", "")),
        "grouped_mm": (("mat_a", "mat_b"), ("mk", "kn", "mn")),
        "_grouped_mm": (("self", "mat2", "offs"), ("mk", "kn", "mn")),
        "grouped_mm_fallback": (("input", "weight", "offs"), ("mk", "kn", "mn")),  # Hugging Face's own operator
    }
)
"""Function -> names of its arguments, and labels for the last dimensions of both operands and the result."""
_LEADING = "ABCDEFGH"


def _spelt(labels: tuple[str, str, str], a: Tensor, b: Tensor) -> tuple[str, str, str]:
    """Adds a label for every leading dimension; they count from the right, as in broadcasting."""
    left, right, out = labels
    more = (a.dim() - len(left), b.dim() - len(right))
    lead = [_LEADING[:count][::-1] for count in (*more, max(more))]
    return (lead[0] + left, lead[1] + right, lead[2] + out)


def origin(operand: Tensor) -> Origin | None:
    """Follows views and casts from an operand back to its parameter; None for an activation.

    Example:
        >>> experts = nn.Parameter(torch.ones(4, 2, 3))
        >>> source = origin(experts[2].t().bfloat16())
        >>> source.parameter is experts, source.first, origin(torch.ones(2, 3)) is None
        (True, 2, True)
    """
    base = operand if operand._base is None else operand._base
    if isinstance(base, nn.Parameter):
        stride = base.stride(0) if base.dim() else 0
        first = (operand.storage_offset() - base.storage_offset()) // stride if stride else 0
        return Origin(base, first)
    return _leads_to(operand.grad_fn, operand.output_nr)


def _leads_to(node: Any, number: int) -> Origin | None:
    """The `origin` of output `number` of a node of the graph."""
    first, gathered = 0, False
    for _ in range(_SEARCH):
        if node is None:
            return None
        if (leaf := getattr(node, "variable", None)) is not None:
            return Origin(leaf, first, gathered) if isinstance(leaf, nn.Parameter) else None
        name = node.name().rpartition("::")[2]
        if not _SAME_NUMBERS.fullmatch(name):
            return None
        gathered = gathered or name.startswith("Index")
        if name.startswith(("Select", "Unbind")) and int(node._saved_dim) == 0:
            index = number if name.startswith("Unbind") else int(node._saved_index)
            first = index if index < 1 << 63 else index - (1 << 64)
        inputs = [following for following in node.next_functions if following[0] is not None]
        if len(inputs) != 1:
            return None
        node, number = inputs[0]
        if first < 0 and (shown := getattr(node, "variable", None)) is not None:
            first += shown.shape[0]
    return None


def parts(call: Product, y: Tensor, source: Origin, *, weight_first: bool) -> Iterator[Part]:
    """The linears of a product, one for each matrix of the weight. If there are several, their suffix is a number."""
    w, x = (call.a, call.b) if weight_first else (call.b, call.a)
    # autocast changes most of these functions, not all: the dtype of the result tells
    cast = autocast_dtype(x) == y.dtype
    if call.ends is not None:
        yield from _grouped(call, y, source, cast)
        return
    of_w, of_x, of_y = call.labels[not weight_first], call.labels[weight_first], call.labels[2]
    sizes = dict(zip(of_y, y.shape, strict=True)) | dict(zip(of_w, w.shape, strict=True))
    batch = "".join(label for label in of_w if label in of_x and label in of_y and sizes[label] > 1)
    summed = "".join(label for label in of_w if label in of_x and label not in of_y)
    if len(of_w) == 3 and of_w[0] in of_y and of_w[0] not in of_x:  # every expert multiplies all of x
        batch = of_w[0]
    if all(w.stride(of_w.index(label)) == 0 for label in batch):  # expanded: all experts are the same matrix
        batch = ""
    wide = "".join(label for label in of_w if label in of_y and label not in batch and label not in of_x)
    rows = "".join(label for label in of_y if label not in batch and label not in wide)
    if not summed or not wide:
        return
    several = bool(batch) or w.numel() < source.parameter.numel()
    for index, places in enumerate(itertools.product(*(range(sizes[label]) for label in batch))):
        at = dict(zip(batch, places, strict=True))
        suffix = f".{source.first + index}" if several else ""
        yield Part(
            suffix,
            (x,),
            w,
            y,
            partial(_matrix, labels=of_y, at=at, order=(rows, wide)),
            partial(_matrix, labels=of_x, at=at, order=(rows, summed)),
            partial(_matrix, labels=of_w, at=at, order=(wide, summed)),
            cast,
        )


def _grouped(call: Product, y: Tensor, source: Origin, cast: bool) -> Iterator[Part]:
    assert call.ends is not None
    if type(call.ends) is not Tensor or (call.ends.is_cuda and torch.cuda.is_current_stream_capturing()):
        for index in range(call.b.shape[0]):  # the split of the rows cannot be read here
            weight = partial(_matrix, labels="ekn", at={"e": index}, order=("n", "k"))
            yield Part(f".{source.first + index}", (), call.b, None, None, None, weight, cast)
        return
    start = 0
    for index, end in enumerate(call.ends.tolist()):  # waits for the device, only in watched steps
        weight = partial(_matrix, labels="ekn", at={"e": index}, order=("n", "k"))
        suffix = f".{source.first + index}"
        if end > start:
            take = itemgetter(slice(start, end))
            yield Part(suffix, (call.a,), call.b, y, take, take, weight, cast)
        else:  # this expert got no token
            yield Part(suffix, (), call.b, None, None, None, weight, cast)
        start = max(start, end)


def _matrix(t: Tensor, labels: str, at: Mapping[str, int], order: tuple[str, str]) -> Tensor:
    """One matrix of t, at one index of its batch, as (rows, columns)."""
    for label, index in at.items():
        if label in labels:
            dim = labels.index(label)
            t = t.select(dim, index if t.shape[dim] > 1 else 0)
            labels = labels.replace(label, "")
    rows, columns = ("".join(label for label in side if label in labels) for side in order)
    for label in [label for label in labels if label not in rows + columns]:  # dimensions of size 1, or expanded
        t = t.select(labels.index(label), 0)
        labels = labels.replace(label, "")
    t = t.permute([labels.index(label) for label in rows + columns])
    return t.reshape(-1, math.prod(t.shape[len(rows) :]))


def weights_of_gemms(root: Tensor) -> list[Tensor]:
    """The parameters that GEMMs use in the graph of a result. The graph lacks segments of reentrant checkpointing, the
    inside of an autograd.Function, and compiled code.

    Example:
        >>> table, x = nn.Parameter(torch.ones(4, 3)), torch.ones(2, 3)
        >>> [weight is table for weight in weights_of_gemms((x @ table.t()).sum())]
        [True]
    """
    weights: dict[int, Tensor] = {}
    waiting = [root.grad_fn] if root.grad_fn is not None else []
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        for following, number in node.next_functions:
            if following is None:
                continue
            if _GEMM_NODE.fullmatch(node.name().rpartition("::")[2]) and (weight := _leads_to(following, number)):
                weights[id(weight.parameter)] = weight.parameter
            if following not in visited:
                visited.add(following)
                waiting.append(following)
    return list(weights.values())


def owns_a_matrix(module: nn.Module) -> bool:
    """Whether a module has a parameter of its own that a GEMM could use.

    Example:
        >>> owns_a_matrix(nn.Embedding(4, 2)), owns_a_matrix(nn.LayerNorm(4))
        (True, False)
    """
    return any(p is not None and p.dim() in (2, 3) and min(p.shape) > 1 for p in module._parameters.values())


def calls_compiled(module: nn.Module) -> bool:
    """Whether a module's forward calls compiled functions, which Dynamo would run eagerly under a mode."""
    forward: Any = getattr(type(module), "forward", None)  # that of a scripted module cannot be read
    functions = [forward, inspect.unwrap(forward)]
    values = [value for f in functions for value in getattr(f, "__globals__", {}).values()] + [*vars(module).values()]
    return any(
        callable(value) and hasattr(value, "_torchdynamo_orig_callable") and not hasattr(value, "_torchdynamo_disable")
        for value in values
    )


class Owner:
    """A module with parameters of its own that GEMMs of its forward may use."""

    __slots__ = ("compiled", "fruitless", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.compiled = calls_compiled(module)
        self.fruitless = 0

    def promises(self, module: nn.Module) -> bool:
        """Whether to watch this forward of the module; counts the forward."""
        if self.module() is not module or self.compiled or not torch.is_grad_enabled():
            return False
        self.fruitless += 1
        return self.fruitless <= _FRUITLESS


class _Mode(TorchFunctionMode):
    def __init__(self, saw: Callable[[str, tuple[Any, ...], Mapping[str, Any], Tensor], None]) -> None:
        super().__init__()
        self._saw = saw

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        y = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _PRODUCTS and isinstance(y, Tensor) and not torch.compiler.is_compiling():
            self._saw(name, args, kwargs, y)
        return y


class _Running:
    """A running forward."""

    __slots__ = ("below", "mode", "module")

    def __init__(self, module: nn.Module, mode: _Mode | None) -> None:
        self.module, self.mode = module, mode
        self.below: int | None = None
        """Number of other modes above ours when we took it off for an inner module; None: ours is on."""


class FunctionalTap:
    """Calls `took` with every product of an activation and a parameter in the code of an entered module.

    Args:
        took: called with the origin of the weight and an iterator of the linears.
        guard: wraps what an operation calls.

    Call `enter` and `leave` around every forward of the process, `leave` also if the forward raises.

    Example:
        >>> seen, weight = [], nn.Parameter(torch.eye(2))
        >>> tap, module = FunctionalTap(lambda found, parts: seen.append(next(parts))), nn.Module()
        >>> tap.enter(module, looks=True)
        >>> y = torch.ones(3, 2) @ weight
        >>> tap.leave(module)
        >>> seen[0].weight is weight
        True
    """

    def __init__(self, took: Callable[[Origin, Iterator[Part]], None], guard: Guard = lambda hook: hook) -> None:
        self._took, self._on_product = took, guard(self._saw)
        self._threads = threading.local()

    def enter(self, module: nn.Module, *, looks: bool) -> None:
        """Begins a forward; looks: watch the products in its own code."""
        stack = self._stack()
        if not looks and not stack:
            return
        if stack and (outer := stack[-1]).mode is not None:
            outer.below = _take_off(outer.mode)
        stack.append(_Running(module, _Mode(self._on_product) if looks else None))
        if (mode := stack[-1].mode) is not None:
            _put_on(mode, 0)

    def leave(self, module: nn.Module) -> None:
        """Ends a forward."""
        stack = self._stack()
        if not stack or stack[-1].module is not module:
            return
        if (mode := stack.pop().mode) is not None:
            _take_off(mode)
        if stack and (outer := stack[-1]).mode is not None and outer.below is not None:
            _put_on(outer.mode, outer.below)
            outer.below = None

    def _stack(self) -> list[_Running]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        stack: list[_Running] = self._threads.stack
        return stack

    def _saw(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], y: Tensor) -> None:
        call = product(name, args, kwargs)
        if call is None:
            return
        of_a, of_b = origin(call.a), origin(call.b)
        if of_a is not None and of_b is not None and name != "linear":
            return  # a product of two weights, as in LoRA
        if (source := of_b or of_a) is not None:
            self._took(source, parts(call, y, source, weight_first=of_b is None))


def _take_off(mode: _Mode) -> int | None:
    """Removes a mode from the stack; returns the number of modes above it, which stay, or None if it is not there."""
    stack = _get_current_function_mode_stack()
    if mode not in stack:
        return None
    above: int = len(stack) - 1 - stack.index(mode)
    taken = [_pop_mode() for _ in range(above + 1)]
    for other in reversed(taken[:-1]):
        _push_mode(other)
    return above


def _put_on(mode: _Mode, below: int) -> None:
    """Puts the mode back below so many others."""
    taken = [_pop_mode() for _ in range(min(below, len(_get_current_function_mode_stack())))]
    for other in (mode, *reversed(taken)):
        _push_mode(other)
