"""Structured damage to files: a mutation knows the format, so most results reach the code behind the first check.

Each function takes the content and a `random.Random`, and returns another content. Values go wrong in type, size,
depth, sign, number and name; safetensors headers, opcodes of pickles, entries of archives, records of event files and
columns of Parquet go wrong one by one, with lengths and checksums made right again. Some bytes simply flip.
"""

from __future__ import annotations

import io
import json
import os
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ottava.interop.event_file import masked_crc

_Loader, _Dumper = (getattr(yaml, f"CSafe{name}", getattr(yaml, f"Safe{name}")) for name in ("Loader", "Dumper"))
NAMES = (
    "../outside", "/tmp/outside", "..", "", ".", "a/b", "a\0b", "\ud800", "é" * 200, "~root", "CON", "x" * 5000, "{0}",
    "{% raw %}", "<script>", "a\nb", "\x1b[2J", "__class__", "step-000002", "%s",
)  # fmt: skip
"""Names that lead elsewhere, or that something may take for more than a name."""
JUNK: tuple[Any, ...] = (
    None, True, 0, 5, -1, 1.5, -0.0, float("nan"), float("inf"), "x", "", [], [5], ["x"], {}, {"a": 5}, 10**30, 2**53,
    -(2**60), 2**31, 2**63, 1e308, [[1]], "nan", "1e999", "0x10", "1:30:00", "2026-02-30", [None], {"": None}, "null",
)  # fmt: skip
"""Values that nobody expects where they stand."""


def damaged(content: bytes, chance: Random) -> bytes:
    """Some bits flipped, bytes changed, cut away, repeated or put in."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(7):
            case 0:
                del data[at:]
            case 1:
                del data[at : at + chance.randint(1, 20)]
            case 2:
                data[at:at] = data[at : at + chance.randint(1, 50)] * chance.choice((1, 30))
            case 3:
                data[at:at] = chance.choice((b"\xff" * 9, b"\0" * 8, b"[" * 300, b"9" * 40, b"-", b"\n", b"{}", b":"))
            case 4 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case _:
                data[at : at + 1] = bytes([chance.randrange(256)])
    return bytes(data)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every part of a tree."""
    yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*path, key))


def odd(value: Any, chance: Random) -> Any:
    """Another value for one: junk, a neighbour of it, or itself too deep or too often."""
    match chance.randrange(9):
        case 0:
            for _ in range(chance.choice((1, 60, 70, 900))):
                value = [value] if chance.random() < 0.5 else {"a": value}
            return value
        case 1 if isinstance(value, int | float):
            return chance.choice((-value, value + 1, value * 2**40, float(value) + 0.5, str(value), bool(value)))
        case 2 if isinstance(value, str):
            return chance.choice((*NAMES, value.upper(), value + "x", value[:-1], [value], value * 50))
        case 3 if isinstance(value, list):
            return chance.choice((value * 2, value[1:], value[::-1], value * 500, dict(enumerate(value)), tuple(value)))
        case 4 if isinstance(value, dict):
            return chance.choice((list(value), list(value.values()), {**value, chance.choice(NAMES): 1}))
        case 5:
            return chance.choice(NAMES)
    return chance.choice(JUNK)


