"""Libraries that a wheel carries, for machines without a compiler, and which of them this CPU may run.

`python -m ottava.kernels.native.wheel` writes them and `INDEX`, before a wheel is built. A library is taken only if the
index gives the hash of its bytes and that of today's C++ sources, its machine is this one, and the system names every
instruction set that it was compiled for. Then it goes through the same trial as a library that was compiled here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

FOLDER = Path(__file__).parent / "prebuilt"
INDEX = "index.json"
_V2 = ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


class CpuLevel(NamedTuple):
    """A set of instructions."""

    machine: str
    """As `platform.machine` names it."""
    flags: tuple[str, ...]
    """Of the compiler."""
    needs: tuple[str, ...]
    """The names of /proc/cpuinfo of all instructions that the compiler may use under these flags."""


LEVELS: Mapping[str, CpuLevel] = MappingProxyType(
    {
        "avx512bf16": CpuLevel("x86_64", ("-march=x86-64-v4", "-mavx512bf16"), (*_V4, "avx512_bf16")),
        "avx512": CpuLevel("x86_64", ("-march=x86-64-v4",), _V4),
        "avx2": CpuLevel("x86_64", ("-march=x86-64-v3",), _V3),
        "neon": CpuLevel("aarch64", ("-march=armv8-a",), ("fp", "asimd")),
    }
)
"""Name -> level, the best first."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A library of the index."""

    file: str
    """In the folder of the index."""
    name: str
    """Of its C++ file."""
    variant: str
    """The macro with which that was compiled; "": none."""
    level: str
    """One of `LEVELS`."""
    threads: bool
    """Whether it needs OpenMP's library."""
    sources: str
    """`digest` of what it was compiled from."""
    content: str
    """`digest` of its bytes."""


def digest(parts: Iterable[bytes]) -> str:
    """SHA-256 over the parts, each with its length."""
    found = hashlib.sha256()
    for part in parts:
        # lengths, so that bytes cannot move from one part to the next unseen
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def of_sources(source: Path) -> str:
    """`digest` of a C++ file and of all headers beside it."""
    return digest(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))


def features(cpu: str) -> frozenset[str]:
    """What a CPU can do, from the lines of /proc/cpuinfo; empty where there is no such file.

    Example:
        >>> sorted(features("model name : x\\nflags : fma avx2"))
        ['avx2', 'fma']
    """
    named = [line.partition(":") for line in cpu.splitlines()]
    return frozenset(word for key, _, words in named if key.strip() in ("flags", "Features") for word in words.split())


def candidates(
    folder: Path, source: Path, variant: str, machine: str, cpu: str
) -> tuple[tuple[Entry, Path], ...] | str:
    """The libraries of a C++ file that this CPU may run, the best first; or why there is none, "" for an
    installation without libraries."""
    try:
        entries = [Entry(**entry) for entry in json.loads((folder / INDEX).read_text("utf-8"))]
    except (OSError, ValueError, TypeError):  # no wheel with libraries, or a damaged one
        return ""
    # names first, sources last: the reason that a reader sees is the first that he can do something about
    can, today = features(cpu), of_sources(source)
    ours = [entry for entry in entries if (entry.name, entry.variant) == (source.stem, variant)]
    fit = [entry for entry in ours if entry.level in LEVELS and LEVELS[entry.level].machine == machine]
    fit = [entry for entry in fit if can.issuperset(LEVELS[entry.level].needs)]
    if not fit:
        known = ", ".join(dict.fromkeys(entry.level for entry in ours)) or "none of this kind"
        return f"this CPU runs none of the libraries that this installation carries ({known})"
    fit = [entry for entry in fit if entry.sources == today]
    if not fit:
        return "the libraries that this installation carries were compiled from other sources"
    order = list(LEVELS)
    fit.sort(key=lambda entry: (not entry.threads, order.index(entry.level)))  # threads count for more than a level
    return tuple((entry, folder / entry.file) for entry in fit)


def write_index(folder: Path, entries: Iterable[Entry]) -> None:
    """Writes `INDEX`."""
    (folder / INDEX).write_text(json.dumps([asdict(entry) for entry in entries], indent=1), "utf-8")
