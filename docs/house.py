"""Draws the house from the imports themselves, and counts it: which room of src/ottava stands on which.

python docs/house.py            the picture of docs/design.md: a line a room, and the arrows
python docs/house.py --write    writes it there
python docs/house.py --lines    the same with files and lines of each room
python docs/house.py --figures  the figures of the house and their limits (`./x house`)
"""

from __future__ import annotations

import ast
import functools
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "ottava"
CODE = (".py", ".cpp", ".h", ".j2", ".js", ".css", ".yaml")
DENSE = ("kernels", "ops", "engine")
"""Rooms whose code is strange in places: their comments are counted."""
ENTRANCES = MappingProxyType(
    {
        "import ottava.train.config": ("train.config", ()),
        "ottava table": ("cli.watch", ("table",)),
        "ottava export": ("cli.export", ("export", "_source")),  # of a checkpoint; a run's needs the trainer, too
    }
)
"""A way into the package -> its module, and the functions in it that run: what they import counts too."""
LIMITS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "Python lines in src": (88_620, 48_000),
        "files": (290, 200),
        "modules in the root": (3, 6),
        "longest import chain": (27, 22),
        "modules behind import ottava.train.config": (21, 20),
        "modules behind ottava table": (15, 15),
        "modules behind ottava export": (40, 60),
        "public class names with more than one home": (9, 12),
        "comments per 1,000 lines in kernels, ops, engine": (60, 60),
        "test lines": (77_250, 46_000),
        "benchmark lines": (4_870, 4_000),
    }
)
"""Figure -> the limit that a test holds today, and the goal. All are "at most", but comments are "at least".
A change that betters a figure moves its limit. Lines have a few hundred of room, so a small feature needs no change;
one that needs more moves the limit, and its commit says why."""


def room_of(path: Path) -> str:
    """`kernels` for kernels/reference.py, `recipe` for recipe.py; "" for the package's own files."""
    first = path.relative_to(SOURCE).parts[0]
    return "" if first.startswith("__") else first.removesuffix(".py")


@functools.cache
def modules() -> Mapping[str, ast.Module]:
    """Dotted name without `ottava.` -> its tree; "" is the package itself."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text("utf-8"))
    return MappingProxyType(found)


@functools.cache
def imports_anywhere(name: str) -> set[str]:
    """Modules of ours, without `ottava.`, that a module imports, in its functions too."""
    return imported(ast.walk(modules()[name]))


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Modules of ours, without `ottava.`, that these statements import."""
    known, found = modules(), set()
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("ottava.") in known else node.module for name in whole]
        found |= {name.partition(".")[2] for name in names if name.split(".")[0] == "ottava"}
    return found & known.keys()


@functools.cache
def knows() -> dict[str, set[str]]:
    """Room -> the rooms that its files import."""
    rooms: dict[str, set[str]] = {}
    for name in modules():
        room = name.split(".")[0]
        if room and not room.startswith("__"):
            rooms.setdefault(room, set()).update(other.split(".")[0] for other in imports_anywhere(name))
    return {room: (others & rooms.keys()) - {room} for room, others in rooms.items()}


def floors(rooms: dict[str, set[str]]) -> list[list[str]]:
    """Each room on the lowest floor above all that it knows, from the ground up.

    Raises:
        ValueError: rooms know each other in a circle.
    """
    placed: dict[str, int] = {}
    while len(placed) < len(rooms):
        ready = [room for room, others in rooms.items() if room not in placed and others <= placed.keys()]
        if not ready:
            raise ValueError(f"a circle among {sorted(rooms.keys() - placed.keys())}")
        placed |= {room: max((placed[other] + 1 for other in rooms[room]), default=0) for room in ready}
    return [[room for room in sorted(placed) if placed[room] == floor] for floor in range(max(placed.values()) + 1)]


def direct(room: str, rooms: dict[str, set[str]]) -> list[str]:
    """What a room knows, less what it could reach through another one of them: the arrows worth drawing."""

    @functools.cache
    def below(one: str) -> set[str]:
        return rooms[one].union(*map(below, rooms[one])) if rooms[one] else set()

    return sorted(other for other in rooms[room] if not any(other in below(third) for third in rooms[room] - {other}))


def tree() -> str:
    """A line a room, from the ground up: what its docstring says first."""
    lines = []
    for room in (room for floor in floors(knows()) for room in floor):
        said = (ast.get_docstring(modules()[room]) or "").split("\n\n")[0].replace("\n", " ").split(". ")[0]
        name = f"{room}/" if (SOURCE / room).is_dir() else f"{room}.py"
        lines.append(f"  {name:21}{said.removesuffix('.')}")
    return "src/ottava/\n" + "\n".join(lines)


def draw(lines: bool = False) -> str:
    """The drawing, the roof first."""
    rooms = knows()
    text = []
    for number, floor in reversed(list(enumerate(floors(rooms)))):
        for room in floor:
            size = ""
            if lines:
                files = [p for p in SOURCE.rglob("*") if p.suffix in CODE and room_of(p) == room]
                size = f"{len(files):4} files {sum(len(p.read_text('utf-8').splitlines()) for p in files):6} lines  "
            text.append(f"{number:2}  {room:17}{size}-> {', '.join(direct(room, rooms)) or '.'}")
    return "\n".join(text)


