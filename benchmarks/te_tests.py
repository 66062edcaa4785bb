"""TransformerEngine's own tests through our names, on a CPU: `python benchmarks/te_tests.py FOLDER [--sample 12]`.

FOLDER is a checkout of TransformerEngine; nothing of it is copied. `import transformer_engine` gives
ottava.compat.transformer_engine, and CUDA means the CPU (`ottava.compat.on_cpu`). Only their references in Python, to
which their tests compare, are theirs (`custom_recipes/reference_*.py` and `gemm.py`), on our base classes. Each file of
tests/pytorch is collected in a fork of this process, and each test runs in a fork of that one, with limits of time and
memory. `--sample` takes that many tests of each file: those with the smallest hash of seed and name, so the choice of
one does not depend on the others. A missing name can be imported and asked for attributes; calling it in a test fails
by name.

    passed, skipped   as their test says; their own conditions and expected failures skip
    ours              an error of ottava, a missing attribute, or other numbers than theirs
    internal          a name of TransformerEngine below its public interface, which ottava lacks
    refused           ottava says that it lacks this, and what to do
    cuda              the test tests a kernel of CUDA, or needs GPUs, processes, files or packages that are not here
    limit             too slow here, or too large

`--write` appends the table to benchmarks/results/te_tests.json, and refuses to if fewer tests pass than before.
`--only TEXT` runs the tests whose name contains the text, `--show CLASS` prints each test of a class.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results" / "te_tests.json"
CLASSES = ("passed", "skipped", "ours", "internal", "refused", "cuda", "limit")
_KERNELS = re.compile(
    r"transformer_engine_torch|cpp_extensions\.(?!general_gemm|general_grouped_gemm)|\btriton\.|userbuffers|\.ub\b|"
    r"\.ep\.|_swizzle|cublas|FusedAttnBackend|FlashAttentionUtils|cudnn|graph\.|newton_schulz|CusolverMp"
)
"""Names that are CUDA kernels, or settings of them: a test that calls one tests that kernel."""
_DEVICE = re.compile(
    r"CUDA|cuda:\d|cuda device|is_cuda|torch\.cuda|active drivers|NVIDIA|Triton|nvcc|cudnn|cuBLAS|more than one GPU|"
    r"torch.distributed.run|Could not find checkpoint|libcuda|"
    r"No module named '(triton|onnx\w*|nvshmem\w*|flash_attn\w*|cudnn|transformers)"
)
_REFUSAL = re.compile(r"is not in ottava|are not in ottava|ottava has no|ottava does not|ottava lacks")


_WITNESS = re.compile(
    r"transformer_engine\.(pytorch\.custom_recipes\.(reference_\w+|gemm)|debug\.features\._test_dummy_feature)"
)
"""Their own references in Python, and the feature of their debug tool that a test of theirs brings along."""


class InternalName(Exception):
    """A test uses a name that ottava lacks."""


class _Missing(type):
    """The metaclass of missing names."""

    touched: list[str] = []  # noqa: RUF012  # of this process: a fork runs one test
    collecting = True

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refused = cls.__dict__.get("refused")
        if refused is not None and (name == "is_supported" or not _Missing.collecting):
            return getattr(refused, name)
        return _missing(f"{cls.__name__}.{name}", refused)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        refused = cls.__dict__.get("refused")
        if _Missing.collecting:
            return _missing(f"{cls.__name__}()", refused)
        if refused is not None:
            return refused()
        _Missing.touched.append(cls.__name__)
        raise InternalName(cls.__name__)

    def __iter__(cls) -> Iterator[Any]:
        return iter((False, cls.__name__))  # as is_x_available(return_reason=True)

    def __getitem__(cls, key: Any) -> Any:
        return cls() if not _Missing.collecting else _missing(f"{cls.__name__}[{key}]", cls.__dict__.get("refused"))

    def __setitem__(cls, key: Any, value: Any) -> None:
        if not _Missing.collecting:
            cls()  # which refuses

    def __lt__(cls, other: object) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __instancecheck__(cls, instance: object) -> bool:
        return False


def _missing(name: str, refused: Any = None) -> Any:
    return _Missing(name, (), {"refused": refused})


def _stand_in(folder: Path) -> Any:
    """The finder of the command, but a missing name can be imported, and references lie in the folder."""
    from ottava.compat.transformer_engine.__main__ import StandIn
    from ottava.compat.transformer_engine.pytorch.refused import Absent

    class Lenient(StandIn):
        def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
            if _WITNESS.fullmatch(fullname):
                return spec_from_file_location(fullname, (folder / fullname.replace(".", "/")).with_suffix(".py"))
            try:
                return super().find_spec(fullname, path, target)
            except ModuleNotFoundError:
                return ModuleSpec(fullname, self, is_package=True)

        def create_module(self, spec: ModuleSpec) -> ModuleType:
            module = super().create_module(spec)
            real = None if spec.name.startswith("transformer_engine_") else vars(module).get("__getattr__")

            def find(name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                if _WITNESS.fullmatch(f"{spec.name}.{name}"):
                    return import_module(f"{spec.name}.{name}")
                where = f"{spec.name}.{name}".removeprefix("transformer_engine.pytorch.")
                with contextlib.suppress(AttributeError):
                    if real is not None:
                        value = real(name)
                        return _missing(where, value) if isinstance(value, Absent) else value
                return _missing(where)

            module.__getattr__ = find  # type: ignore[method-assign]
            return module

    return Lenient()


class Record(NamedTuple):
    """What one test did."""

    test: str
    result: str
    """One of CLASSES."""
    detail: str
    """The missing name, or the first line of the error."""


def classify(error: BaseException | None, text: str) -> tuple[str, str]:
    """The class and a line for a test that failed."""
    line = next((part for part in text.splitlines() if part.strip()), "").strip()[:300]
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    names = [str(one) for one in chain if isinstance(one, InternalName)] or _Missing.touched
    if names:
        return ("cuda" if _KERNELS.search(names[0]) else "internal"), names[0]
    for said in [str(one) for one in chain if not isinstance(one, AssertionError)] or [line]:
        if _REFUSAL.search(said):
            return "refused", said.splitlines()[0][:300]
    if any(isinstance(one, MemoryError) or "can't allocate memory" in str(one) for one in (*chain, text)):
        return "limit", "memory"
    if any(_DEVICE.search(said) for said in [str(one) for one in chain if "close" not in str(one)] or [line]):
        return "cuda", line
    return "ours", line


def _in_fork(work: Callable[[], Any], seconds: float, gigabytes: float) -> Any:
    """What the work returns in a fork of this process; None: it ran out of time, or died."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 2**30),) * 2)
        try:
            data = json.dumps(work()).encode()
        except BaseException as error:  # whatever it is, the parent must hear of it
            data = json.dumps([["?", *classify(error, f"{type(error).__name__}: {error}")]]).encode()
        os.write(write, len(data).to_bytes(8, "little"))
        with os.fdopen(write, "wb") as stream:
            stream.write(data)
        os._exit(0)
    os.close(write)
    data, end = b"", time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and select.select([read], [], [], left)[0]:
        if not (part := os.read(read, 1 << 16)):
            break
        data += part
    os.close(read)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the child's own session: nothing else is in it
    os.waitpid(child, 0)
    return json.loads(data[8:]) if len(data) > 8 and len(data) == 8 + int.from_bytes(data[:8], "little") else None


