"""The launcher `x`, really run: a venv, pip and a tiny project whose torch is a wheel of a few hundred bytes, offline.

The stand-in torch lets the whole path run in seconds: what is tested is the set-up, not torch. The real one is set up
whenever CI starts from a clean clone.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
X = ROOT / "x"
TORCH = "__version__ = '{version}'\nclass version:\n    cuda = {cuda}\n"
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "ottava"
version = "0"
dependencies = ["torch>=2.11,<3", "small"]
[project.optional-dependencies]
test = ["pytest"]
"""
BACKEND = """
import shutil
def build_editable(folder, config_settings=None, metadata_directory=None):
    return shutil.copy("ottava-0-py3-none-any.whl", folder).rsplit("/", 1)[-1]
"""
ECHO = "import sys\ndef main():\n    print('ran', *sys.argv[1:])\n    sys.exit(7)\n"


def write_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], needs: Sequence[str] = (), script: str = ""
) -> None:
    """A wheel of plain text files."""
    info = f"{name}-{version}.dist-info"
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {need}" for need in needs),
    ]
    files = files | {f"{info}/METADATA": "\n".join(metadata) + "\n"}
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if script:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{name} = {script}\n"
    digests = {path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()) for path, text in files.items()}
    record = [f"{path},sha256={digest.rstrip(b'=').decode()},{len(files[path])}" for path, digest in digests.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


class Clone:
    """A small project with the launcher in it, and the only wheels that pip can see."""

    def __init__(self, root: Path, torch: str | None = "2.13.0+cpu", torch_needs: Sequence[str] = ()) -> None:
        self.root, self.wheels = root / "clone", root / "wheels"
        self.root.mkdir()
        self.wheels.mkdir()
        shutil.copy(X, self.root)
        (self.root / "pyproject.toml").write_text(PYPROJECT)
        (self.root / "backend.py").write_text(BACKEND)
        write_wheel(self.root, "ottava", "0", {"echo.py": ECHO}, script="echo:main")
        write_wheel(self.wheels, "small", "1", {"small.py": ""})
        write_wheel(
            self.wheels,
            "pytest",
            "1",
            {"pytest/__init__.py": "", "pytest/__main__.py": "import sys; print(*sys.argv[1:])"},
        )
        if torch:
            write_wheel(
                self.wheels, "torch", torch, {"torch/__init__.py": TORCH.format(version=torch, cuda=None)}, torch_needs
            )

    def environment(self, **more: str) -> dict[str, str]:
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "OTTAVA_", "PYTHON"))}
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        return mine | pip | {"OTTAVA_TORCH": "cpu"} | more  # "cpu": the same on a machine with a GPU

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.root / "x"), *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=self.environment(**environment))

    def run(self, *words: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*words, **environment)
        out, err = process.communicate(timeout=800)
        return process.returncode, out, err


