"""Keeps the house in order: sizes, no circles, no hidden state, every public name on purpose (docs/design.md).

Each rule is a function from source to a list of complaints; it is run on the tree, where it must find nothing, and on a
small wrong source, where it must complain: a rule that cannot fail guards nothing.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import ottava

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"

OBSERVES = ("measure", "record", "interop", "experiments", "watching", "diagnose", "remedy", "debug")
"""Rooms that look at a run, from outside: what they look at must work, and give the same bits, without them."""

MAY_OBSERVE = ("ottava", "prove", "report", "compat", "doors", "train", "bench", "lab", "cli")
"""Other rooms that may import those."""

MUTABLE_ON_PURPOSE = {
    "ottava.engine.autocast._COMPILED_VIEW": "what a compiled graph may read: torch.compile cannot trace a ContextVar",
    "ottava.engine.state._STEPS": "weak references to the states that optimizer steps are told to; no state of its own",
}
DEVICE_CODE = tuple(f"ottava.kernels.triton.{name}device_code" for name in ("", "gemm_", "rows_"))
"""Modules that are Triton's: they may import it, and nobody imports them before a kernel is launched."""

PURE_CALLS = frozenset(
    {"MappingProxyType", "frozenset", "tuple", "TypeVar", "ParamSpec", "get_args", "compile", "ConfigDict", "Path"}
    | {"replace", "finfo", "len", "log", "sqrt", "version", "getLogger", "sum", "Struct", "property", "staticmethod"}
    | {"classmethod", "_histogram"}  # the second makes nine fields of measure.tally: a `field` with a factory
)
"""Calls whose result may stand at module level: immutable, or (ConfigDict) declarative."""

READS_ENVIRONMENT = {
    "ottava.compat.transformer_engine.pytorch": "to warn of variables that TransformerEngine would obey",
    "ottava.compat.transformer_engine.pytorch.quantization": "whether TransformerEngine would execute a pickle",
    "ottava.watching.session": "RANK and WORLD_SIZE: a watch may begin before torch.distributed does",
    "ottava.kernels.native.build": "CXX, and whether and where libraries are built: kernels have no entry point",
}
"""Modules that may, outside the command line, with the reason."""

NO_MIRROR = {
    "ottava.debug": "a table of public names, tested with that of `ottava` in base/test_first_use.py",
    "ottava.compat.transformer_engine.pytorch.fp8": "other names of what `quantization` has, tested there",
    "ottava.compat.transformer_engine.pytorch.tensors": "what `quantizers` makes, tested there",
    "ottava.doors.megatron": "the linears of `megatron`, tested there; both wait for Megatron Core",
    "ottava.__main__": "three lines, run by every test of the command line",
}
"""Modules without a test file of their own, with the reason."""

PUBLIC_NAMES = frozenset(
    {"E2M1", "E4M3", "E5M2", "E8M0", "Granularity", "QuantizationSpec", "QuantizedTensor", "quantize", "gemm"}
    | {"Accumulator", "GemmRecipe", "Recipe", "RECIPES", "get_recipe", "autocast", "ScalingState"}
    | {"nn", "convert", "calibrate", "receipt", "assert_fp8", "graphed_step", "debug", "distributed", "watch"}
    | {"model_init", "load_fp8", "memory", "optim", "export"}
)
"""What `import ottava` offers."""

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
MAX_PUBLIC_NAMES = 30


@functools.cache
def parsed(source: str) -> ast.Module:
    """A file is parsed once, whatever asks."""
    return ast.parse(source)


@dataclass(frozen=True)
class Module:
    """A Python file as data: its dotted name and its source."""

    name: str
    source: str

    @property
    def tree(self) -> ast.Module:
        return parsed(self.source)

    @property
    def room(self) -> str:
        """`kernels` for ottava.kernels.reference; `ottava` for the package's own __init__."""
        return self.name.split(".")[1] if "." in self.name else self.name