class _Plugin:
    """A pytest plugin: samples, runs each test in a fork, and keeps what it did."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.records, self.collected = options, [], 0
        self.records: list[Record] = []

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and report.fspath:
            text = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)
            last = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            text = (last or [text])[-1].removeprefix("E ")
            found = ("skipped", text) if "allow_module_level" in text else classify(None, text)
            self.records.append(Record(f"{report.nodeid}::", *found))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.collected = len(items)
        options = self.options
        chosen = [item for item in items if options.only in item.nodeid]
        if options.sample:
            chosen.sort(key=lambda item: hashlib.sha256(f"{options.seed}:{item.nodeid}".encode()).digest())
            chosen = chosen[: options.sample]
        items[:] = chosen
        _Missing.collecting = False

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        from _pytest.runner import runtestprotocol

        def run() -> list[Any]:
            errors.clear()
            reports = runtestprotocol(item, log=False, nextitem=None)
            worst = next((r for r in reports if r.failed), None) or next((r for r in reports if r.skipped), reports[0])
            if worst.failed:
                crash = getattr(worst.longrepr, "reprcrash", None)
                error = errors.get(worst.when)
                text = f"{type(error).__name__}: {error}" if error is not None else str(crash or worst.longrepr)
                return [*classify(error, text)]
            return ["skipped", str(worst.longrepr)[-200:]] if worst.skipped else ["passed", ""]

        errors = self.errors = {}
        options = self.options
        found = _in_fork(run, options.seconds, options.gigabytes)
        if found and isinstance(found[0], list):
            found = found[0][1:]
        self.records.append(Record(item.nodeid, *(found or ("limit", f"{options.seconds} s, or it died"))))
        return True

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is not None:
            self.errors[call.when] = call.excinfo.value


def run_file(folder: Path, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Collects and runs one file in this process."""
    import pytest

    from ottava.compat.on_cpu import on_cpu

    sys.meta_path.insert(0, _stand_in(folder))
    home = folder / "tests" / "pytorch"
    os.environ |= {"NVTE_TEST_CHECKPOINT_ARTIFACT_PATH": "/nonexistent", "TE_PATH": str(folder)}
    if path.name == "test_cpu_offloading_v1.py":  # as their qa/L0_pytorch_unittest/test.sh runs it
        os.environ |= {"NVTE_CPU_OFFLOAD_V1": "1", "NVTE_FLASH_ATTN": "0"}
    sys.path[:0] = [str(home)]
    plugin = _Plugin(options)
    arguments = [str(path), "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout", "-W", "ignore"]
    arguments += ["--rootdir", str(home), "-c", os.devnull]
    if "debug" in path.parts:
        arguments += [
            "--feature_dirs",
            f"{folder}/transformer_engine/debug/features",
            "--configs_dir",
            f"{home}/debug/test_configs/",
        ]
    os.chdir(tempfile.mkdtemp())  # their debug tests write logs where they are
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        stack.enter_context(on_cpu())
        pytest.main(arguments, plugins=[plugin])
    return {"collected": plugin.collected, "records": [list(record) for record in plugin.records]}


