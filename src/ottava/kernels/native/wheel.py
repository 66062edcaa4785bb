"""Compiles every library for a wheel, for each level of instructions: `python -m ottava.kernels.native.wheel`.

The libraries lie in `prebuilt` beside this file, from where the next wheel takes them. A compiler for another machine
(`--compiler aarch64-linux-gnu-g++ --levels neon`) adds its libraries to those that are there. Each library is compiled
with OpenMP and without: a machine without a compiler may lack OpenMP's library, too.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ottava.kernels.native import build
from ottava.kernels.native.prebuilt import FOLDER, INDEX, LEVELS, Entry, digest, of_sources, write_index


def compile_all(folder: Path, compiler: Sequence[str], levels: Sequence[str], names: Sequence[str]) -> list[Entry]:
    """Compiles and notes the libraries of these C++ files.

    Raises:
        RuntimeError: a file does not compile.  ValueError: an unknown level.
    """
    if unknown := [level for level in levels if level not in LEVELS]:
        raise ValueError(f"wheel: unknown level {unknown[0]!r}; known: {', '.join(LEVELS)}")
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / INDEX
    kept = [Entry(**entry) for entry in json.loads(index.read_text("utf-8"))] if index.is_file() else []
    made = []
    for name in names:
        source = build.SOURCES / f"{name}.cpp"
        # one library a dtype where the file has them
        variants = build.VARIANTS.values() if "OTTAVA_TYPE" in source.read_text("utf-8") else ("",)
        for level in levels:
            for variant in variants:
                made += [_compile(folder, compiler, source, variant, level, threads) for threads in (True, False)]
    new = {(entry.name, entry.level) for entry in made}
    write_index(folder, [*(entry for entry in kept if (entry.name, entry.level) not in new), *made])
    return made


def _compile(folder: Path, compiler: Sequence[str], source: Path, variant: str, level: str, threads: bool) -> Entry:
    words = [source.stem, *filter(None, (variant.partition("=")[2],)), level, *([] if threads else ["one"])]
    path = folder / f"{'-'.join(words)}.so"
    flags = [*build.FLAGS, *LEVELS[level].flags, *(["-fopenmp"] if threads else []), "-s"]
    macro = [f"-D{variant}"] if variant else []
    command = [*compiler, *macro, *flags, f"-I{source.parent}", str(source), "-o", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {ran.stderr.strip()[:2000]}")
    return Entry(path.name, source.stem, variant, level, threads, of_sources(source), digest([path.read_bytes()]))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="g++", help="command of the compiler [g++]")
    parser.add_argument("--levels", nargs="+", default=["avx512bf16", "avx512", "avx2"], help=", ".join(LEVELS))
    parser.add_argument("--only", nargs="+", default=build.sources(), help="names of C++ files [all]")
    given = parser.parse_args(arguments)
    made = compile_all(FOLDER, shlex.split(given.compiler), given.levels, given.only)
    size = sum((FOLDER / entry.file).stat().st_size for entry in made)
    print(f"{len(made)} libraries, {size / 2**20:.1f} MiB, in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
