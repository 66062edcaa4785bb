"""`python -m ottava.compat.transformer_engine [--cpu] script.py [arguments]`: runs a TransformerEngine script here.

Every `import transformer_engine...` in the script imports this package. A module below transformer_engine.pytorch that
ottava lacks offers the names of transformer_engine.pytorch; transformer_engine_torch has DType and the functions of
lists of tensors. With --cpu, what the script asks of CUDA goes to the CPU: devices, `.cuda()` and the questions of
torch.cuda (`ottava.compat.on_cpu` lists them). CUDA graphs do not.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch

from ottava.compat.on_cpu import SENTENCE, missing, on_cpu
from ottava.compat.transformer_engine.pytorch.refused import BELOW, DEBUG, KERNELS, NAMES, absent

_TOOL, _KERNELS = "nvdlfw_inspect", "transformer_engine_torch"
_MODULES = ("cpp_extensions", "module", "permutation", "quantized_tensor", "router", "tensor", "utils")
"""Modules below transformer_engine.pytorch that it has imported itself."""
_THEIRS, _OURS = "transformer_engine", "ottava.compat.transformer_engine"


class _Module(ModuleType):
    """A module of TransformerEngine, or a function of it that ottava lacks: an import cannot tell them apart."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__name__.startswith(f"{_THEIRS}.debug.features.") and not (
            name[:2] == "__" or isinstance(value, ModuleType)
        ):
            raise NotImplementedError(f"{self.__name__}.{name} is not in ottava: {DEBUG}")
        super().__setattr__(name, value)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} is not in ottava; docs/from_transformer_engine.md lists what is")


class StandIn(MetaPathFinder, Loader):
    """Imports this package in place of TransformerEngine."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of transformer_engine or a module below it; None for other packages."""
        top, _, below = fullname.partition(".")
        if top == f"{_THEIRS}_extensions" or below.split(".")[0] == "jax":
            raise ModuleNotFoundError(f"{fullname} is not in ottava, only transformer_engine.pytorch", name=fullname)
        if top == _THEIRS and below.rpartition(".")[2].lstrip("_")[:1].isupper():
            return None  # `from module import Class`: a class that ottava lacks is no module
        return ModuleSpec(fullname, self, is_package=True) if top in (_THEIRS, _TOOL, _KERNELS) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module with the names of ottava's module at the same path."""
        ours = _OURS + spec.name.removeprefix(_THEIRS)
        names = import_module(f"{_OURS}.pytorch")
        try:
            real = import_module(ours)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith(_OURS):
                raise
            real = import_module(f"{_OURS}.pytorch.ops") if ".pytorch.ops." in spec.name else names
        module = _Module(spec.name, real.__doc__)
        if spec.name == f"{_TOOL}.api":
            vars(module)["tool"] = import_module(f"{_OURS}.pytorch.execution").Tool()
        if spec.name == _KERNELS:
            vars(module).update({name: getattr(names.optimizers, name) for name in names.optimizers.__all__})
            vars(module)["DType"] = names.DType
        below = spec.name.removeprefix(f"{_THEIRS}.pytorch.").split(".")[0]

        def find(name: str) -> Any:
            if spec.name == _KERNELS and not name.startswith("__"):
                return absent(f"{_KERNELS}.{name}", KERNELS)
            if spec.name.startswith((f"{_THEIRS}.debug", _TOOL)) and not name.startswith("__"):
                known = getattr(vars(module).get("tool"), name, None) or names._below(name, "debug_stats")
                return known or absent(f"{spec.name}.{name}", DEBUG)
            if (below in NAMES or below in BELOW) and not name.startswith("__"):
                known = None if name in names.__all__ else names._below(name, "module", "tensors")
                advice = NAMES.get(below) or BELOW[below]  # te.ops.Linear is not te.Linear
                return absent(f"{below}.{name}", advice) if known is None else known
            with contextlib.suppress(AttributeError):
                return getattr(real, name)
            if spec.name == f"{_THEIRS}.pytorch" and name in _MODULES:
                return import_module(f"{spec.name}.{name}")
            return getattr(names, name)  # theirs lies in one module, ours in another one

        module.__getattr__ = find  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: `create_module` has filled the module."""


def main(arguments: Sequence[str]) -> int:
    """Runs the script. Returns 0, or 2 if there is no script to run."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip().replace("`", ""), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    redirected = arguments[0] == "--cpu"
    arguments = arguments[redirected:]
    if not arguments:
        print("--cpu: got no script; needed: --cpu script.py [arguments]", file=sys.stderr)
        return 2
    if redirected:
        print(SENTENCE, file=sys.stderr)
    sys.meta_path.insert(0, StandIn())
    sys.argv = list(arguments)
    sys.path[0] = arguments[0].rpartition("/")[0] or "."
    try:
        with on_cpu() if redirected else contextlib.nullcontext():
            runpy.run_path(arguments[0], run_name="__main__")
    except OSError as error:
        if error.filename != arguments[0]:
            raise
        print(f"{arguments[0]}: {error.strerror}; needed: a Python script", file=sys.stderr)
        return 2
    except Exception as error:
        if redirected and (name := missing(error.__traceback__)):
            error.add_note(f"{name} needs a CUDA device: --cpu has no counterpart of it. Leave the call out.")
        elif not redirected and not torch.cuda.is_available() and ("CUDA" in str(error) or "NVIDIA" in str(error)):
            error.add_note(
                "This machine has no CUDA device. Put --cpu in front of the script: then its .cuda() and device='cuda' "
                "mean the CPU, where casts have the same bits."
            )
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