def run_all(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """File -> how many tests it has, and the records of those that ran."""
    home = folder / "tests" / "pytorch"
    files = [path for path in sorted(home.rglob("test_*.py")) if options.file in str(path.relative_to(home))]
    if not files:
        raise SystemExit(f"{home}: got no test_*.py; needed: a checkout of TransformerEngine")
    import torch

    from ottava.compat.transformer_engine import pytorch as te

    for name in te.__all__:
        getattr(te, name)  # imports its module once, for all forks
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for path in files:
        name, start = str(path.relative_to(home)), time.monotonic()
        result = _in_fork(lambda path=path: run_file(folder, path, options), 3600, 3 * options.gigabytes)
        if not isinstance(result, dict):
            detail = result[0][1:] if result else ["limit", "the file itself"]
            result = {"collected": 0, "records": [[name, *detail]]}
        found[name] = result
        counts = Counter(record[1] for record in result["records"])
        print(f"{name:55} of {result['collected']:6} {dict(counts)}  {time.monotonic() - start:.0f} s", flush=True)
    return found


def table(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The counts that are kept: by class, by file, and of missing names."""
    files = {}
    for name, result in found.items():
        counts = Counter(record[1] for record in result["records"])
        files[name] = {"collected": result["collected"]} | {key: counts[key] for key in CLASSES if counts[key]}
    total = Counter(record[1] for result in found.values() for record in result["records"])
    records = [record for result in found.values() for record in result["records"]]
    judged = total["passed"] + total["ours"] + total["internal"] + total["refused"]
    return {
        "collected": sum(result["collected"] for result in found.values()),
        "ran": len(records),
        **{key: total[key] for key in CLASSES},
        "share": round(total["passed"] / judged, 4) if judged else 0.0,
        "internal names": dict(Counter(record[2] for record in records if record[1] == "internal").most_common()),
        "refusals": dict(Counter(record[2] for record in records if record[1] == "refused").most_common(60)),
        "files": files,
    }


def write(entry: dict[str, Any], path: Path = RESULTS) -> None:
    """Appends a table.

    Raises:
        SystemExit: fewer tests pass than in the last table of the same sample.
    """
    entries = json.loads(path.read_text()) if path.exists() else []
    same = [one for one in entries if one["sample"] == entry["sample"] and one["theirs"] == entry["theirs"]]
    if same and (entry["passed"], entry["share"]) < (same[-1]["passed"], same[-1]["share"]):
        raise SystemExit(f"{entry['passed']} pass; the last table has {same[-1]['passed']}: not written")
    path.write_text(json.dumps([*entries, entry], indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Runs what is asked, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int, default=12, help="tests of each file; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of one test")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="limit of one test")
    parser.add_argument("--file", default="", help="only files whose path contains this")
    parser.add_argument("--only", default="", help="only tests whose name contains this")
    parser.add_argument("--show", action="append", default=[], choices=CLASSES)
    parser.add_argument("--records", type=Path, help="writes all records there, as JSON")
    parser.add_argument("--write", metavar="TITLE", help="appends the table to the results, under this title")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    found = run_all(folder, options)
    result = table(found)
    for record in (record for one in found.values() for record in one["records"] if record[1] in options.show):
        print(*record, sep="\n    ")
    if options.records:
        options.records.write_text(json.dumps(found, indent=1))
    print(json.dumps({key: value for key, value in result.items() if key not in ("files", "refusals")}, indent=1))
    if options.write:
        import torch

        version = (folder / "build_tools" / "VERSION.txt").read_text().strip()
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        entry = {"title": options.write, "date": datetime.date.today().isoformat(), "commit": commit.stdout.strip()}
        command = f"python benchmarks/te_tests.py FOLDER --sample {options.sample} --seed {options.seed}"
        entry |= {"command": command, "theirs": version, "torch": torch.__version__, "python": sys.version.split()[0]}
        write(entry | {"sample": [options.sample, options.seed]} | result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