def read_modules() -> dict[str, Module]:
    """Every module of the package, by dotted name."""
    modules = {}
    for path in sorted((SOURCE / "ottava").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path.read_text(encoding="utf-8"))
    return modules


MODULES: Mapping[str, Module] = read_modules()


def imports(module: Module, known: Mapping[str, Module] = MODULES) -> Iterator[str]:
    """Modules of ottava that this one imports, wherever in the file: a late import is a dependency all the same."""
    for node in statements(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "ottava")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.name.split(".")[: -node.level], *([base] if base else [])])
            if base.split(".")[0] == "ottava":
                for alias in node.names:
                    yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Every statement below a node, at any depth: a tenth of what `ast.walk` visits."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, []):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


def definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node


def module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: those of the module, of its classes, and of its if and try blocks."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from module_level(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from module_level(handler.body)


# --- the rules: one module -> complaints ---------------------------------------------------------------------------


def front_door_is_for_users(module: Module) -> list[str]:
    """Nobody but the trainer and the command line imports what `import ottava` offers."""
    if module.room in ("ottava", "__main__", "train", "cli"):
        return []
    return [f"{module.name} imports {target}" for target in imports(module) if target == "ottava"]


def observation_stays_outside(module: Module) -> list[str]:
    """Only the front door and the rooms of MAY_OBSERVE import a room that observes."""
    if module.room in (*OBSERVES, *MAY_OBSERVE):
        return []
    return [f"{module.name} imports {target}" for target in imports(module) if Module(target, "").room in OBSERVES]


def files_are_short(module: Module) -> list[str]:
    """No file over MAX_FILE_LINES."""
    lines = module.source.count("\n")
    return [f"{module.name}: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def functions_are_short(module: Module) -> list[str]:
    """No function over 80 lines, its docstring included."""
    sizes = [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in definitions(module.tree)
        if not isinstance(node, ast.ClassDef)
    ]
    return [
        f"{module.name}.{name}: {size} lines, at most {MAX_FUNCTION_LINES}"
        for name, size in sizes
        if size > MAX_FUNCTION_LINES
    ]


def names_say_something(module: Module) -> list[str]:
    """No utils, no common, no helpers: a helper lives in the file that uses it. Names in compat are other packages'."""
    vague = re.search(r"\b(utils?|common|helpers?|misc)$", module.name) and module.room != "compat"
    return [f"{module.name}: name what is in it"] if vague else []


def nothing_is_global(module: Module) -> list[str]:
    """No `global` statement."""
    return [f"{module.name}:{node.lineno}: global" for node in statements(module.tree) if isinstance(node, ast.Global)]


def environment_stays_outside(module: Module) -> list[str]:
    """Environment variables are read by entry points only."""
    if module.room == "cli" or module.name in READS_ENVIRONMENT:
        return []
    names = ("environ", "environb", "getenv", "putenv")
    complaints = []
    for node in ast.walk(module.tree):
        used = isinstance(node, ast.Attribute) and node.attr in names
        imported = isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names)
        if used or imported:
            complaints.append(f"{module.name}:{node.lineno}: reads the environment")  # type: ignore[attr-defined]
    return complaints


def triton_is_late(module: Module) -> list[str]:
    """No import of triton when ottava is imported, nor of device code, which does: most machines have none."""
    found = []
    if module.name in DEVICE_CODE:
        return found
    late = {name.rsplit(".", 1)[-1] for name in DEVICE_CODE}
    for node in module_level(module.tree.body):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"{module.name}:{node.lineno}: import triton" for name in names if name.split(".")[0] == "triton"]
        if isinstance(node, ast.Import | ast.ImportFrom):
            parts = {part for name in names for part in name.split(".")} | {alias.name for alias in node.names}
            found += [f"{module.name}:{node.lineno}: import {name}" for name in parts & late]
    return found


