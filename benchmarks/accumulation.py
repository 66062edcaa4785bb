"""What accumulators lose: bias against K, and the time of emulating them. `python benchmarks/accumulation.py`

It writes docs/accumulation.svg, and prints the tables of docs/accumulation.md. The share that a sum loses is
-mean(sign(y) * (y' - y)) / mean |y|, with y in fp64 and y' under the profile: positive if sums shrink toward zero.

    random      both operands N(0, 1) in E4M3
    positive    their magnitudes: a mean, as behind a ReLU or in a softmax
    gradient    wgrad's operands: dY in E5M2 of N(0.25, 1), X in E4M3 of |N(0, 1)|: a signal in noise, K = tokens
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from ottava.base.text import columns
from ottava.measure.statistics import STATISTICS
from ottava.measure.walk import measure
from ottava.numerics.accumulator import ACCUMULATORS, lost_share
from ottava.numerics.formats import E4M3, E5M2, Format
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.gemm import gemm
from ottava.ops.quantize import quantize
from ottava.report.charts import Chart, Line, standalone

PICTURE = Path(__file__).parents[1] / "docs" / "accumulation.svg"
OCTAVES = range(5, 17)
SIDE = 32
PROFILES = ("fp32", "hopper", "hopper_promoted", "ada", "tcgen05", "blackwell_mma")
Make = Callable[[int], Tensor]
DATA: dict[str, tuple[Format, Make, Make]] = {
    "random": (E4M3, lambda k: torch.randn(SIDE, k), lambda k: torch.randn(SIDE, k)),
    "positive": (E4M3, lambda k: torch.randn(SIDE, k).abs(), lambda k: torch.randn(SIDE, k).abs()),
    "gradient": (E5M2, lambda k: torch.randn(SIDE, k) + 0.25, lambda k: torch.randn(SIDE, k).abs()),
}
BIASED: dict[str, tuple[Make, Make]] = {
    "SwiGLU x weights": (lambda k: silu(torch.randn(SIDE, k)) * torch.randn(SIDE, k), lambda k: torch.randn(SIDE, k)),
    "ReLU x weights": (lambda k: torch.randn(SIDE, k).relu(), lambda k: torch.randn(SIDE, k)),
    "ReLU x weights of mean 0.1": (lambda k: torch.randn(SIDE, k).relu(), lambda k: torch.randn(SIDE, k) + 0.1),
    "ReLU x ReLU": (lambda k: torch.randn(SIDE, k).relu(), lambda k: torch.randn(SIDE, k).relu()),
    "magnitudes": (lambda k: torch.randn(SIDE, k).abs(), lambda k: torch.randn(SIDE, k).abs()),
}
LONG = (1024, 4096, 14336)
SHAPES = ((64, 64, 512), (1024, 384, 128), (384, 128, 1024))


def lost(data: str, k: int, profile: str) -> float:
    """The share of its magnitude that a sum of k products loses, in percent."""
    fmt, left, right = DATA[data]
    torch.manual_seed(k)
    return lost_of(quantize(left(k), QuantizationSpec(fmt)), quantize(right(k), QuantizationSpec(E4M3)), profile)


def foretold(data: str, k: int) -> str:
    """What sums lose under Hopper's fast accumulation, and what `lost_share` says from the biases, in percent."""
    torch.manual_seed(k)
    x, w = (make(k) for make in BIASED[data])
    a, b = (quantize(side, QuantizationSpec(E4M3)) for side in (x, w))
    bias = [float(STATISTICS["bias"].finish(measure(side, cast))) for side, cast in ((x, a), (w, b))]
    return f"{lost_of(a, b, 'hopper'):.2f} ({100 * lost_share(k, bias[0] * bias[1], 'hopper'):.2f})"


def lost_of(a: QuantizedTensor, b: QuantizedTensor, profile: str) -> float:
    """In percent."""
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    y = gemm(a, b, out_dtype=torch.float32, accumulator=profile).double()
    return 100 * float(-(exact.sign() * (y - exact)).mean() / exact.abs().mean())


def chart(data: str, losses: dict[str, list[float]]) -> Chart:
    """One line a profile."""
    lines = [
        Line(name=name, points=list(zip(OCTAVES, losses[name], strict=True)), style=i, markers=True)
        for i, name in enumerate(PROFILES)
    ]
    return Chart(
        title=f"{data} data",
        description=f"Percent of its magnitude that a sum of K products loses, by accumulator, on {data} data.",
        x_label="log2 K",
        y_label="% lost",
        lines=lines,
        width=420,
    )


def seconds(shape: tuple[int, int, int], profile: str) -> float:
    """CPU time of one thread for one GEMM, the best of seven."""
    m, n, k = shape
    a, b = (quantize(torch.randn(rows, k), QuantizationSpec(E4M3)) for rows in (m, n))
    times = []
    for _ in range(7):
        began = time.thread_time()
        gemm(a, b, out_dtype=torch.bfloat16, accumulator=profile)
        times.append(time.thread_time() - began)
    return min(times)


def main() -> None:
    """Writes the picture and prints the tables."""
    torch.set_num_threads(1)
    charts = []
    for data in DATA:
        losses = {name: [lost(data, 1 << octave, name) for octave in OCTAVES] for name in PROFILES}
        charts.append(chart(data, losses))
        shown = [octave for octave in OCTAVES if octave % 2 == 0]
        rows = [(name, *(f"{losses[name][octave - OCTAVES[0]]:.3f}" for octave in shown)) for name in PROFILES]
        print(f"\n% lost on {data} data, K =")
        print("\n".join(columns(("profile", *(str(1 << octave) for octave in shown)), *rows)))
    print("\n% lost under hopper (foretold from the biases of both operands), K =")
    rows = [(data, *(foretold(data, k) for k in LONG)) for data in BIASED]
    print("\n".join(columns(("data", *map(str, LONG)), *rows)))
    title = "What an accumulator loses: the sum of K products shrinks toward zero"
    PICTURE.write_text(standalone(charts, title=title, captions=["python benchmarks/accumulation.py"]), "utf-8")
    print("\nms of one thread, M x N x K =")
    times = [(name, *(f"{1e3 * seconds(shape, name):.2f}" for shape in SHAPES)) for name in PROFILES]
    print("\n".join(columns(("profile", *(" x ".join(map(str, shape)) for shape in SHAPES)), *times)))
    assert set(PROFILES) == {name for name, profile in ACCUMULATORS.items() if profile.dot == 1}


if __name__ == "__main__":
    main()
