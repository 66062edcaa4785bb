"""What a process of its own says of a library that it loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ottava.kernels import native_build, native_sums, native_trial


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", str(native_trial.__file__), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(os.name != "posix", reason="native kernels are built on Linux and macOS")
def test_a_library_is_loaded_and_then_handed_to_its_script(tmp_path: Path) -> None:
    """Without torch, and without anything else that takes long to import; what no loader takes is said."""
    library = native_build.load("native_sums", native_sums._declare).library
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