def tree(value: Any, chance: Random) -> Any:
    """One to three parts of a tree of plain values replaced, removed, renamed or swapped."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        paths = [path for path in places(value) if path]
        if not paths or chance.random() < 0.02:
            value = odd(value, chance)
            continue
        *above, last = chance.choice(paths)
        parent = value
        for key in above:
            parent = parent[key]
        match chance.randrange(6):
            case 0:
                del parent[last]
            case 1 if isinstance(parent, dict):
                parent[chance.choice((*NAMES, f"{last}s", str(last).upper()))] = parent.pop(last)
            case 2 if isinstance(parent, dict) and len(parent) > 1:
                other = chance.choice(list(parent))
                parent[last], parent[other] = parent[other], parent[last]
            case _:
                parent[last] = odd(parent[last], chance)
    return value


def as_json(value: Any, chance: Random, **options: Any) -> bytes:
    """JSON of a tree; now and then a key stands twice, a number has no end, or a mark of the byte order comes first."""
    try:
        text = json.dumps(value, default=str, **options)
    except (RecursionError, ValueError):  # deeper than json writes
        text = "[" * 3000 + "]" * 3000
    match chance.randrange(20):
        case 0:
            text = text.replace("{", '{"a": 1, "a": 2, ', 1)
        case 1:
            text = text.replace(": ", ": " + chance.choice(("-" * 9, "9" * 5000, "1e99999", "NaN")) + ", ", 1)
        case 2:
            text = "\ufeff" + text
        case 3:
            return text.encode("utf-16", "surrogatepass")
    return text.encode("utf-8", "surrogatepass")


def json_text(content: bytes, chance: Random) -> bytes:
    """A JSON file, or one with an object a line: one of them changed."""
    whole = content.decode()
    lines = [whole] if whole.startswith("{\n") else whole.splitlines()
    number = chance.randrange(len(lines))
    lines[number] = as_json(tree(json.loads(lines[number]), chance), chance).decode("latin-1")
    if len(lines) > 1 and chance.random() < 0.2:
        lines.insert(number, chance.choice(lines))
    return "\n".join(lines).encode("latin-1") + b"\n"


CANARY_YAML = (
    "!!python/object/apply:os.system ['touch CANARY']", "!!python/name:os.system", "!!python/object/new:type {}",
    "!!timestamp '2026-99-99'", "!!binary '!'", "!!set {a: 1}", "!!int '0b2'", "!!float x", "&a [*a]", "*missing",
    "{<<: 5}", "!!omap [a]", "1:30:59:59:59", "0o9", "? [a]\n: 1", "!x y", "~", "@", "`", "%TAG ! x", "- - - -",
)  # fmt: skip


def yaml_text(content: bytes, chance: Random) -> bytes:
    """Settings: a value changed, or a line with a tag, an anchor, or no sense."""
    if chance.random() < 0.25:
        lines = content.decode().splitlines()
        at = chance.randrange(len(lines) + 1)
        key = chance.choice(("x", "steps", "recipe", "parallel", "<<", "model"))
        lines.insert(at, " " * chance.choice((0, 0, 2)) + f"{key}: {chance.choice(CANARY_YAML)}")
        return "\n".join(lines).encode()
    value = tree(yaml.load(content, _Loader), chance)
    try:
        return yaml.dump(value, Dumper=_Dumper, allow_unicode=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, RecursionError, AttributeError):
        return as_json(value, chance)


def safetensors(content: bytes, chance: Random) -> bytes:
    """A header whose entries lie: dtypes, shapes, offsets, names, metadata; or another length of it."""
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    for _ in range(chance.choice((1, 1, 2))):
        names = [name for name in header if name != "__metadata__"]
        if not names:
            break
        name = chance.choice(names)
        entry = header[name]
        match chance.randrange(10):
            case 0:
                entry["dtype"] = chance.choice(("F64", "F8_E5M2", "F8_E8M0", "F4", "BOOL", "I64", "C64", "Q9", "", 5))
            case 1:
                entry["shape"] = chance.choice(([], [0], [2**62, 4], [-1, 4], [1] * 300, [1.5], "x", [2**64], None))
            case 2:
                first, last = entry["data_offsets"]
                wrong = (
                    [last, first],
                    [first, last + 8],
                    [-8, last],
                    [2**63, 2**64 - 1],
                    [first],
                    [0, 0],
                    [first, 1e9],
                )
                entry["data_offsets"] = chance.choice(wrong)
            case 3:
                header[chance.choice((*NAMES, f"{name}_scale_inv", f"{name}x"))] = header.pop(name)
            case 4:
                header[chance.choice((f"{name}_scale_inv", f"{name}.scale", "model.extra"))] = dict(entry)
            case 5:
                other = chance.choice(names)
                header[name], header[other] = header[other], header[name]
            case 6:
                header["__metadata__"] = tree(header.get("__metadata__", {}), chance)
            case 7:
                header = tree(header, chance)
                if not isinstance(header, dict) or not all(isinstance(e, dict) for e in header.values()):
                    break
            case 8:  # the same bytes as a matrix of another form
                shape = (
                    [n for n in entry["shape"] if isinstance(n, int)] if isinstance(entry.get("shape"), list) else []
                )
                entry["shape"] = chance.choice((shape[::-1], [1, *shape], [-1], shape[:1]))
            case _:
                at = chance.randrange(len(data) + 1)
                worst = chance.choice((b"\x7f\xff\xff\xff", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff" * 4))
                data = data[:at] + worst + data[at + 4 :]
    text = as_json(header, chance)
    claim = len(text) if chance.random() < 0.9 else chance.choice((0, 2**40, 2**64 - 1, len(text) + 8, 100_000_001))
    return claim.to_bytes(8, "little") + text + data[: len(data) if chance.random() < 0.95 else chance.randrange(99)]


CALLS = (
    "os system", "posix system", "subprocess Popen", "builtins eval", "builtins exec", "builtins getattr",
    "builtins __import__", "torch load", "torch.hub load", "functools partial", "operator attrgetter", "runpy run_path",
    "numpy load", "pickle loads", "importlib import_module", "transformer_engine.x y", "builtins set",
    "numpy core.eval.__globals__", "torchao.x.Tensor x", "collections OrderedDict", "torch._utils _rebuild_tensor_v2",
    "builtins bytearray", "torch.storage _load_from_bytes", "io BytesIO", "argparse Namespace",
)  # fmt: skip
"""Functions that an attack names, and those that the reader knows."""


def _call(chance: Random, argument: str = "touch CANARY") -> bytes:
    """Opcodes that call a function: by reduction, as an instance, or by its name on the stack."""
    module, name = chance.choice(CALLS).split(" ")
    text = f"X{struct.pack('<I', len(argument)).decode('latin-1')}{argument}".encode("latin-1")
    match chance.randrange(5):
        case 0:
            return f"(S'{argument}'\ni{module}\n{name}\n".encode()
        case 1:
            names = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
            return names + b"\x93" + text + b"\x85R"
        case 2:
            return f"c{module}\n{name}\n".encode() + text + b"\x85\x81"
        case 3:
            return f"(c{module}\n{name}\n".encode() + text + b"o"
        case _:
            return f"c{module}\n{name}\n".encode() + text + b"\x85R"


def pickled(content: bytes, chance: Random) -> bytes:
    """Opcodes removed, repeated, swapped or put in, calls of functions among them; protocols 0 to 5 are mixed."""
    try:
        starts = [at or 0 for _, _, at in pickletools.genops(content)]
    except Exception:
        return damaged(content, chance)
    ops = [content[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(ops))
        match chance.randrange(8):
            case 0:
                del ops[at : at + chance.randint(1, 3)]
            case 1:
                ops[at:at] = [chance.choice(ops)] * chance.choice((1, 2, 200))
            case 2:
                other = chance.randrange(len(ops))
                ops[at], ops[other] = ops[other], ops[at]
            case 3 | 4:
                ops[at:at] = [_call(chance), *([b"0"] if chance.random() < 0.5 else [])]
            case 5:
                ops[at] = _call(chance)
            case 6:
                strange = (
                    b"\x82\x05",
                    b"Pcanary\n",
                    b"Q",
                    b"\x97",
                    b"\x98",
                    b"r\xff\xff\xff\x7f",
                    b"\x85" * 600,
                    b"\x8f",
                )
                strange += (b"\x8e" + struct.pack("<Q", 2**40), b"\x95" + struct.pack("<Q", 2**62), b"L" + b"9" * 5000)
                ops[at:at] = [
                    chance.choice((*strange, b"b", b"}", b"N", b"(", b")", b"0", b"R", b"\x81", b"\x92", b"d"))
                ]
            case _:
                ops[at] = damaged(ops[at], chance) if ops[at] else b"."
        ops = ops or [b"."]
    return b"".join(ops)


def archive(content: bytes, chance: Random) -> bytes:
    """A file of torch.save: its pickle changed, or entries renamed, removed, shortened, doubled or compressed."""
    if not content.startswith(b"PK"):
        return pickled(content, chance) if chance.random() < 0.7 else damaged(content, chance)
    made, kind = io.BytesIO(), chance.randrange(7)
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        entries = [(entry.filename, old.read(entry)) for entry in old.infolist()]
        chosen = chance.randrange(len(entries))
        for number, (name, data) in enumerate(entries):
            if name.endswith("data.pkl") and kind < 4:
                data = pickled(data, chance)
            elif number == chosen and kind == 4:
                name = chance.choice(("archive/../../outside", "/tmp/outside", f"{name}x", name.replace("data/", "")))
            elif number == chosen and kind == 5:
                data = damaged(data, chance)
            if not (number == chosen and kind == 6 and chance.random() < 0.5):
                pressed = zipfile.ZIP_DEFLATED if number == chosen and kind == 6 else zipfile.ZIP_STORED
                new.writestr(zipfile.ZipInfo(name.replace("\0", "0")), data, pressed)
    return made.getvalue() if chance.random() < 0.9 else damaged(made.getvalue(), chance)


def record(payload: bytes) -> bytes:
    """A record of an event file around whatever, with right checksums."""
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked_crc(length)) + payload + struct.pack("<I", masked_crc(payload))


def records(content: bytes) -> list[bytes]:
    """The payloads of an event file."""
    found, at = [], 0
    while at < len(content):
        (size,) = struct.unpack("<Q", content[at : at + 8])
        found.append(content[at + 12 : at + 12 + size])
        at += 16 + size
    return found


def events(content: bytes, chance: Random) -> bytes:
    """Payloads changed below right checksums; records lost, repeated, or with another size."""
    payloads = records(content)
    at = chance.randrange(len(payloads))
    match chance.randrange(6):
        case 0:
            payloads[at:at] = [chance.choice(payloads)] * chance.choice((1, 50))
        case 1:
            claim = struct.pack("<Q", chance.choice((0, 2**40, 2**63, 2**64 - 1)))
            return content + claim + struct.pack("<I", masked_crc(claim)) + b"x" * 50
        case 2:
            payloads[at] = b"\x10" + b"\xff" * chance.choice((9, 10, 1000))
        case _:
            payloads[at] = damaged(payloads[at], chance)
    return b"".join(map(record, payloads))


def parquet(content: bytes, chance: Random) -> bytes:
    """A table with a column lost, doubled, renamed, of another type, with nothing, or with numbers too large."""
    table = pq.read_table(pa.BufferReader(content))
    for _ in range(chance.choice((1, 1, 2))):
        at, rows = chance.randrange(table.num_columns), table.num_rows
        name, column = table.column_names[at], table.column(at)
        values: list[Any] = column.to_pylist()
        match chance.randrange(7):
            case 0:
                table = table.remove_column(at)
                continue
            case 1:
                table = table.append_column(chance.choice(table.column_names), column)
                continue
            case 2:
                names = [
                    chance.choice(("x", "layer", "step")) if other == name else other for other in table.column_names
                ]
                table = table.rename_columns(names)
                continue
            case 3:
                fill = chance.choice((None, "x", [1.0], [1] * 5000, 1.5, True, b"\xff\xfe", -3, {"a": 1}, "../outside"))
                values = [fill] * rows
            case 4:
                wild = chance.choice((2**62, -(2**62), -1, 0, float("nan"), float("inf"), 1e308, 2**53 + 2))
                values = [wild if chance.random() < 0.5 else value for value in values]
            case 5:
                values = [None if chance.random() < 0.5 else value for value in values]
            case _:
                values = [chance.choice(values) for _ in values]
        try:
            kind = column.type if chance.random() < 0.3 else None
            table = table.set_column(at, name, pa.array(values, kind))
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            table = table.remove_column(at)
    if chance.random() < 0.1:
        table = table.slice(0, 0)
    made = io.BytesIO()
    pq.write_table(table, made)
    return made.getvalue()


def text(content: bytes, chance: Random) -> bytes:
    """A log: a line without end, numbers without end, other encodings, lines out of order."""
    lines = content.splitlines()
    at = chance.randrange(len(lines)) if lines else 0
    match chance.randrange(6):
        case 0:
            lines[at:at] = [chance.choice((b"x" * 2_000_000, b"\xff\xfe", b"\0" * 100, b"\x1b[2J", b"iteration="))]
        case 1 if lines:
            wild = (b"9" * 5000, b"-1", b"nan", b"1e999", b"0x10", b"", "٣".encode(), b"../outside", b"<script>")
            words = lines[at].split(b"=")
            lines[at] = b"=".join([*words[:-1], chance.choice(wild)])
        case 2:
            chance.shuffle(lines)
        case 3:
            return content.decode(errors="replace").encode("utf-16")
        case _:
            return damaged(content, chance)
    return b"\n".join(lines) + b"\n"


_BY_SUFFIX = {
    ".json": json_text, ".jsonl": json_text, ".yaml": yaml_text, ".yml": yaml_text, ".safetensors": safetensors,
    ".pt": archive, ".parquet": parquet, ".log": text, ".txt": text, ".pkl": pickled,
}  # fmt: skip


def file(path: Path, chance: Random) -> None:
    """Damages one file as its format suggests, or its bytes."""
    content = path.read_bytes()
    change = events if path.name.startswith("events.out") else _BY_SUFFIX.get(path.suffix, damaged)
    if chance.random() < 0.15 or not content:
        change = damaged
    try:
        made = change(content, chance)
    except Exception:  # damaged before: its format can be anything
        made = damaged(content, chance)
    path.write_bytes(made)


def one_file(root: Path, chance: Random) -> None:
    """Damages the content of one file, for readers that take content."""
    file(chance.choice(sorted(root.iterdir())), chance)


def folder(root: Path, chance: Random) -> None:
    """Damages some files of a folder, or makes one a link, a folder, a FIFO, empty, or of another name."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    for _ in range(chance.choice((1, 1, 1, 2))):
        path = chance.choice(paths)
        if not path.is_file() or path.is_symlink():
            continue
        if chance.random() < 0.85:
            file(path, chance)
            continue
        kind = chance.randrange(7)
        if kind < 5:
            path.unlink()
        match kind:
            case 0:
                path.mkdir()
            case 1:
                os.mkfifo(path)
            case 2:
                path.symlink_to(chance.choice(("/dev/zero", "/proc/self/mem", path.name, "/etc", "../../../outside")))
            case 3:
                path.write_bytes(b"")
            case 5:
                path.rename(
                    path.with_name(chance.choice(("é\n", "step-9", "part-a-b.parquet", "-rf", "a b")) + path.suffix)
                )
            case 6:
                (path.parent / f"x{path.name}").write_bytes(path.read_bytes())
