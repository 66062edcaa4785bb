"""What a process of its own says of a library that it loads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from ottava.kernels.native import build as native_build
from ottava.kernels.native import trial as native_trial


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", str(native_trial.__file__), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(os.name != "posix", reason="native kernels are built on Linux and macOS")
def test_a_library_is_loaded_and_then_handed_to_its_script(tmp_path: Path) -> None:
    """Without torch, and without anything else that takes long to import; what no loader takes is said."""
    library = native_build.load("sums").library
    if library is None:
        pytest.skip("no library here")
    ran = run(library._name)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("ok\n", "", 0)
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:], 'torch' in sys.modules, __name__)")
    assert run(library._name, script).stdout == f"{[library._name]} False __main__\n"
    ran = run(script)
    assert ran.returncode == native_trial.NOT_LOADED == native_build._NOT_LOADED
    assert "script.py: " in ran.stdout


STARTS = """
import sys; sys.path.insert(0, sys.argv[3]); import build as b
from pathlib import Path
built = b.build("tiny", b.BuildSettings(compiler=sys.argv[4], cache=Path(sys.argv[1]), sources=Path(sys.argv[2])))
print(built.reason or built.library.answer())
"""


@pytest.mark.skipif(os.name != "posix", reason="native kernels are built on Linux and macOS")
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_what_a_compiler_cuts_off_is_never_published(tmp_path: Path) -> None:
    """It writes a part of the library, or the whole length without the end, or one that ends whoever loads it, and
    exits 0: each start says what is wrong and lives, nothing of it is kept, and the first whole library is used."""
    sources, cache = tmp_path / "sources", tmp_path / "cache"
    sources.mkdir()
    filler = "__attribute__((used)) volatile char room[1 << 18] = {1};\n"  # more than a page beyond the code
    (sources / "tiny.cpp").write_text(filler + 'extern "C" int answer() { return 42; }\n')
    compiler, rest = tmp_path / "cxx", 'for last; do :; done; size=$(wc -c < "$last")'
    real = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    answers = {
        'head -c $((size / 20)) "$last" > "$last.cut"': "bytes of",
        'head -c $((size - 40)) "$last" > "$last.cut"': "bytes of",
        '(head -c $((size - 3000)) "$last"; head -c 3000 /dev/zero) > "$last.cut"': "empty",
        'printf nothing > "$last.cut"': "cannot be loaded",
        f'echo "int a = (__builtin_trap(), 1);" | {real} -x c++ -shared -fPIC - -o "$last.cut"': "SIG(ILL|TRAP)",
        'cp "$last" "$last.cut"': "^42$",
    }
    words = ["-c", STARTS, str(cache), str(sources), str(Path(native_build.__file__).parent), str(compiler)]
    for spoil, said in answers.items():
        compiler.write_text(f'#!/bin/sh\n{real} "$@" || exit 1\n[ "$1" = --version ] && exit 0\n{rest}\n')
        with compiler.open("a") as script:
            script.write(f'{spoil}\nmv "$last.cut" "$last"\n')
        compiler.chmod(0o755)
        for _ in range(2):
            ran = warm.run(words)
            assert ran.returncode == 0, (spoil, ran)
            assert re.search(said, ran.stdout.strip()), (spoil, ran)
        if "trap" in spoil:
            (note,) = cache.iterdir()  # it is the library's own fault, and would be again
            note.unlink()
        assert len(list(cache.iterdir())) == ("cp" in spoil)
