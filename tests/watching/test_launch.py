"""A script runs as Python would run it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import warm
from ottava.watching.launch import LaunchError, check_script, run_script

LAUNCH = """
import sys
from ottava.watching.launch import own_traceback, run_script
try:
    run_script(sys.argv[1:])
except Exception as error:
    sys.excepthook(type(error), error.with_traceback(own_traceback(error)), None)
    sys.exit(1)
"""

SHOW = """
'''its docstring'''
import atexit, inspect, pickle, sys
import beside
class Own: pass
def function(): pass
print(sys.argv, __name__, __doc__, __file__, __package__, __spec__ and __spec__.name, sys.path[0], beside.x)
print(sorted(name for name in vars() if name != "__annotations__"))
assert sys.modules["__main__"].Own is Own
assert type(pickle.loads(pickle.dumps(Own()))) is Own
assert inspect.getsource(function).startswith("def function")
atexit.register(lambda: print("at exit", Own.__name__, sys.modules["__main__"].__name__))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "package" / "inner").mkdir(parents=True)
    for name, text in {
        "launch.py": LAUNCH,
        "scripts/show.py": SHOW,
        "scripts/beside.py": "x = 'scripts'",
        "beside.py": "x = 'here'",
        "scripts/fails.py": "def f():\n    raise RuntimeError('boom')\nf()",
        "scripts/syntax.py": "x = = 1",
        "scripts/missing.py": "import no_such_module",
        "package/__init__.py": "",
        "package/inner/__init__.py": "",
        "package/inner/__main__.py": SHOW,
        "package/tool.py": SHOW,
        "package/broken.py": "import no_such_module",
    }.items():
        (tmp_path / name).write_text(textwrap.dedent(text).lstrip())
    return tmp_path


def both(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """As Python runs it, and as it is launched."""
    python = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=600)
    return python, warm.run(["launch.py", *words], cwd=folder)


CASES = [
    ("scripts/show.py", "--lr", "1e-3", "--", "-m", "x"),
    ("./scripts/../scripts/show.py",),
    ("-m", "package.tool", "--flag"),
    ("-m", "package.inner", "a b"),
    ("scripts/fails.py",),
    ("scripts/syntax.py",),
    ("scripts/missing.py",),
]


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_it_cannot_tell_the_difference(folder: Path, words: tuple[str, ...]) -> None:
    python, launched = both(folder, *words)
    assert launched.stdout == python.stdout
    assert launched.stderr == python.stderr
    assert launched.returncode == python.returncode
    assert launched.stdout or launched.returncode


def test_folders_and_archives_with_a_main_run_too(folder: Path) -> None:
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text("import sys, inside\nprint(sys.argv, __name__, inside.x)")
    (folder / "app" / "inside.py").write_text("x = 1")
    with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
        for name in ("__main__.py", "inside.py"):
            archive.write(folder / "app" / name, name)
    for words in (("app", "x"), ("app.pyz", "x")):
        python, launched = both(folder, *words)
        assert (launched.stdout, launched.returncode) == (python.stdout, 0)
        assert "__main__ 1" in launched.stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "got no script"),
        (["-m"], "got no script"),
        (["-c", "print(1)"], "'-c' is an option of Python"),
        (["no/such.py"], "there is no file 'no/such.py'"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(words: list[str], why: str) -> None:
    with pytest.raises(LaunchError, match=why) as caught:
        check_script(words)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.tool", "xml.nope", "xml"])
def test_modules_that_are_not_there_or_cannot_run_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(LaunchError, match="there is no module"):
        run_script(["-m", name])


def test_a_package_that_fails_to_import_says_so_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "half_there").mkdir()
    (folder / "half_there" / "__init__.py").write_text("import no_such_module")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.chdir(folder)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        run_script(["-m", "half_there.tool"])
