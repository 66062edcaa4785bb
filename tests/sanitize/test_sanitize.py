"""`./x sanitize` finds what is planted in a copy of the kernels, and tells our reports from torch's."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import sanitize

PLANTED = {
    "address": (
        "smaller(COLUMNS, columns - c0), parts",
        "smaller(COLUMNS, columns - c0) + 1, parts",
        "heap-buffer-overflow",
    ),
    "undefined": ("int32_t(uint32_t(bits) << 16)", "int32_t(bits) << 16", "left shift of negative value"),
    "thread": ("parts.get() + band * columns + c0", "parts.get() + c0", "data race"),
}
"""Sanitizer -> a piece of sums.cpp, or of floats.h (a fault that it had), what takes its place, what a report says."""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_the_kernel_as_it_is_has_none(name: str, tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(sanitize.ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    kernel = source / "ottava" / "kernels" / "native" / "src" / ("floats.h" if name == "undefined" else "sums.cpp")
    before, after, said = PLANTED[name]
    text = kernel.read_text("utf-8")
    assert text.count(before) == 1
    tests = [f"{sanitize.KERNELS}/test_sums.py"]
    kernel.write_text(text.replace(before, after), "utf-8")
    planted = sanitize.sanitize(name, tests, 0, source)
    assert planted.libraries
    assert any(said in one for one in planted.ours), (planted.ours, planted.said)
    kernel.write_text(text, "utf-8")
    clean = sanitize.sanitize(name, tests, 0, source)
    assert (clean.libraries > 0, clean.ours.total(), clean.failed) == (True, 0, False), (clean.ours, clean.said)


OURS = (
    "  Write of size 4 at 0x7f01 by thread T2:\n    #0 add /src/ottava/kernels/native/src/sums.cpp:48 (sums.so+0x1)\n"
)
TORCHS = "  Previous write of size 1 at 0x7f01 by thread T10:\n    #0 copy <null> (libtorch_cpu.so+0x77cdffc)\n"
MADE = "  Thread T2 created by main thread at:\n    #1 GOMP_parallel /x/native/src/sums.cpp:61 (sums.so+0x19c9)\n"
BEGIN = "==================\nWARNING: ThreadSanitizer: data race (pid=8123)\n"


@pytest.mark.parametrize(
    "text, ours",
    [
        (BEGIN + OURS + "\n" + OURS.replace("T2", "T3") + "\n" + MADE, {"sums.cpp:48: data race N": 1}),
        (
            BEGIN + OURS + "\n  Previous write by thread T3:\n    [failed to restore the stack]\n",
            {"sums.cpp:48: data race N": 1},
        ),
        (BEGIN + OURS + "\n" + TORCHS + "\n" + MADE, {}),
        (BEGIN + TORCHS + "\n" + TORCHS + "\n" + MADE, {}),
        ("", {}),
    ],
    ids=[
        "between two threads of ours",
        "of a stack that is lost",
        "with a thread of torch",
        "inside torch",
        "of nothing",
    ],
)
def test_a_race_counts_unless_a_side_of_it_is_torchs(text: str, ours: dict[str, int]) -> None:
    found, others = sanitize.reports(text, sanitize.SANITIZERS["thread"].report)
    assert found == ours
    assert others.total() == text.count("WARNING") - len(ours)


def test_equal_reports_are_one_line() -> None:
    said = (
        "/a/native/src/encode.h:31:7: runtime error: signed integer overflow: 2147483647 + {} cannot be represented\n"
    )
    found, _ = sanitize.reports(said.format(1) + said.format(20000), sanitize.SANITIZERS["undefined"].report)
    assert sum(found.values()) == 2
    assert all(one.startswith("encode.h:31: signed integer overflow") for one in found)
