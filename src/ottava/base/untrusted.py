"""Reads files from outside: other people wrote them or changed them by hand, or a killed process left them.

Every such text goes through this module, so no file can hang a command, fill the memory or end in a traceback. The
module does not wait for a FIFO. It limits the size of a text and the depth and number of parts of a tree. A shared part
(an anchor in YAML) counts at each of its places, because code that walks the tree meets it there. `interop.safe_pickle`
has the same limits for pickles, and `interop.event_file` for event files.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

MAX_BYTES = 16 << 20
"""Bytes of a text. JSON of this size takes up to about 400 MB of memory."""
MAX_YAML_BYTES = 256 << 10
"""PyYAML reads about 100 kB a second."""
MAX_LINE = 1 << 20
"""Bytes of one line of a log."""
MAX_DEPTH = 64
"""Parts within parts."""
MAX_PARTS = 1_000_000
"""Values and keys of one tree."""
MAX_INTEGER = 1 << 64
"""Magnitude of a whole number: no field of ours has more bits, and larger ones do not fit into a float or a column."""
MAX_STEP = 1 << 53
"""Magnitude of a step number: beyond it a float cannot count any more."""
_MAX_SCALAR = 64 << 10
"""Characters of one YAML scalar: PyYAML's sexagesimal numbers (1:30:00) take time that grows with the square."""
_WORDS = MappingProxyType({"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"})
_KINDS = MappingProxyType(
    {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    | {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
)


class UntrustedError(ValueError):
    """A text from outside is unreadable. The message gives the fault; the caller adds the place."""

    exit_code = 4


class LimitError(UntrustedError):
    """The text may be whole, but exceeds a limit of this module."""


def regular_size(path: Path) -> int:
    """Size of a regular file in bytes.

    Raises:
        OSError: the file is missing, or its permissions hide it.
        UntrustedError: it is a folder, FIFO, socket or device: reading would fail, or wait forever.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise UntrustedError(f"is {kind}; needs a regular file")
    return status.st_size


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """A regular file, open for its bytes.

    Raises:
        OSError: it cannot be opened, or a read fails; the error names the file, as the system's of a read does not.
        UntrustedError: as in `regular_size`.
    """
    regular_size(path)
    try:
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise error if error.filename else OSError(error.errno, error.strerror, str(path)) from error


def file_digest(path: Path) -> str:
    """SHA-256 of a regular file, as 64 hexadecimal digits.

    Raises:
        OSError, UntrustedError: as in `opened`.
    """
    with opened(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_text(path: Path, *, most: int = MAX_BYTES) -> str:
    """A text file, UTF-8.

    Args:
        path: the file.
        most: the largest size in bytes.
    Raises:
        OSError: as in `opened`.
        UntrustedError: it is no regular file, too large, or not UTF-8.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.json")
        ...     _ = path.write_text("[1, 2]")
        ...     parse_json(read_text(path))
        [1, 2]
    """
    if (size := regular_size(path)) > most:
        raise LimitError(f"has {size:,} bytes; at most {most:,} are read")
    with opened(path) as stream:
        data = stream.read(most + 1)
    if len(data) > most:  # files of /proc have size 0
        raise LimitError(f"has more than the {most:,} bytes that are read")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UntrustedError(f"is not UTF-8 text ({error})") from error


def read_lines(path: Path, *, longest: int = MAX_LINE) -> Iterator[bytes]:
    """The lines of a file of any size, one at a time, without line ends. A line that is too long is "".

    Raises:
        OSError, UntrustedError: as in `opened`.
    """
    with opened(path) as stream:
        while line := stream.readline(longest + 1):
            whole = len(line) <= longest
            while len(line) > longest and not line.endswith(b"\n"):
                line = stream.readline(longest + 1)
                whole = False
            yield line.rstrip(b"\r\n") if whole else b""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. JSON has no NaN and no infinities; they become "nan", "inf" and "-inf".

    Raises:
        UntrustedError: the text is no JSON, or has a key twice in one object.
        LimitError: the value is too deep, or has too many parts or too large a whole number.

    Example:
        >>> parse_json("[" * 5000 + "]" * 5000)
        Traceback (most recent call last):
        ottava.base.untrusted.LimitError: is nested more than 64 deep
    """
    try:
        value = json.loads(text, parse_constant=_WORDS.__getitem__, object_pairs_hook=_object)
    except RecursionError as error:
        raise LimitError(f"is nested more than {MAX_DEPTH} deep") from error
    except UntrustedError:
        raise
    except ValueError as error:
        raise UntrustedError(f"is no JSON ({error})") from error
    check_tree(value, finite=True)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Python's reader silently takes the last of two equal keys; others take the first."""
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:i]))
        raise UntrustedError(f"has the key {twice!r} twice; remove one of them")
    return made


def is_plain(name: str) -> bool:
    """Whether a name that a file gives is that of an entry of a folder, and leads nowhere else."""
    return Path(name).name == name and name not in ("", "..") and "\0" not in name