def called(node: ast.Call) -> str:
    """Last name of what is called: `ContextVar` for contextvars.ContextVar[int](...)."""
    function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def classes(modules: Mapping[str, Module] = MODULES) -> Iterator[ast.ClassDef]:
    """Every class of the package."""
    for module in modules.values():
        yield from (node for node in definitions(module.tree) if isinstance(node, ast.ClassDef))


@functools.cache
def makers_of_frozen() -> frozenset[str]:
    """Frozen classes of the package (dataclass, NamedTuple, pydantic) and functions annotated to return one."""
    frozen: set[str] = set()
    for node in classes():  # sources define a base before what derives from it
        marks = " ".join(ast.unparse(part) for part in (*node.decorator_list, *node.bases, *node.body[:2]))
        derived = any(ast.unparse(base) in frozen for base in node.bases)
        if derived or "NamedTuple" in marks or re.search(r"(dataclass|ConfigDict)\(.*frozen=True", marks):
            frozen.add(node.name)
    nodes = [node for module in MODULES.values() for node in definitions(module.tree)]
    functions = [node for node in nodes if not isinstance(node, ast.ClassDef)]
    return frozenset(frozen | {node.name for node in functions if node.returns and ast.unparse(node.returns) in frozen})


def mutable_parts(value: ast.expr, pure: frozenset[str]) -> Iterator[ast.expr]:
    """Displays and calls in a module-level value that may make something mutable."""
    if isinstance(value, ast.Call):
        if called(value) not in pure:
            yield value
    elif isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        yield value
    elif not isinstance(value, ast.Subscript):  # a type, or an element of something judged elsewhere
        for child in ast.iter_child_nodes(value):
            if isinstance(child, ast.expr):
                yield from mutable_parts(child, pure)


def nothing_mutable_on_import(module: Module) -> list[str]:
    """No list, dict, set or unknown object bound when a module is imported; the one ContextVar is autocast's."""
    pure = PURE_CALLS | makers_of_frozen()
    pure |= {"ContextVar"} if module.name == "ottava.engine.autocast" else frozenset()
    pure |= {"Typer", "Option", "Argument", "Console"} if module.room == "cli" else frozenset()
    complaints = []
    for node in module_level(module.tree.body):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [ast.unparse(target) for target in targets]
        on_purpose = names == ["__all__"] or any(f"{module.name}.{name}" in MUTABLE_ON_PURPOSE for name in names)
        field = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in (
            "field",
            "Field",
            "dataclasses.field",
        )
        if not on_purpose and not field:
            complaints += [
                f"{module.name}:{part.lineno}: {', '.join(names)} = {ast.unparse(part)[:60]}"
                for part in mutable_parts(node.value, pure)
            ]
    return complaints


@functools.cache
def protocol_methods() -> frozenset[str]:
    """Names that a Protocol of the package explains for all classes that follow it."""
    protocols = [node for node in classes() if "Protocol" in map(ast.unparse, node.bases)]
    return frozenset(item.name for node in protocols for item in node.body if isinstance(item, ast.FunctionDef))


