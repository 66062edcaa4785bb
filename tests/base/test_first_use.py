"""What `import ottava` costs, and that every public name is there for Python, for people and for type checkers."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("ottava", "ottava.debug")
"""Those whose names come with their first use."""
HEAVY = ("torch._dynamo", "torch._inductor", "torchao", "pyarrow", "pydantic", "jinja2", "rich", "typer")
"""What training in FP8 does not need: Dynamo alone takes longer to import than torch."""


def loaded_after(code: str, *wanted: str) -> list[str]:
    """Which of the `wanted` modules a fresh Python has in memory after `code`."""
    code += f"\nimport sys; print(*(name for name in {wanted!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_ottava_imports_nothing() -> None:
    """So it costs no more than torch, whoever asks first for a name that needs torch."""
    names = "import ottava\nassert {*ottava.__all__, '__version__'} <= {*dir(ottava)}\ndir(ottava.debug)"
    assert loaded_after(names, *HEAVY, "torch", "numpy") == []


def test_a_checkout_on_the_path_needs_no_installation() -> None:
    """Of ottava's own version, that is: there is no metadata then."""
    code = "import importlib.metadata as m\nm.version = m.distribution = None\nimport ottava\nprint(ottava.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+\s*", done.stdout)


def test_training_imports_the_engine_and_no_more() -> None:
    """convert, forward, backward, receipt, every recipe: what they import beside torch is ours."""
    step = """
import ottava, torch
for recipe in ottava.RECIPES:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
    ottava.convert(model, recipe)
    with ottava.autocast():
        model(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
    str(ottava.receipt(model))
"""
    assert loaded_after(step, *HEAVY) == []


def test_every_public_name_is_there() -> None:
    """`from ottava import *` takes all; a name has its value whatever modules were imported before."""
    for name in PACKAGES:
        names: dict[str, object] = {}
        exec(f"from {name} import *", names)
        package = importlib.import_module(name)
        assert {one: names[one] for one in package.__all__} == {one: getattr(package, one) for one in package.__all__}


@pytest.mark.parametrize("name", PACKAGES)
def test_table_type_checkers_and_all_agree(name: str) -> None:
    """Two lists of one thing, and no public name that importing a module of the package would overwrite."""
    package = importlib.import_module(name)
    tree = ast.parse(Path(package.__file__ or "").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    checked: dict[str, tuple[str, ...]] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        checked[node.module or ""] = checked.get(node.module or "", ()) + tuple(alias.name for alias in node.names)
    modules = checked.pop(name, ())
    assert checked == dict(package._HOMES)
    assert sorted(package.__all__) == sorted([*modules, *(one for names in checked.values() for one in names)])
    beside = {found.name for found in pkgutil.iter_modules(package.__path__)}
    assert beside & set(package.__all__) == set(modules)


def test_modules_and_slips() -> None:
    """A module of the package is an attribute; what nobody knows is an AttributeError with the nearest name."""
    import ottava

    assert ottava.ops.gemm is importlib.import_module("ottava.ops.gemm")
    assert not hasattr(ottava, "__wrapped__")
    with pytest.raises(AttributeError, match="module 'ottava' has no attribute 'convrt'") as caught:
        _ = ottava.convrt
    assert (caught.value.name, caught.value.obj) == ("convrt", ottava)
    done = subprocess.run([sys.executable, "-c", "import ottava; ottava.convrt"], capture_output=True, text=True)
    assert "Did you mean: 'convert'?" in done.stderr