def load_x() -> ModuleType:
    """The launcher as a module."""
    loader = importlib.machinery.SourceFileLoader("x", str(X))
    spec = importlib.util.spec_from_loader("x", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = writes
    return module


@pytest.fixture(scope="module")
def _bare_base() -> None:
    """./x takes the torch of the base interpreter where there is one, and then installs none."""
    if found := load_x().base_torch(None):
        pytest.skip(f"the base interpreter has torch {found}")


@pytest.mark.usefixtures("_bare_base")
def test_first_call_sets_up_and_later_calls_start_at_once(tmp_path: Path) -> None:
    """One line a phase, arguments and exit code are the command's own, extras come when they are asked for."""
    clone = Clone(tmp_path)
    code, out, err = clone.run("demo", "--json")
    assert (code, out) == (7, "ran demo --json\n"), err
    phases = re.findall(r"^x: (\w+).* \d+ s$", err, flags=re.MULTILINE)
    assert phases == ["making", "asking", "installing", "importing", "installing", "installing"]
    assert "x: this is torch 2.13.0+cpu (CPU)" in err
    assert clone.run("train", "a b") == (7, "ran train a b\n", "")  # not one word on stderr: nothing was set up

    offline = {"PIP_FIND_LINKS": str(tmp_path)}
    code, out, err = clone.run("test", **offline)
    assert (code, out) == (1, "")
    assert "No matching distribution found for pytest" in err
    assert clone.run("demo", **offline) == (7, "ran demo\n", "")  # an extra that failed spoils nothing

    code, out, err = clone.run("test", "-k", "scale")
    assert (code, out) == (0, "-k scale\n")
    assert re.fullmatch(r"x: installing what test needs \.\.\. \d+ s\n", err)

    pyproject = clone.root / "pyproject.toml"
    pyproject.write_text(pyproject.read_text() + "[tool.ruff]\nline-length = 120\n")
    assert clone.run("demo")[2] == ""  # a tool's setting changes no installation
    pyproject.write_text(pyproject.read_text().replace('"small"]', '"small>=1"]'))
    # A dependency does. A torch that the interpreter has by now is not installed again, also not a pre-release that pip
    # would find too old.
    have = tmp_path / "have" / "torch"
    have.mkdir(parents=True)
    (have / "__init__.py").write_text(TORCH.format(version="2.11.0a0+nv26.1", cuda="'13.1'"))
    code, out, err = clone.run("demo", PYTHONPATH=str(have.parent))
    assert (code, out) == (7, "ran demo\n"), err
    assert "making .venv" in err
    assert "torch 2.11.0a0+nv26.1 (CUDA 13.1)" in err
    assert "include-system-site-packages = true" in (clone.root / ".venv" / "pyvenv.cfg").read_text()
    assert not list((clone.root / ".venv").rglob("torch/__init__.py"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the plain wheels of torch are CPU wheels")
@pytest.mark.usefixtures("_bare_base")
def test_refuses_to_pull_cuda_onto_a_machine_without_a_gpu(tmp_path: Path) -> None:
    """pip would resolve to a torch with CUDA packages: two lines say so and how to go on; on request it is taken."""
    clone = Clone(tmp_path, "2.13.0", ["filelock", "nvidia-cudnn-cu13==9; platform_system == 'Linux'"])
    code, _, err = clone.run("demo")
    assert code == 3
    assert "1 CUDA packages" in err
    assert "OTTAVA_TORCH_INDEX=" in err
    assert "OTTAVA_TORCH=cuda" in err
    assert not list((clone.root / ".venv").rglob("torch/__init__.py"))
    for need in ("filelock", "nvidia_cudnn_cu13"):
        write_wheel(clone.wheels, need, "9", {f"{need}.py": ""})
    assert clone.run("demo", OTTAVA_TORCH="cuda")[0] == 7
    assert clone.run("demo", OTTAVA_TORCH="tpu")[0] == 7  # .venv stands: the choice is not asked again
    shutil.rmtree(clone.root / ".venv")
    code, _, err = clone.run("demo", OTTAVA_TORCH="tpu")
    assert (code, "'tpu'" in err) == (2, True)


@pytest.mark.skipif(os.name == "nt", reason="signals and shared locks are POSIX")
def test_killed_set_up_is_not_trusted_and_two_at_once_take_turns(tmp_path: Path) -> None:
    """After kill -9 in the middle the next calls start over, and only one of them does the work."""
    clone = Clone(tmp_path)
    killed = clone.start("demo")
    python = clone.root / ".venv" / "bin" / "python"
    deadline = time.monotonic() + 300
    while not python.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert python.exists()
    stamp = clone.root / ".venv" / "x.json"
    assert stamp.read_text() == ""
    import fcntl

    with stamp.open("ab") as lock, pytest.raises(BlockingIOError):  # the orphan still writes, and holds the lock
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    pair = [clone.start("demo"), clone.start("demo")]
    said = [process.communicate(timeout=800)[1] for process in pair]
    assert [process.returncode for process in pair] == [7, 7], said
    assert sorted("making .venv" in text for text in said) == [False, True]
    assert any("waiting for it" in text for text in said)


def test_another_torch_has_an_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test --with` takes what there is of that release, and says how big it is; .venv stays as it is.

    A CPU build that was asked for is still not replaced, and a torch of that release in the interpreter is used.
    """
    clone = Clone(tmp_path, torch=None)
    torch = {"torch/__init__.py": TORCH.format(version="2.11.0+cu130", cuda="'13.0'")}
    write_wheel(clone.wheels, "torch", "2.11.0", torch, ["nvidia-cudnn-cu13==9; platform_system == 'Linux'"])
    write_wheel(clone.wheels, "nvidia_cudnn_cu13", "9", {"cudnn.py": ""})
    words = ("test", "--with", "torch==2.11.0")
    if sys.platform == "linux":
        assert clone.run(*words)[0] == 3
    code, out, err = clone.run(*words, "-k", "scale", OTTAVA_TORCH="")
    assert (code, out) == (0, "-k scale\n"), err
    assert "making .venv-torch-2.11.0 with" in err
    assert "torch 2.11.0+cu130 (CUDA 13.0)" in err
    assert sys.platform != "linux" or "installing torch==2.11.0 with CUDA, several GB" in err
    code, out, err = clone.run(*words)
    assert (code, out[:3], err) == (0, "-n ", "")  # nothing to set up
    assert not (clone.root / ".venv").exists()

    x, have = load_x(), tmp_path / "have" / "torch"
    have.mkdir(parents=True)
    (have / "__init__.py").write_text(TORCH.format(version="2.12.0+cu130", cuda="'13.0'"))
    monkeypatch.setenv("PYTHONPATH", str(have.parent))
    asked_for = (None, "torch==2.12.0", "torch==2.12.1", "torch==2.11.0")
    assert [x.base_torch(torch) is not None for torch in asked_for] == [True, True, False, False]


@pytest.mark.parametrize("wrong", [(), ("torch",), ("torch>=2.11",), ("torch==2.10.0",), ("numpy==2.11.0",)])
def test_another_torch_is_one_release(wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is made."""
    with pytest.raises(SystemExit) as stopped:
        load_x().main("test", "--with", *wrong)
    assert stopped.value.code == 2
    assert "it takes one release of torch, 2.11 or newer: torch==2.11.0" in capsys.readouterr().err


@pytest.mark.usefixtures("_bare_base")
def test_failures_are_shown(tmp_path: Path) -> None:
    """pip's own words reach the reader, and what is not ours is not deleted."""
    clone = Clone(tmp_path, torch=None)
    code, _, err = clone.run("demo")
    assert code == 1
    assert "No matching distribution found for torch==2.13.0" in err
    shutil.rmtree(clone.root / ".venv")
    (clone.root / ".venv").mkdir()
    (clone.root / ".venv" / "precious").touch()
    code, _, err = clone.run("demo")
    assert (code, "was not made by ./x" in err) == (1, True)
    assert (clone.root / ".venv" / "precious").exists()


def test_old_python_gets_one_line() -> None:
    """The file parses on Python 3.6, and turns every Python below 3.11 away in one line."""
    source = X.read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 6))
    pretend = "import sys; sys.version_info = (3, 8, 10, 'final', 0); sys.version = '3.8.10 (x)'; "
    run = subprocess.run(
        [sys.executable, "-c", f"{pretend} exec(compile(open({str(X)!r}).read(), 'x', 'exec'))"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert re.fullmatch(r"x: ottava needs Python 3\.11 or newer; this is 3\.8\.10 \(.+\)\n", run.stderr)


def test_needs_the_standard_library_only() -> None:
    """It runs where nothing is installed."""
    nodes = list(ast.walk(ast.parse(X.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_agrees_with_pyproject() -> None:
    """Its Python and its torch are those of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    x = load_x()
    minimum = ".".join(map(str, x.TORCH_MINIMUM))
    assert f"torch>={minimum},<3" in project["dependencies"]
    assert tuple(map(int, x.TORCH_CPU.partition("==")[2].split(".")))[:2] >= x.TORCH_MINIMUM
    assert project["requires-python"] == ">=3.11"
    assert set(project["optional-dependencies"]) >= {"test", "mutate", "lint"}


def test_words_choose_the_tests() -> None:
    """Nothing: all but the dear ones; --all: all; both share the cores. Anything else is pytest's own."""
    chosen = load_x().pytest_arguments
    fast, everything = chosen(()), chosen(("--all", "-x"))
    assert fast[:1] == everything[:1] == ("-n",)
    assert fast[-2:] == ("--under", "1.2")
    assert everything == (*fast[:-2], "-x")
    assert chosen(("tests/base/test_files.py", "--all")) == ("tests/base/test_files.py", "--all")


def test_help_needs_no_set_up() -> None:
    """`./x help` prints the words it knows, at once."""
    run = subprocess.run([sys.executable, str(X), "help"], capture_output=True, text=True)
    assert run.returncode == 0
    words = ("demo", "test", "mutate", "fuzz", "torture", "sanitize", "soak", "lint", "help")
    assert all(f"./x {word}" in run.stdout for word in words)


def test_cuda_requirements_of_a_report() -> None:
    """torch's CPU wheel needs no CUDA package, its plain Linux wheel many (needs as in torch 2.13.0's metadata)."""
    needs = [
        "filelock",
        "sympy>=1.13.3",
        'cuda-toolkit[cublas]==13.0.3; platform_system == "Linux"',
        "nvidia-nccl-cu13==2",
    ]
    report = {"install": [{"metadata": {"name": "torch", "requires_dist": needs}}]}
    assert load_x().cuda_requirements(report) == needs[2:]
    assert load_x().cuda_requirements({"install": [{"metadata": {"name": "torch", "requires_dist": needs[:2]}}]}) == []