def public_things_are_explained(module: Module) -> list[str]:
    """Every module, and every public function, class, method has a docstring; a Protocol speaks for its own."""
    complaints = [] if ast.get_docstring(module.tree) else [f"{module.name}: no module docstring"]

    def visit(body: list[ast.stmt], where: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(
                "_"
            ):
                decorators = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
                method_of_protocol = where != module.name and node.name in protocol_methods()
                explained = ast.get_docstring(node) or method_of_protocol or decorators & {"setter", "overload"}
                if not explained:
                    complaints.append(f"{where}.{node.name}: no docstring")
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{where}.{node.name}")

    visit(module.tree.body, module.name)
    return complaints


Rule = Callable[[Module], list[str]]
RULES: tuple[tuple[Rule, str, str], ...] = (  # the rule, and a module that breaks it: its name, its source
    (front_door_is_for_users, "ottava.ops.gemm", "from ottava import quantize"),
    (front_door_is_for_users, "ottava.nn.layer", "def late():\n    import ottava"),
    (observation_stays_outside, "ottava.nn.layer", "from ottava.debug import observe"),
    (observation_stays_outside, "ottava.kernels.reference", "def late():\n    from ..debug import observe"),
    (files_are_short, "ottava.long", "x = 1\n" * (MAX_FILE_LINES + 1)),
    (functions_are_short, "ottava.long", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (names_say_something, "ottava.nn.utils", ""),
    (nothing_is_global, "ottava.ops.gemm", "def f():\n    global x\n    x = 1"),
    (environment_stays_outside, "ottava.ops.gemm", "import os\nx = os.environ.get('X')"),
    (environment_stays_outside, "ottava.ops.gemm", "from os import getenv"),
    (triton_is_late, "ottava.kernels.quantize", "import triton.language as tl"),
    (triton_is_late, "ottava.kernels.quantize", "from ottava.kernels.triton import device_code"),
    (triton_is_late, "ottava.kernels.quantize", "from ottava.kernels.triton.device_code import cast_kernel"),
    (
        triton_is_late,
        "ottava.kernels.quantize",
        "try:\n    from triton import jit\nexcept ImportError:\n    jit = None",
    ),
    (nothing_mutable_on_import, "ottava.recipe", "RECIPES = {'bf16': 1}"),
    (nothing_mutable_on_import, "ottava.recipe", "from typing import Any\nCACHE: Any = dict()"),
    (nothing_mutable_on_import, "ottava.recipe", "PAIRS = (1, [2])"),
    (nothing_mutable_on_import, "ottava.recipe", "class Registry:\n    known = []"),
    (nothing_mutable_on_import, "ottava.ops.gemm", "CURRENT = ContextVar('current')"),
    (nothing_mutable_on_import, "ottava.ops.gemm", "APP = typer.Typer()"),
    (public_things_are_explained, "ottava.ops.gemm", "def gemm(): ..."),
    (public_things_are_explained, "ottava.ops.gemm", "'doc'\nclass A:\n    'doc'\n    def b(self): ..."),
)


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in RULES))
def test_rule_holds(rule: Rule) -> None:
    """The package breaks no rule of the house."""
    assert [complaint for module in MODULES.values() for complaint in rule(module)] == []


@pytest.mark.parametrize("rule, name, source", RULES)
def test_rule_can_fail(rule: Rule, name: str, source: str) -> None:
    """Each rule complains of a module that breaks it."""
    assert rule(Module(name, source)) != []


def test_allowed_state_is_allowed() -> None:
    """Immutable values, one whitelisted exception, and the command line's own objects pass."""
    accepted = {
        "ottava.recipe": "A = (1, 'x')\nB = MappingProxyType({'a': 1})\nC = Format(name='E4M3')\nD = Literal['a']",
        "ottava.engine.autocast": "V = ContextVar('v', default=None)\n_COMPILED_VIEW = View()",
        "ottava.cli.app": "app = typer.Typer()",
    }
    for name, source in accepted.items():
        assert nothing_mutable_on_import(Module(name, source)) == []


# --- rules about the tree as a whole -------------------------------------------------------------------------------