# --- figures ---------------------------------------------------------------------------------------------------------


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported; what only type checkers read does not."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield node
        checked = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for field in ("body", "orelse", "finalbody", "handlers"):
            if not (checked and field == "body"):
                yield from at_import(getattr(node, field, []))


@functools.cache
def homes() -> Mapping[str, str]:
    """`debug.compare` -> the module that `first_use` imports for it, from the tables of the packages that have one."""
    found: dict[str, str] = {}
    for package, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
                table = ast.literal_eval(node.value.args[0]) if isinstance(node.value, ast.Call) else {}
                names = ((name, home.removeprefix("ottava.")) for home, names in table.items() for name in names)
                found |= {f"{package}.{name}".lstrip("."): home for name, home in names}
    return MappingProxyType(found)


def asked(nodes: Iterable[ast.AST]) -> set[str]:
    """Homes of the public names that these statements import by first use."""
    froms = (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module)
    names = {f"{node.module}.{alias.name}".removeprefix("ottava.") for node in froms for alias in node.names}
    return {homes()[name] for name in names & homes().keys()}


def behind(start: str, functions: Iterable[str] = ()) -> set[str]:
    """Modules of ours that are loaded after an import of `start`, the package itself with them.

    Args:
        functions: of `start`, which run, too: what they import late.
    """
    seen, waiting = set[str](), [start]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in modules():
            continue
        seen.add(name)
        tree = modules()[name]
        nodes: list[ast.AST] = list(at_import(tree.body))
        for node in tree.body if name == start else ():
            if isinstance(node, ast.FunctionDef) and node.name in functions:
                nodes += ast.walk(node)
        waiting += [*imported(nodes), *asked(nodes), name.rpartition(".")[0]]  # "" is the parent of all
    return seen


def longest_chain() -> int:
    """Modules in the longest chain of imports, late ones too."""

    @functools.cache
    def chain(name: str) -> int:
        return 1 + max(map(chain, imports_anywhere(name) - {name, ""}), default=0)

    return max(map(chain, modules()))


def count_homes() -> int:
    """Public class names that two modules define; interop and compat repeat the names of others on purpose."""
    homes: dict[str, set[str]] = {}
    for name, tree in modules().items():
        if name.split(".")[0] not in ("compat", "interop"):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, set()).add(name)
    return sum(len(found) > 1 for found in homes.values())


def lines_of(folder: Path) -> int:
    """Lines of Python."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


def comments() -> int:
    """Comments in a thousand lines of DENSE; a mark for a tool (noqa, type: ignore) is none."""
    paths = [path for path in SOURCE.rglob("*.py") if room_of(path) in DENSE]
    found = lines = 0
    for path in paths:
        with path.open("rb") as file:
            said = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
        found += sum(not text.lstrip("# ").startswith(("noqa", "type:")) for text in said)
        lines += len(path.read_text("utf-8").splitlines())
    return round(1000 * found / lines)


FIGURES: Mapping[str, Callable[[], int]] = MappingProxyType(
    {
        "Python lines in src": lambda: lines_of(SOURCE),
        "files": lambda: len(list(SOURCE.rglob("*.py"))),
        "modules in the root": lambda: len(list(SOURCE.glob("*.py"))),
        "longest import chain": longest_chain,
        **{
            f"modules behind {way}": functools.partial(lambda *to: len(behind(*to)), *to)
            for way, to in ENTRANCES.items()
        },
        "public class names with more than one home": count_homes,
        "comments per 1,000 lines in kernels, ops, engine": comments,
        "test lines": lambda: lines_of(ROOT / "tests"),
        # without the blind sets: scripts of other authors, which nobody may change after their first run
        "benchmark lines": lambda: lines_of(ROOT / "benchmarks") - lines_of(ROOT / "benchmarks" / "blind"),
    }
)
"""The figures of LIMITS, and how each is found."""


def picture(lines: bool = False) -> str:
    """What docs/design.md shows."""
    return f"{tree()}\n\n{draw(lines)}"


def main(*words: str) -> None:
    """Prints the picture or the figures, or writes the picture."""
    if "--write" in words:
        page = ROOT / "docs" / "design.md"
        before, rest = page.read_text("utf-8").split("```text\nsrc/ottava/\n")
        page.write_text(f"{before}```text\n{picture()}{rest[rest.index(chr(10) + '```') :]}", "utf-8")
        return
    if "--figures" not in words:
        print(picture("--lines" in words))
        return
    print(f"{'':50}{'today':>8}{'limit':>8}{'goal':>8}")
    for name, figure in FIGURES.items():
        print(f"{name:50}{figure():>8,}{LIMITS[name][0]:>8,}{LIMITS[name][1]:>8,}")


if __name__ == "__main__":
    main(*sys.argv[1:])
