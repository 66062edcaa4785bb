"""Full names of modules: where a layer is in the model that is watched, however it is wrapped.

Nothing has to be registered. A module that is met for the first time is looked for in the models known so far; if it is
in none of them, it is the outermost module of another model, since a forward starts outside and goes in.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from ottava.debug.watch.adapters import adapter_of

TRANSPARENT = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes in which torch.compile, FSDP and checkpoint_wrapper keep the module that they wrap."""
WRAPPERS = frozenset(
    {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "Float16Module", "FullyShardedDataParallel"}
)
"""Classes whose attribute `module` is the model; so is that of any class which has nothing else."""


class ModuleNames:
    """The name of every module that was met.

    Args:
        model: only its modules have names; None: those of every model whose forward runs.
        found: told name and module of each one, once.

    Edge cases: a module in two places has the name of the first, as in `named_modules`. Where a second model has layers
        of the same names, its names start with its class. A model that has gone frees its names.

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
        self._names: dict[int, tuple[weakref.ref[nn.Module], str | None]] = {}  # by id; None: of a model not watched
        self._owners: dict[str, weakref.ref[nn.Module]] = {}
        self._holders: dict[int, tuple[weakref.ref[Tensor], weakref.ref[nn.Module] | None, str]] = {}
        self._lock = threading.RLock()
        if model is not None:
            self._take_in(model, "")

    def knows(self, module: nn.Module) -> bool:
        """Whether `learn` has nothing to do for it."""
        known = self._names.get(id(module))
        return known is not None and known[0]() is module

    def of(self, module: nn.Module) -> str | None:
        """Its full name; None for a module that was not met, or is of another model than the one given."""
        known = self._names.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def learn(self, module: nn.Module) -> None:
        """Finds the names of a module whose forward begins, and of all in it."""
        with self._lock:
            if self.knows(module):
                return
            self._roots = [(root, prefix) for root, prefix in self._roots if root() is not None]
            if module._modules or module._parameters or adapter_of(module) is not None:
                for root, prefix in self._roots:  # made after its model was met?
                    if (alive := root()) is not None:
                        self._scan(alive, prefix)
                if self.knows(module):
                    return
                if not self._only:
                    self._take_in(module, self._prefix(module))
                    return
            for inner in module.modules():  # of no interest: an activation, a loss, another model
                if not self.knows(inner):
                    self._names[id(inner)] = (weakref.ref(inner), None)

    def holder(self, parameter: Tensor) -> tuple[nn.Module, str, str] | None:
        """The module whose own parameter it is, that module's full name and the parameter's own; None if none is known.
        Of several, as where an embedding and a head share it, one that is a layer with a GEMM."""
        found = self._holders.get(id(parameter))
        if found is not None and found[0]() is parameter and (found[1] is None or found[1]() is not None):
            module = None if found[1] is None else found[1]()
            return None if module is None else (module, self.of(module) or "", found[2])
        best: tuple[nn.Module, str, str] | None = None
        for known, name in [*self._names.values()]:
            module = known()
            if name is None or module is None:
                continue
            own = next((key for key, p in module._parameters.items() if p is parameter), None)
            if own is not None and (best is None or adapter_of(best[0]) is None):
                best = (module, name, own)
        place = (None, "") if best is None else (weakref.ref(best[0]), best[2])
        self._holders[id(parameter)] = (weakref.ref(parameter), *place)
        return best

    def compiled(self) -> Iterator[nn.Module]:
        """Modules that run as compiled code, as far as can be told from outside."""
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
        """What goes before the names of another model, so that no two living modules have the same."""

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
    """As `named_modules`, without the names of wrappers.

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
