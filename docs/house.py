"""Draws the house: which room of src/ottava stands on which, from the imports themselves.

python docs/house.py            the drawing of docs/design.md
python docs/house.py --lines    the same with files and lines of each room
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "ottava"
CODE = (".py", ".cpp", ".h", ".j2", ".js", ".css", ".yaml")


def room_of(path: Path) -> str:
    """`kernels` for kernels/reference.py, `ops` for ops.py; "" for the package's own files."""
    first = path.relative_to(SOURCE).parts[0]
    return "" if first.startswith("__") else first.removesuffix(".py")


def knows() -> dict[str, set[str]]:
    """Room -> the rooms that its files import."""
    rooms: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if not (room := room_of(path)):
            continue
        found = rooms.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ottava":
                parts = node.module.split(".")[1:2]
                found |= set(parts or [alias.name for alias in node.names])
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

    def below(one: str) -> set[str]:
        return rooms[one].union(*map(below, rooms[one])) if rooms[one] else set()

    return sorted(other for other in rooms[room] if not any(other in below(third) for third in rooms[room] - {other}))


def draw(lines: bool = False) -> str:
    """The drawing, the roof first."""
    rooms = knows()
    text = []
    for number, floor in reversed(list(enumerate(floors(rooms)))):
        for room in floor:
            files = [p for p in SOURCE.rglob("*") if p.suffix in CODE and room_of(p) == room]
            size = f"{len(files):4} files {sum(len(p.read_text('utf-8').splitlines()) for p in files):6} lines  "
            text.append(f"{number:2}  {room:17}{size if lines else ''}-> {', '.join(direct(room, rooms)) or '.'}")
    return "\n".join(text)


if __name__ == "__main__":
    print(draw("--lines" in sys.argv[1:]))
