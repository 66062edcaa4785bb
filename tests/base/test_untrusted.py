"""What comes from outside is read within limits: no hang, no traceback, a sentence."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ottava.base.untrusted import (
    MAX_PARTS,
    MAX_YAML_BYTES,
    LimitError,
    UntrustedError,
    check_tree,
    file_digest,
    misfit,
    parse_json,
    parse_yaml,
    read_lines,
    read_text,
    regular_size,
)
from ottava.interop.contents import read_entries
from ottava.interop.event_file import read_scalars
from ottava.record.schema import Part

DOUBLING = "\n".join(["a0: &a0 {x: 1, y: 2}", *(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 29))])
MERGING = "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 29))])


def test_only_regular_files_of_a_size_are_read(tmp_path: Path) -> None:
    """A FIFO is not waited for, a device has no end, a sparse file has what it claims."""
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(1 << 40)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    began = time.process_time()
    for path, says in (
        (tmp_path / "fifo", "is a FIFO; needs a regular file"),
        (tmp_path, "is a folder"),
        (Path("/dev/zero"), "is a device"),
        (tmp_path / "large", "1,099,511,627,776 bytes; at most"),
        (tmp_path / "binary", "is not UTF-8"),
    ):
        with pytest.raises(UntrustedError, match=says):
            read_text(path)
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(UntrustedError):
            list(read_lines(path))
    with pytest.raises(FileNotFoundError):
        regular_size(tmp_path / "nowhere")
    assert time.process_time() - began < 5


def test_a_line_that_is_too_long_is_empty_and_the_others_stay(tmp_path: Path) -> None:
    """Also where the file ends without an end of line."""
    path = tmp_path / "log"
    path.write_bytes(b"one\n" + b"x" * 1000 + b"\r\ntwo\n12345678\n" + b"y" * 50)
    assert list(read_lines(path, longest=9)) == [b"one", b"", b"two", b"12345678", b""]


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "nested more than 64"),
        ("[" * 65 + "]" * 65, "nested more than 64"),
        ("[" + "1," * MAX_PARTS + "1]", "more than 1,000,000 parts"),
        ('{"step": 1' + "0" * 30 + "}", "whole number 1000000000000000000000000000000;"),
        ("9" * 4000, "of 13,288 bits"),
        ("9" * 5000, "is no JSON"),
        ("[1e999]", "beyond 1.8e308"),
        ('"\\ud800"', "surrogate"),
    ],
)
def test_json_beyond_a_limit_is_refused(text: str, says: str) -> None:
    with pytest.raises(UntrustedError, match=says):
        parse_json(text)


def test_json_within_the_limits_is_itself() -> None:
    """Numbers that JSON has no word for are words."""
    assert parse_json(b'{"a": [NaN, -Infinity, 1.5, null, true, "\xc3\xa9"]}') == {
        "a": ["nan", "-inf", 1.5, None, True, "é"]
    }
    deepest = "[" * 64 + "]" * 64
    assert str(parse_json(deepest)) == deepest


@pytest.mark.parametrize(
    "text, says",
    [
        ("a: [", "is no YAML"),
        ("[" * 5000, "nested more than 64"),
        ("- " * 5000 + "x", "nested more than 64"),
        (DOUBLING, "more than 1,000,000 parts"),
        (MERGING, "more than 1,000,000 parts"),
        ("&a [*a]", "stands within itself"),
        ("*b", "not known"),
        ("a: 1" + ":1" * 40_000, "value of 80,001 characters"),
        ("a: " + "x" * MAX_YAML_BYTES, "at most 262,144"),
        ("a: 1" + "0" * 30, "64 bits"),
        ("!!timestamp soon", "is no YAML"),
        ("!!python/object/apply:os.system [x]", "is no YAML"),
        ("{[1]: 2}", "is no YAML"),
        ("a: 9999-99-99", "is no YAML"),
    ],
)
def test_yaml_beyond_a_limit_is_refused_at_once(text: str, says: str) -> None:
    began = time.process_time()
    with pytest.raises(UntrustedError, match=says):
        parse_yaml(text)
    assert time.process_time() - began < 5


def test_yaml_within_the_limits_is_itself() -> None:
    """Anchors and merges too."""
    assert parse_yaml("") is None
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: [*a, .inf]}") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": [{"x": 1}, float("inf")]},
    }


def test_a_tree_that_holds_itself_has_no_end() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(LimitError, match="nested"):
        check_tree(tree)


@pytest.mark.parametrize(
    "value, shape, says",
    [
        ({"a": 1, "b": None}, {"a": int, "b": [str]}, ""),
        ({"a": True}, {"a": int}, "f.a is True; needs a whole number"),
        ({"a": "inf", "b": 3, "c": 0.5}, {"*": float}, ""),
        ({"a": "much"}, {"*": float}, "f.a is 'much'; needs a number"),
        ({"a": [1, "x"]}, {"a": [int]}, "f.a[1] is 'x'; needs a whole number"),
        ([1], {"a": int}, "f is [1]; needs an object"),
        ({"other": object()}, {"a": int}, ""),
        ({"a": [None]}, {"a": [dict]}, "f.a[0] is None; needs an object"),
        ({"a": {"n": None}}, {"a": {"n!": str}}, "f.a has no 'n'"),
        ({"n": 1, "m": 2}, {"n!": str, "*": int}, "f.n is 1; needs a text"),
        ({"*": "x", "m": 2}, {"*": int}, "f.* is 'x'; needs a whole number"),
        ({"n": "x", "m": "2"}, {"n!": str, "*": int}, "f.m is '2'; needs a whole number"),
    ],
)
def test_a_misfit_is_named_by_its_place(value: object, shape: object, says: str) -> None:
    assert misfit(value, shape, "f") == says


@pytest.mark.skipif(sys.platform != "linux", reason="a file that opens and cannot be read")
def test_a_disk_that_fails_while_it_is_read_is_a_sentence(tmp_path: Path) -> None:
    """The system's error of a read names no file."""
    (tmp_path / "a.json").symlink_to("/proc/self/mem")
    readers: list[Callable[[Path], object]] = [read_text, lambda path: list(read_lines(path)), file_digest]
    readers += [lambda path: list(read_scalars(path)), Part, lambda path: list(read_entries(path))]
    for read in readers:
        with pytest.raises((OSError, ValueError), match=r"a\.json.*Input/output error|Input/output error.*a\.json"):
            read(tmp_path / "a.json")
