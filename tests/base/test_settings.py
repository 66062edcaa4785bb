"""Settings come from outside: each problem is a line that names its key, and no file is too strange to be refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ottava.base.settings import ConfigError, Count, Positive, Section, apply_override, read_yaml


class Inner(Section):
    width: Positive = 1


class Outer(Section):
    steps: Count = 0
    inner: Inner = Inner()
    maybe: Inner | None = None


def test_all_problems_are_listed_with_their_full_paths() -> None:
    """In a section, in one that may be missing, and beside them; from a constructor as from a mapping."""
    wrong = {"steps": "x" * 10_000, "stpes": 1, "inner": {"widht": 2}, "maybe": {"widht": 2, "width": 0}, "self": 1}
    with pytest.raises(ConfigError) as caught:
        Outer(**wrong)
    lines = str(caught.value).splitlines()
    assert [line.partition(";")[0][:40] for line in lines] == [
        "steps: got 'xxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "unknown setting 'inner.widht'",
        "maybe.width: got 0",
        "unknown setting 'maybe.widht'",
        "unknown setting 'stpes'",
        "unknown setting 'self'",
    ]
    assert max(map(len, lines)) < 500
    assert "did you mean 'maybe.width'?" in lines[3]
    with pytest.raises(ConfigError, match=r"a\.yaml: steps: got 'x'"):
        Outer.checked({"steps": "x"}, Path("a.yaml"))


def test_many_problems_are_a_short_message() -> None:
    """The known names stand once for each section, and the rest is counted."""
    with pytest.raises(ConfigError) as caught:
        Outer.checked({f"a{i}": i for i in range(1000)} | {"inner": {"a": 1}})
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "and 981 more problems"
    assert sum("known: steps, inner, maybe" in line for line in lines) == 1
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "text, said",
    [
        ("steps: " + "[" * 5000, "is nested more than"),
        ("a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 31)), "parts"),
        ("a: !!python/object/apply:os.system [ls]", "is no YAML"),
        ("a: '" + "x" * 300_000 + "'", "bytes; at most 262,144 are read"),
        ("- 1", "got a YAML list; needed: a mapping"),
        ("5: 1", "unknown setting '5'"),
    ],
)
def test_a_hostile_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    """With its name, and as an override with its key."""
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        Outer.checked(read_yaml(file), file)
    assert str(caught.value).startswith(f"{file}: ")
    assert len(str(caught.value)) < 1000


def test_an_override_that_cannot_be_read_names_its_key() -> None:
    for value in ("[" * 5000, "{a: [1", "x" * 300_000):
        with pytest.raises(ConfigError, match=r"^inner: the value '.* (is|has) ") as caught:
            apply_override({}, f"inner={value}")
        assert len(str(caught.value)) < 1000


def test_what_is_no_file_is_refused_and_an_empty_one_is_a_mapping(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("pipe", "is a FIFO"), (".", "is a folder"), ("none", "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            read_yaml(tmp_path / name)
    (tmp_path / "empty").write_text("# nothing\n")
    assert Outer.checked(read_yaml(tmp_path / "empty")) == Outer()
