"""What tests of every room share: a fixture for each thing that is registered, and matrices in every layout.

A test that takes `fmt`, `recipe`, `granularity`, `scale_format`, `dtype` or `matrix` runs once for each of them, so a
new entry is tested the day it is added. Under `@sweep` it does so in one loop; `sweep.AXES` lists the values of both.
"""

from __future__ import annotations

import sys

import triton_mode  # noqa: F401  # isort: skip

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import warm
from layout_samples import LAYOUTS
from ottava.kernels import scaled_mm
from ottava.numerics.formats import Format
from ottava.numerics.rounding import decode
from ottava.numerics.tensor import QuantizedTensor
from ottava.ops import dispatch
from published import hold
from sweep import AXES, PAIRS
from witnesses import ML_DTYPES
from witnesses import gfloat_info as witness_of_gfloat

pytest_plugins = ["cost"]
# A busy machine makes no example wrong, and two runs of one commit try the same examples.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--dirty", action="store_true", help="fill what torch.empty gives with NaN, or the largest number")
    parser.addoption(
        "--publish",
        action="store_true",
        help="write the tables of docs/guarantees.md and docs/determinism.md from this run",
    )


def pytest_collection() -> None:
    """Imports and items live until the end: nobody has to search them for garbage, now or in a test."""
    gc.disable()


def pytest_collection_finish() -> None:
    """A fifth of the CPU time of all tests went into the search for garbage, which few of them leave."""
    warm.look_for_garbage_rarely()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else Triton's bindings report leaks at the exit


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """A machine with a GPU may lack these packages: `-m gpu` leaves out the files that need one, and says so."""
    report: Any = yield
    lacks = [name for name in ("gfloat", "pyarrow", "pydantic") if f"No module named '{name}" in str(report.longrepr)]
    if lacks and report.failed and collector.config.getoption("markexpr") == "gpu":
        report.outcome, report.longrepr = "skipped", (str(collector.path), None, f"Skipped: needs {lacks[0]}")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `gpu` is skipped where there is none; so is `scaled_mm_on_cpu`."""
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device"
    if not scaled_mm.runs_on_cpu():
        missing["scaled_mm_on_cpu"] = f"the scaled GEMM of torch {torch.__version__} has no CPU kernel"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def _errors_of_a_watch_are_seen() -> None:
    """A user's training outlives them; a test must not."""
    from ottava.watching.session import Watch

    Watch.OWN = ()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Sums in one order on every machine; and small tensors on many threads only wait for each other. Again before
    each test: one may take more."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _dirty(request: pytest.FixtureRequest) -> Iterator[None]:
    """`--dirty`: torch fills what it allocates without numbers, in deterministic mode only."""
    dirty = request.config.getoption("--dirty")
    if dirty:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    if dirty:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _paths() -> Iterator[None]:
    """A script that runs in the test's process may put its folder in place of the tests', which a new process needs."""
    kept = sys.path[:]
    yield
    sys.path[:] = kept


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Callable[..., None]:
    """table(name, header, rows): holds a table of docs/guarantees.md, or of `page`, against what ran."""
    return functools.partial(hold, publish=request.config.getoption("--publish"))


@pytest.fixture
def torch_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if torch's GEMM had been measured to be the fastest for BF16 operands: the same kernels on every machine."""
    order = (dispatch.torch_mm, *(kernel for kernel in dispatch.DENSE_KERNELS if kernel is not dispatch.torch_mm))
    monkeypatch.setattr(dispatch, "_dense_in_order", lambda kernels, native: order)
    dispatch.torch_is_beaten.cache_clear()
    yield
    dispatch.torch_is_beaten.cache_clear()


@pytest.fixture
def native_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ours had been measured to be the fastest GEMM on codes: the same calls on every machine."""
    monkeypatch.setattr(dispatch, "_in_order", lambda kernels, native: kernels)


def each(values: Iterable[Any], ids: Any = str) -> Any:
    """A fixture that runs a test with each of these."""

    @pytest.fixture(params=values, ids=ids)
    def one(request: pytest.FixtureRequest) -> Any:
        return request.param

    return one


fmt = each(AXES["fmt"])
recipe = each(AXES["recipe"], lambda recipe: recipe.name)
scale_format = each(AXES["scale_format"], None)
granularity = each(AXES["granularity"])  # registered ones, and two whose blocks are ragged nearly everywhere
spec = each(AXES["spec"])  # granularities with the scale formats that go with them, in E4M3; other formats by `replace`
pair = each(PAIRS.values(), PAIRS.keys())  # (lhs, rhs) of every quantized GEMM of every registered recipe, each once
dtype = each(AXES["dtype"], lambda dtype: str(dtype).split(".")[1])
sizes = each(AXES["sizes"])  # (M, N, K): odd, whole blocks, ragged blocks, one, and nothing in each place
layout = each(LAYOUTS.values(), LAYOUTS.keys())
"""Makes a matrix: one number, odd, whole blocks, transposed, strided, expanded, empty."""


@pytest.fixture
def ml_dtypes_type(fmt: Format) -> Any:
    """The same format in ml_dtypes (or numpy): the first witness."""
    return ML_DTYPES[fmt.name]


@pytest.fixture
def gfloat_info(fmt: Format) -> Any:
    """The same format in gfloat: the second witness."""
    return witness_of_gfloat(fmt.name)


@pytest.fixture
def matrix(layout: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> Tensor:
    """A matrix of every layout in every dtype."""
    return layout(dtype)


@pytest.fixture
def float64_gemm() -> Callable[[QuantizedTensor, QuantizedTensor, Tensor | None], tuple[Tensor, Tensor]]:
    """(a, b, bias) -> (a @ b.T + bias in fp64 from the decoded operands, how far fp32 accumulation may be from it).

    The bound: a sum of K products in any order is off by at most K * 2**-24 * sum |a||b|; six more roundings are for
    two scales on either side, the bias, and a product that is not exact (two-level scales).
    """

    def values(x_q: QuantizedTensor) -> Tensor:
        rows, cols = x_q.shape
        scale_inv = x_q.spec.granularity.expand(x_q.scale_inv, (rows, cols)).double()
        return decode(x_q.data, x_q.spec.format).double() * scale_inv

    def gemm(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        lhs, rhs = values(a), values(b)
        y, magnitude = lhs @ rhs.t(), lhs.abs() @ rhs.abs().t()
        if bias is not None:
            y, magnitude = y + bias.double(), magnitude + bias.double().abs()
        return y, (a.shape[1] + 6) * 2.0**-24 * magnitude

    return gemm


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _nothing_is_compiled(request: pytest.FixtureRequest) -> None:
    """Forgets the code that torch has compiled for tests before: in a process that has some, a watch records gradients
    in place of the loss, and its numbers are others."""
    parts = request.node.nodeid.split("/")
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["frames"] and (parts[1] in _EXPERIMENT or parts[1][:9] in _EXPERIMENT):
        sys.modules["torch._dynamo"].reset()
        utils.counters.clear()


_EXPERIMENT = ("experiments", "diagnose", "watching", "test_docs", "test_exam")
"""Tests whose watches experiment: folders, and the beginnings of files."""