def read_index(path: Path) -> dict[str, str]:
    """The weight_map of an index of Hugging Face's: tensor -> file of the index's folder.

    Raises:
        OSError: as in `opened`.  UntrustedError: it is no such index, or names a file elsewhere.
    """
    found = parse_json(read_text(path))
    mapped = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(mapped, dict) or not all(isinstance(name, str) for name in mapped.values()):
        raise UntrustedError("has no weight_map from tensors to files")
    if outside := [name for name in sorted(mapped.values()) if not is_plain(name)]:
        raise UntrustedError(f"names {outside[0]!r}, which is no file of this folder")
    return mapped


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, of plain types only; None for an empty one.

    Raises:
        UntrustedError: the text is no YAML, or has a key twice.  LimitError: as in `parse_json`; every use of an
            anchor counts.

    Example:
        >>> parse_yaml("a: &x [1, 2]\\nb: *x")
        {'a': [1, 2], 'b': [1, 2]}
    """
    if len(text) > MAX_YAML_BYTES:
        raise LimitError(f"has {len(text):,} characters; at most {MAX_YAML_BYTES:,} are read")
    try:
        value = yaml.load(text, Loader=_Loader)
    except UntrustedError:
        raise
    except Exception as error:  # a tag such as !!timestamp leads PyYAML into errors of any kind
        raise UntrustedError(f"is no YAML ({error})") from error
    check_tree(value)
    return value


class _Loader(yaml.SafeLoader):
    """Counts while it composes: a merge (<<) of merges would double in size with each line."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._parts = 0
        self._sizes: dict[str, int] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As PyYAML's, which silently takes the last of two equal keys."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise UntrustedError(
                    f"has the key {key.value!r} twice (line {key.start_mark.line + 1}); remove one of them"
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        self._depth += 1
        before = self._parts
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._sizes:
                raise LimitError(f"has an anchor &{event.anchor} that is not known, or stands within itself")
            self._parts += self._sizes[event.anchor]
        self._parts += 1
        if self._depth > MAX_DEPTH:
            raise LimitError(f"is nested more than {MAX_DEPTH} deep")
        if self._parts > MAX_PARTS:
            raise LimitError(f"has more than {MAX_PARTS:,} parts")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > _MAX_SCALAR:
            raise LimitError(f"has a value of {len(event.value):,} characters; at most {_MAX_SCALAR:,} are read")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.NodeEvent) and event.anchor and not isinstance(event, yaml.AliasEvent):
            self._sizes[event.anchor] = self._parts - before
        return node


def check_tree(value: Any, *, finite: bool = False) -> None:
    """Refuses a tree of plain values that is too deep, or has too many parts or an unwritable part.

    Args:
        value: the tree: dicts, lists, tuples, sets, and values of other types.
        finite: refuse infinities, too; JSON has none, but 1e999 becomes one.
    Raises:
        LimitError: the tree exceeds a limit; the message names it.

    Example:
        >>> check_tree({"step": 10**30})
        Traceback (most recent call last):
        ottava.base.untrusted.LimitError: has the whole number 1000000000000000000000000000000; at most 64 bits are read
    """
    waiting: list[tuple[Collection[Any], int]] = [([value], 0)]
    parts = 0
    while waiting:
        items, depth = waiting.pop()
        parts += len(items)
        if parts > MAX_PARTS:
            raise LimitError(f"has more than {MAX_PARTS:,} parts")
        if depth > MAX_DEPTH:
            raise LimitError(f"is nested more than {MAX_DEPTH} deep")
        for item in items:
            if isinstance(item, dict):
                waiting += [(item.keys(), depth + 1), (item.values(), depth + 1)]
            elif isinstance(item, list | tuple | set):
                waiting.append((item, depth + 1))
            elif isinstance(item, str):
                if not item.isascii() and any("\ud800" <= char <= "\udfff" for char in item):
                    raise LimitError("has half a surrogate pair, which is no character")
            elif isinstance(item, int):
                if abs(item) >= MAX_INTEGER:
                    shown = str(item) if item.bit_length() < 200 else f"of {item.bit_length():,} bits"
                    raise LimitError(f"has the whole number {shown}; at most 64 bits are read")
            elif finite and isinstance(item, float) and math.isinf(item):
                raise LimitError("has a number beyond 1.8e308")


def misfit(value: Any, shape: Any, where: str) -> str:
    """The first difference between a JSON value and a shape, in words; "" if there is none.

    Args:
        value: from JSON. None is a key that is missing.
        shape: a type (float: any number, also as the words "nan", "inf", "-inf"), a list of one shape, or a mapping
            from keys to shapes; "*" stands for all other keys, and "name!" for a name that must not be missing.
        where: the name of the value in the message.

    Example:
        >>> misfit({"layers": [{"shape": "64"}]}, {"layers": [{"shape": [int]}]}, "watch.json")
        "watch.json.layers[0].shape is '64'; needs a list"
    """
    if shape is float and (value in ("nan", "inf", "-inf") or (isinstance(value, int) and not isinstance(value, bool))):
        return ""
    kind = shape if isinstance(shape, type) else list if isinstance(shape, list) else dict
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        words = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}
        return f"{where} is {repr(value)[:60]}; needs {words[kind]}"
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(shape, list) and isinstance(value, list):
        parts = [(part, shape[0], f"{where}[{i}]") for i, part in enumerate(value)]
    elif isinstance(shape, Mapping) and isinstance(value, dict):
        for key, of in shape.items():
            name = key.removesuffix("!")
            if name != key and value.get(name) is None:
                return f"{where} has no {name!r}"
            names = [k for k in value if k == "*" or not {k, f"{k}!"} & shape.keys()] if key == "*" else [name]
            parts += [(value[k], of, f"{where}.{k}") for k in names if value.get(k) is not None]
    return next((difference for part in parts if (difference := misfit(*part))), "")
