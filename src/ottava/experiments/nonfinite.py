"""The first operation whose result is not finite.

`first_nonfinite` runs a captured step once more under a TorchDispatchMode, which sees every operation of forward and
backward. An infinity that an operation was told to write, as a mask of attention, does not count; a NaN always does.
`nan_in_graph` reads the graph of a loss that is not finite, whose step nobody has captured. Autograd saved part of the
values of the graph; the others are computed again where a schema of ATen says how, from saved operands.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ottava.experiments.handmade import NARROW
from ottava.experiments.program import AS_IT_RAN, Player, Way
from ottava.weights.parameter import local

_COMPUTED = 300
"""Results of a graph that are computed again, at most."""
_DEEP = 40
"""Results that one result is computed from in a row, at most."""


def first_nonfinite(player: Player, name_of: Callable[[nn.Module], str], *, tail: bool) -> dict[str, Any] | None:
    """module, operation, operand and direction of the first non-finite result; None: all results are finite."""
    seer = _Seer()
    modules = [m for module in player.program.modules for m in module.modules()]
    with _named(modules, name_of, seer):
        player.run(Way(AS_IT_RAN.ambient, lambda: seer), tail=tail)
    return seer.found


class _Seer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] | None = None
        self.path: list[str] = []
        self.backward, self.last = "", "the inputs"
        self.read_nan = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = [] if self.found else _read(args, kwargs)
        self.read_nan = self.read_nan or any(nan for _, nan in before)
        result = func(*args, **kwargs)
        # memory that nobody has written yet holds anything
        if self.found is None and "empty" not in str(func):
            wrong = [x for x in pytree.tree_leaves(result) if _is_float(x) and not bool(x.isfinite().all())]
            operand = _innocent(before, wrong, args, kwargs) if wrong else None
            if operand is not None and not (self.read_nan and _narrow(args, kwargs)):  # codes are not read: old NaN
                back = torch._C._current_graph_task_id() != -1
                self.found = {
                    "module": self.backward if back else (self.path[-1] if self.path else ""),
                    "behind": "" if back else self.last,
                    "operation": _operation(func, args, kwargs),
                    "operand": operand,
                    "direction": "backward" if back else "forward",
                    "value": "nan" if any(bool(x.isnan().any()) for x in wrong) else "inf",
                    "first": True,
                }
        return result


def _operation(func: Any, args: Any, kwargs: Any) -> str:
    narrow = _narrow(args, kwargs)
    name = str(func).removeprefix("aten.").split(".")[0]
    return f"the conversion from {str(narrow[0]).removeprefix('torch.')}" if name == "_to_copy" and narrow else name


def _narrow(args: Any, kwargs: Any) -> list[torch.dtype]:
    return [x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dtype in NARROW]


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0 and not x.is_meta and x.itemsize > 1


def _read(args: Any, kwargs: Any) -> list[tuple[float, bool]]:
    """amax of every tensor that an operation reads, and whether it has a NaN."""
    tensors = [local(x.detach()) for x in pytree.tree_leaves((args, kwargs)) if _is_float(x)]
    return [(float(x.abs().nan_to_num(0.0, math.inf).max()), bool(x.isnan().any())) for x in tensors]


def _innocent(before: Sequence[tuple[float, bool]], wrong: Sequence[Tensor], args: Any, kwargs: Any) -> str | None:
    """The operand with the largest magnitude if the operands did not bring the fault with them; else None."""
    asked = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, float) and not math.isfinite(x)]
    brought = any(nan for _, nan in before)
    infinite = bool(asked) or any(math.isinf(amax) for amax, _ in before)
    new_nan = any(bool(x.isnan().any()) for x in wrong)
    if brought or (infinite and not new_nan):
        return None
    if not before:
        return ""
    index = max(range(len(before)), key=lambda i: before[i][0])
    return f"amax of tensor {index + 1} of {len(before)} = {before[index][0]:.4g}"


@contextmanager
def _named(modules: Sequence[nn.Module], name_of: Callable[[nn.Module], str], seer: _Seer) -> Iterator[None]:
    """Tells the seer which module runs."""

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if seer.path:
            seer.path.pop()
        name = name_of(module)
        seer.last = name or seer.last
        for x in pytree.tree_leaves(output):
            if isinstance(x, Tensor) and x.requires_grad and not module._modules:
                x.register_hook(lambda g: setattr(seer, "backward", name))

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(lambda m, _: seer.path.append(name_of(m))))
            stack.enter_context(module.register_forward_hook(leave, always_call=True))
        yield


def nan_in_graph(root: Tensor, name_of: Callable[[Tensor], str]) -> dict[str, Any] | None:
    """The operation that made the NaN or infinity of a loss, read from what autograd keeps for the backward.

    What a checkpoint holds is not computed again: None then, and where a parameter has brought the NaN.

    Args:
        root: a loss that is not finite, before its backward.
        name_of: of a parameter; "" if it has none.
    Returns:
        operation, operand, direction, value and module as of `first_nonfinite`; `behind` and `before`: the modules
        around an operation that has no parameter, or ""; `brought`: whether an operand was not finite that no
        operation of the graph made; `first`: False if operations are among the named whose results nobody knows.
    """
    graph = _Graph(root)
    if graph.hidden or not graph.order:
        return None
    node = graph.order[-1]
    if graph.seen(node, _has_nan):
        node = next((one for one in graph.order if graph.brought(one) or graph.seen(one, _has_nan)), node)
        if graph.parameter(node) is not None and graph.seen(node, _has_nan):
            return None
        node, unknown = graph.made(node, _has_nan)
        begun, hazy = graph.made(node, _has_inf)  # an infinity before it may be where it began
        node = node if unknown or hazy else begun
    else:  # infinities of masks are none of a loss
        node, unknown = graph.made(node, _has_inf)
    nan = graph.seen(node, _has_nan) is not False
    may = [n for n in (node, *unknown) if not _only_moves(n)] or [node]
    return {
        **graph.place(node, name_of),
        "operation": " or ".join(dict.fromkeys(map(_operation_of, may))),
        "operand": graph.operands(node, _has_nan if nan else _has_inf),
        "direction": "forward",
        "value": "nan" if nan else "inf",
        "brought": graph.brought(node),
        "first": len(may) == 1,
    }


class _Graph:
    """The values of an autograd graph, as far as they are known."""

    def __init__(self, root: Tensor) -> None:
        self.order, self.hidden = _producers_first(root), False
        self._kept: dict[Any, dict[str, Any]] = {}
        self._values: dict[tuple[Any, int], Tensor | None] = {}
        self._readers: dict[Any, list[Any]] = {}
        self._left = _COMPUTED
        for node in self.order:  # once: hooks are set only once
            self._kept[node], hidden = _saved(node)
            self.hidden |= hidden
        if self.hidden or not self.order:
            return
        for node in self.order:
            for result in _RESULTS & self._kept[node].keys():
                self._values[node, 0] = self._kept[node][result]
            if (leaf := _own(getattr(node, "variable", None))) is not None:
                self._values[node, 0] = leaf.detach()
            for name, edge in self._edges(node).items():
                if edge[0] is not None:
                    self._readers.setdefault(edge[0], []).append(node)
                    if isinstance(x := self._kept[node].get(name), Tensor):
                        self._values.setdefault(edge, x)
        self._values[self.order[-1], 0] = _own(root.detach())

    def _edges(self, node: Any) -> dict[str, tuple[Any, int]]:
        """Name of an operand -> who makes it; of operations without a schema: its number."""
        edges = list(node.next_functions)
        for schema in _schemas(node):
            names = [a.name for a in schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
            if len(names) > len(edges):  # masks and indices have none
                whole = {n for n, x in self._kept[node].items() if isinstance(x, Tensor) and not x.is_floating_point()}
                names = [n for n in names if n not in whole]
            if len(names) >= len(edges) and not any(str(a.type) == "List[Tensor]" for a in schema.arguments):
                return dict(zip(names, edges, strict=False))
        return {str(i): edge for i, edge in enumerate(edges)}

    def value(self, node: Any, number: int = 0, deep: int = 0) -> Tensor | None:
        """The result of a node, computed again if nobody has saved it; None: not known."""
        if (node, number) in self._values or self._left <= 0 or deep > _DEEP:
            return self._values.get((node, number))
        self._values[node, number] = None
        kept, edges = self._kept[node], self._edges(node)
        for schema in _schemas(node):
            given: dict[str, Any] = {}
            for a in schema.arguments:
                if kept.get(a.name) is not None:
                    given[a.name] = kept[a.name]
                elif a.name in edges and edges[a.name][0] is not None:
                    given[a.name] = self.value(*edges[a.name], deep + 1)
                elif a.name == "eps":  # of norms: not saved, and any will do
                    given[a.name] = 1e-5
            lacks = [a.name for a in schema.arguments if given.get(a.name) is None and not a.has_default_value()]
            if lacks or not schema.arguments:
                continue
            self._left -= 1
            with torch.no_grad(), suppress(RuntimeError, TypeError, IndexError, ValueError):
                packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
                made = getattr(packet, schema.overload_name or "default")(**given)
                self._values[node, number] = made[number] if isinstance(made, tuple) else made
                break
        return self._values[node, number]

    def seen(self, node: Any, wrong: Callable[[Tensor], bool], *, compute: bool = False) -> bool | None:
        """Whether the result of a node is wrong; None: nobody knows."""
        value = self.value(node) if compute else self._values.get((node, 0))
        if value is not None:
            return wrong(value)
        # an operation that autograd gave no schema keeps what it read or made
        kept = [x for x in self._kept[node].values() if isinstance(x, Tensor)]
        return True if not _schemas(node) and any(map(wrong, kept)) else None

    def made(self, node: Any, wrong: Callable[[Tensor], bool]) -> tuple[Any, list[Any]]:
        """From a wrong result back to the operation that made it, and those beside it that may have."""
        while True:
            unknown, asked = [], deque(n for n, _ in node.next_functions if n is not None)
            met = set(asked)
            further = None
            while asked and further is None:
                one = asked.popleft()
                state = self.seen(one, wrong, compute=True)
                if state and self.parameter(one) is None:
                    further = one
                elif state is None:
                    unknown += [] if _only_moves(one) else [one]
                    more = [n for n, _ in one.next_functions if n is not None and n not in met]
                    met.update(more)
                    asked.extend(more)
            if further is None:
                return node, unknown
            node = further

    def brought(self, node: Any) -> bool:
        """Whether an operand is NaN that no operation of the graph made."""
        made = {name for name, (maker, _) in self._edges(node).items() if maker is not None} | _RESULTS
        alien = [x for name, x in self._kept[node].items() if name not in made]
        if bool(_schemas(node)) and any(isinstance(x, Tensor) and _has_nan(x) for x in alien):
            return True
        # a sum keeps no operand: its NaN is that of the one that nobody knows, if all others are numbers
        makers = self._edges(node).values()
        known = [self._moved(*edge) for edge in makers if edge[0] is not None]
        numbers = all(x is not None and bool(x.isfinite().all()) for x in known)
        value = self.value(node)
        nan = value is not None and _has_nan(value)
        return _operation_of(node) in _SUMS and len(known) < len(makers) and numbers and nan

    def operands(self, node: Any, wrong: Callable[[Tensor], bool]) -> str:
        """Operands that are not finite; else what the first wrong place was made of, if it was made place by place."""
        if not _schemas(node):
            return ""
        edges, value = self._edges(node), self.value(node)
        read = {name: self._moved(*edge) for name, edge in edges.items() if edge[0] is not None}
        read |= {n: x for n, x in self._kept[node].items() if isinstance(x, Tensor) and n not in _RESULTS}
        known = {n: x.detach() for n, x in read.items() if x is not None and x.is_floating_point()}
        ill = [f"{n} holds NaN" for n, x in known.items() if _has_nan(x)]
        ill = ill or [f"{n} holds infinities" for n, x in known.items() if _has_inf(x)]
        if ill or value is None or not wrong(value):
            return ", ".join(ill)
        strangers = [f"{n} of no layer" for n, (maker, _) in edges.items() if maker is None and n not in known]
        at = tuple((value.isnan() if wrong is _has_nan else value.isinf()).nonzero()[0].tolist())
        with suppress(RuntimeError):
            alike = [x.view_as(value) if x.numel() == value.numel() else x.expand_as(value) for x in known.values()]
            return ", ".join([*(f"{n} = {float(x[at]):.4g}" for n, x in zip(known, alike, strict=True)), *strangers])
        return ", ".join(strangers)

    def _moved(self, node: Any, number: int) -> Tensor | None:
        """The result of a node, or of that whose result it only sees in another shape."""
        value = self.value(node, number)
        moved = value is None and _only_moves(node) and len(node.next_functions) == 1 and node.next_functions[0][0]
        return self._moved(*node.next_functions[0]) if moved else value

    def parameter(self, node: Any) -> Tensor | None:
        """The leaf that a node only moves, as the transpose of a weight does."""
        while node is not None and not hasattr(node, "variable"):
            node = node.next_functions[0][0] if len(node.next_functions) == 1 and _only_moves(node) else None
        return None if node is None else node.variable

    def place(self, node: Any, name_of: Callable[[Tensor], str]) -> dict[str, str]:
        """The module of an operation, or the modules in front of it and behind it."""

        def module(one: Any) -> str:
            leaves = [self.parameter(n) for n, _ in one.next_functions]
            return next((name.rpartition(".")[0] for p in leaves if p is not None and (name := name_of(p))), "")

        if own := module(node):
            return {"module": own, "behind": "", "before": ""}
        behind = _nearest(node, lambda one: [n for n, _ in one.next_functions if n is not None], module)
        before = _nearest(node, lambda one: self._readers.get(one, []), module)
        return {"module": "", "behind": behind, "before": before}


def _nearest(node: Any, step: Callable[[Any], Iterable[Any]], module: Callable[[Any], str]) -> str:
    queue, met = deque([node]), {node}
    while queue:
        one = queue.popleft()
        if found := module(one):
            return found
        more = [n for n in step(one) if n not in met]
        met.update(more)
        queue.extend(more)
    return ""


_SUMS = frozenset({"add", "sub", "rsub"})
_RESULTS = frozenset({"result", "result0", "output"})
"""What autograd calls the result of an operation, among the tensors it saved."""


def _schemas(node: Any) -> tuple[Any, ...]:
    """The overloads that a node of autograd may be of."""
    return _overloads(_operation_of(node))


@cache
def _overloads(name: str) -> tuple[Any, ...]:
    packets = (getattr(torch.ops.aten, n, None) for n in (name, f"{name}_forward", f"_{name}"))
    packet = next((p for p in packets if p is not None), None)
    overloads = [] if packet is None else [getattr(packet, o)._schema for o in packet.overloads()]
    overloads = [s for s in overloads if s.arguments and "Tensor" in str(s.arguments[0].type)]
    return tuple(s for s in overloads if not any(a.is_out for a in s.arguments))


def _operation_of(node: Any) -> str:
    name = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _only_moves(node: Any) -> bool:
    """Whether a result is a view or a copy of the operand."""
    aliases = [a.alias_info for s in _schemas(node) for a in s.arguments]
    return _operation_of(node) in ("clone", "unsafe_view") or any(one is not None for one in aliases)


def _saved(node: Any) -> tuple[dict[str, Any], bool]:
    """What a node saved for its backward, by its name, and whether some of it lies under hooks."""
    found: dict[str, Any] = {}
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raw = getattr(node, name)
            for one in raw if isinstance(raw, tuple) else (raw,):
                try:
                    one.register_hooks(lambda x: x, lambda x: x)  # refused where hooks are
                except RuntimeError as error:
                    if "already been set" in str(error):  # not: a tensor that is None
                        return {}, True
    for name in (n for n in dir(node) if n.startswith("_saved_") or n == "saved_tensors"):
        with suppress(RuntimeError):  # written in place since
            kept = getattr(node, name)
            if name == "saved_tensors":
                found |= {f"saved {i}": x for i, x in enumerate(kept)}
            else:
                kept = kept - (1 << 64) if isinstance(kept, int) and kept >= 1 << 63 else kept  # it has no sign
                found[name.removeprefix("_saved_")] = kept
    return {name: own for name, x in found.items() if (own := _own(x)) is not None}, False


def _own(x: Any) -> Any:
    """This process's part of a DTensor, for a collective would wait for other ranks; None for other subclasses."""
    x = local(x)
    return None if isinstance(x, Tensor) and type(x) not in (Tensor, nn.Parameter) else x


def _has_nan(x: Tensor) -> bool:
    return bool((x.float() if x.itemsize == 1 else x).isnan().any())  # codes of FP8, too


def _has_inf(x: Tensor) -> bool:
    return bool((x.float() if x.itemsize == 1 else x).isinf().any())


def _producers_first(root: Tensor) -> list[Any]:
    """The nodes of a graph, each behind those whose results it reads."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(root.grad_fn, False)] if root.grad_fn is not None else []
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(n, False) for n, _ in node.next_functions if n is not None and n not in seen]
    return order