def circle(modules: Mapping[str, Module]) -> list[str]:
    """The modules of one import circle; empty if there is none."""
    graph = {name: set(imports(module, modules)) - {name} for name, module in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_circles() -> None:
    """No module leads back to itself, not even through a late import."""
    assert circle(MODULES) == []
    ring = {
        "ottava.a": Module("ottava.a", "def late():\n    from ottava import b"),
        "ottava.b": Module("ottava.b", "from ottava.a import x"),
    }
    assert set(circle(ring)) == {"ottava.a", "ottava.b"}


def test_every_listed_room_exists() -> None:
    """A room that has gone leaves the lists."""
    assert {"ottava", *OBSERVES, *MAY_OBSERVE} - {"ottava"} <= {module.room for module in MODULES.values()}


def test_one_context_variable() -> None:
    """All run-time state of the package hangs on one ContextVar, in engine/autocast.py."""
    calls = [
        name
        for name, module in MODULES.items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and called(node) == "ContextVar"
    ]
    assert calls == ["ottava.engine.autocast"]


def test_public_names_are_a_decision() -> None:
    """`import ottava` offers these names and no others. Growing the list is a decision, taken here."""
    assert len(ottava.__all__) <= MAX_PUBLIC_NAMES
    assert set(ottava.__all__) == PUBLIC_NAMES
    assert all(hasattr(ottava, name) for name in ottava.__all__)


@functools.cache
def imported(source: str) -> frozenset[str]:
    """Modules of the package that a source imports, wherever the import stands."""
    found = set()
    for node in statements(parsed(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ottava"):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def without_tests(modules: Mapping[str, Module], tests: Path) -> list[str]:
    """Modules that no test of their room reaches: by its name, by an import, or by an import of what imports it.

    One test file an idea: a room's tests lie in the folder of its name.
    """
    missing = []
    for name, module in modules.items():
        *folders, last = name.split(".")[1:] or [""]
        is_package = any(other.startswith(f"{name}.") for other in modules)
        if is_package or name in NO_MIRROR or tests.joinpath(*folders, f"test_{last}.py").exists():
            continue
        files = [*tests.joinpath(module.room).rglob("*.py")]
        known: set[str] = set().union(*(imported(path.read_text(encoding="utf-8")) for path in files))
        waiting = [other for other in known if other in modules and modules[other].room == module.room]
        while waiting:
            more = {x for x in imported(modules[waiting.pop()].source) if x in modules and x not in known}
            known |= more
            waiting += [other for other in more if modules[other].room == module.room]
        if name not in known:
            missing.append(name)
    return missing


def test_every_module_is_reached_by_tests_of_its_room(tmp_path: Path) -> None:
    """Know a room, know its tests."""
    assert without_tests(MODULES, ROOT / "tests") == []
    assert set(NO_MIRROR) <= set(MODULES)
    assert "ottava.numerics.formats" in without_tests(MODULES, tmp_path)


def missing_files(text: str, root: Path) -> list[str]:
    """Files that a page names and that are nowhere in the tree, under that path or the end of one."""
    named = set(re.findall(r"(?<![\w./*-])[\w./-]*\w\.(?:py|md|yaml|toml|j2|cpp|svg)\b", text))
    there = [
        f"/{path.relative_to(root).as_posix()}"
        for base in ("src", "tests", "docs")
        for path in (root / base).rglob("*")
    ]
    there += [f"/{path.name}" for path in root.iterdir()]
    return sorted(name for name in named if not any(path.endswith(f"/{name}") for path in there))


def test_design_page_names_real_files() -> None:
    """Prose that names a file moves with the file."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert missing_files(page, ROOT) == []
    assert missing_files("see `attic/gone.py` and `nn/layer.py`, pyproject.toml", ROOT) == ["attic/gone.py"]


def tracked_files() -> list[Path]:
    """What git has or would add."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    return [path for line in listing.stdout.splitlines() if (path := ROOT / line).is_file()]


def test_sizes_hold_for_tests_too() -> None:
    """Tests, examples and the launcher keep the sizes of the source; blind sets are as their authors wrote them."""
    blind = ROOT / "benchmarks" / "blind"
    paths = [p for p in tracked_files() if (p.suffix == ".py" and blind not in p.parents) or p == ROOT / "x"]
    paths = [path for path in paths if SOURCE not in path.parents]
    modules = [Module(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in paths]
    assert [line for module in modules for line in (*files_are_short(module), *functions_are_short(module))] == []
    assert len(modules) > 100
