"""Finds the full names of modules in the watched model, also inside wrappers.

Users register nothing. A new module is looked up in the models known so far. If no model has it, it is the outermost
module of another model, because a forward begins with the outermost module.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from ottava.watching.adapters import adapter_of

TRANSPARENT = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes of torch.compile, FSDP and checkpoint_wrapper that hold the wrapped module."""
WRAPPERS = frozenset(
    {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "Float16Module", "FullyShardedDataParallel"}
)
"""Classes whose attribute `module` is the model. In any class that has no other child it is, too."""


class ModuleNames:
    """The names of all modules met so far.

    Args:
        model: the only model whose modules get names; None: every model whose forward runs.
        found: called once with name and module of each module.

    Edge cases: a module in two places has the name of the first place, as in `named_modules`. If a second model has
        layers of the same names, its names begin with its class. The names of a deleted model are free again.

    Example:
        >>> names = ModuleNames()
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> names.learn(model)
        >>> names.of(model[0]), names.of(nn.Linear(2, 2)) is None
        ('0', True)
    """

    def __init__(
        self, model: nn.Module | None = None, found: Callable[[str, nn.Module], None] = lambda name, module: None
    ) -> None:
        self._found = found
        self._only = model is not None
        self._roots: list[tuple[weakref.ref[nn.Module], str]] = []
        self._names: dict[int, tuple[weakref.ref[nn.Module], str | None]] = {}  # by id; None: the model is not watched
        self._owners: dict[str, weakref.ref[nn.Module]] = {}
        self._holders: dict[int, tuple[weakref.ref[Tensor], weakref.ref[nn.Module] | None, str]] = {}
        self._lock = threading.RLock()
        if model is not None:
            self._take_in(model, "")

    def knows(self, module: nn.Module) -> bool:
        """Whether the module has been met."""
        entry = self._names.get(id(module))
        return entry is not None and entry[0]() is module

    def of(self, module: nn.Module) -> str | None:
        """The module's full name; None if the module has not been met or belongs to a model that is not watched."""
        entry = self._names.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def learn(self, module: nn.Module) -> None:
        """Finds the names of a module whose forward begins, and of all modules in it."""
        with self._lock:
            if self.knows(module):
                return
            self._roots = [(root, prefix) for root, prefix in self._roots if root() is not None]
            if module._modules or module._parameters or adapter_of(module) is not None:
                for root, prefix in self._roots:  # perhaps a late addition to a known model
                    if (alive := root()) is not None:
                        self._scan(alive, prefix)
                if self.knows(module):
                    return
                if not self._only:
                    self._take_in(module, self._prefix(module))
                    return
            for inner in module.modules():  # an activation, a loss, or another model: never ask again
                if not self.knows(inner):
                    self._names[id(inner)] = (weakref.ref(inner), None)

    def holder(self, parameter: Tensor) -> tuple[nn.Module, str, str] | None:
        """(module, full name of the module, name of the parameter in it) for a parameter; None if unknown. Of several
        modules that share it, such as embedding and head, it prefers a layer with a GEMM."""
        entry = self._holders.get(id(parameter))
        if entry is not None and entry[0]() is parameter and (entry[1] is None or entry[1]() is not None):
            module = None if entry[1] is None else entry[1]()
            return None if module is None else (module, self.of(module) or "", entry[2])
        best: tuple[nn.Module, str, str] | None = None
        for reference, name in [*self._names.values()]:
            module = reference()
            if name is None or module is None:
                continue
            key = next((key for key, p in module._parameters.items() if p is parameter), None)
            if key is not None and (best is None or adapter_of(best[0]) is None):
                best = (module, name, key)
        place = (None, "") if best is None else (weakref.ref(best[0]), best[2])
        self._holders[id(parameter)] = (weakref.ref(parameter), *place)
        return best

    def parameter(self, parameter: Tensor) -> str:
        """The full name of a parameter; "" if it is unknown."""
        holder = self.holder(parameter)
        if holder is None:
            return ""
        return f"{holder[1]}.{holder[2]}" if holder[1] else holder[2]

    def roots(self) -> Iterator[nn.Module]:
        """The models."""
        return (alive for root, _ in self._roots if (alive := root()) is not None)

    def compiled(self) -> Iterator[nn.Module]:
        """Modules that are known to run as compiled code."""
        for root, _ in self._roots:
            if (alive := root()) is not None:
                for _, module in walk(alive):
                    if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
                        yield module

    def _take_in(self, root: nn.Module, prefix: str) -> None:
        self._roots.append((weakref.ref(root), prefix))
        self._scan(root, prefix)

    def _scan(self, root: nn.Module, prefix: str) -> None:
        for name, module in walk(root):
            if self.of(module) is not None:
                continue
            full = f"{prefix}{name}" if name else prefix.removesuffix(".") or type(root).__name__
            self._names[id(module)] = (weakref.ref(module), full)
            if name or not module._modules:  # the model as a whole is no layer
                self._owners[full] = weakref.ref(module)
            self._found(full, module)

    def _prefix(self, root: nn.Module) -> str:
        """A prefix for the names of another model, so that no two living modules share a name."""

        def taken(prefix: str) -> bool:
            for name, module in walk(root):
                if not name and module._modules:
                    continue
                owner = self._owners.get(f"{prefix}{name}" if name else prefix.removesuffix(".") or kind)
                if owner is not None and owner() not in (None, module):
                    return True
            return False

        kind = type(root).__name__
        number, prefix = 1, ""
        while taken(prefix):
            prefix = f"{kind}." if number == 1 else f"{kind} {number}."
            number += 1
        return prefix


def walk(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules` without the names of wrappers.

    Example:
        >>> [name for name, _ in walk(nn.Sequential(nn.Sequential(nn.Linear(2, 2))))]
        ['', '0', '0.0']
    """
    seen: set[int] = set()
    stack = [("", root)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        inside = []
        for key, child in module._modules.items():
            if child is None:
                continue
            if key in TRANSPARENT or (key == "module" and _wraps(module)):
                inside.append((name, child))
            else:
                inside.append((f"{name}.{key}" if name else key, child))
        stack += reversed(inside)


def _wraps(module: nn.Module) -> bool:
    return len(module._modules) == 1 or type(module).__name__ in WRAPPERS
