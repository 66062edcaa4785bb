"""engine.js, run by Node and by Chromium, has the bits of ottava: casts of formats and recipes, trainings.

The long run, `./x test tests/explorer/test_engine.py -k ten_million`, makes 10 million casts and 200 steps of every
recipe.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import ottava
from explorer import twin
from ottava.explorer import cell, tables
from ottava.numerics.formats import E2M1, E4M3, E5M2, FORMATS, FP32, Format
from ottava.numerics.rounding import Rounding, decode, draw_seed, encode, random_bits
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_SCALES, PER_TENSOR, ScaleFormat
from ottava.numerics.tensor import Operand, QuantizationSpec
from ottava.recipe import GEMMS, RECIPES

FILES = resources.files("ottava.explorer")
ENGINE = FILES.joinpath("engine.js")
RUNNER = Path(__file__).with_name("run_engine.js")
NODE = shutil.which("node")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAN = 0xFFFFFFFF
Answer = Callable[[dict[str, Any], Path], dict[str, Any]]


def in_node(jobs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What Node answers."""
    if NODE is None:
        pytest.skip("needs node")
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    done = subprocess.run([NODE, str(RUNNER), str(ENGINE), str(path)], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def in_chromium(jobs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What Chromium answers."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ENGINE, RUNNER))
    ask = f"document.title = JSON.stringify(answerJobs(makeEngine, {json.dumps(jobs)}))"
    page = folder / "jobs.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><title></title><script>{scripts}{ask}</script>", "utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += [f"--user-data-dir={folder / 'profile'}", "--timeout=1000000", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, page.as_uri()], capture_output=True, text=True, timeout=3000)
    found = re.search("<title>(.+?)</title>", done.stdout)
    assert found is not None, done.stderr[-2000:]
    answers: dict[str, Any] = json.loads(found[1])
    return answers


def words(seed: int | Tensor) -> list[int]:
    """The two words of a seed, the low one first."""
    return [int(seed) & NAN, int(seed) >> 32 & NAN]


def seeds(count: int) -> list[list[int]]:
    """What torch's generator will draw next."""
    state = torch.random.get_rng_state()
    found = [words(draw_seed(torch.device("cpu"))) for _ in range(count)]
    torch.random.set_rng_state(state)
    return found


def digest(codes: Tensor) -> int:
    """As in run_engine.js. codes: int64."""
    odd = (2 * torch.arange(codes.numel()) + 1) * 0x9E3779B1 & NAN
    return int(((codes.flatten() + 1 & NAN) * odd & NAN).sum()) & NAN


def codes_of(codes: Tensor, fmt: Format) -> Tensor:
    """Codes as int64, all NaNs one number."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.dtype.itemsize]
    whole = codes.contiguous().view(integer).to(torch.int64) & (1 << 8 * codes.dtype.itemsize) - 1
    return torch.where(decode(codes, fmt).isnan(), NAN, whole)


def numbers_for(fmt: Format, count: int, seed: int) -> Tensor:
    """fp32: as bitsFor in run_engine.js."""
    value, choice = random_bits(torch.tensor(seed), 2 * count).view(count, 2).unbind(1)
    low = max(0, 125 + fmt.emin - fmt.mantissa_bits)
    span = min(254, 129 + fmt.emax) - low + 1
    mantissa = torch.where(choice & 1 == 1, value & -(2 ** max(0, 22 - fmt.mantissa_bits)), value) & 0x7FFFFF
    mantissa = torch.where(choice & 2 == 2, mantissa ^ 1, mantissa)
    bits = (value & 0x80000000) | (low + (choice >> 8) % span << 23) | mantissa
    return torch.where(choice & 0x70 == 0x70, value, bits).to(torch.int32).view(torch.float32)


def casts(count: int) -> tuple[list[dict[str, Any]], list[int]]:
    """`count` casts to every format in every rounding, and the digests of ottava's codes."""
    jobs, wanted = [], []
    for seed, fmt in enumerate(FORMATS.values()):
        for rounding in get_args(Rounding):
            drawn = seeds(1)[0] if rounding == "stochastic" else None
            jobs.append({"format": fmt.name, "count": count, "words": words(seed), "seed": drawn})
            codes = encode(numbers_for(fmt, count, seed), fmt, rounding=rounding)
            wanted.append(digest(codes_of(codes, fmt)))
    return jobs, wanted


def specs() -> list[QuantizationSpec]:
    """Every cell of every recipe, each scale rule with each format that recipes scale by it, and margins."""
    cells = [
        getattr(getattr(recipe, gemm), side) for recipe in RECIPES.values() for gemm in GEMMS for side in ("lhs", "rhs")
    ]
    found = [spec for spec in cells if spec is not None]
    for fmt in (E4M3, E5M2, E2M1, FORMATS["E4M3FNUZ"], FORMATS["E3M2"], FORMATS["E2M3"]):
        for scale_format in get_args(ScaleFormat):
            granularity = BLOCK_1X16 if scale_format == "e4m3" else BLOCK_1X32
            found += [QuantizationSpec(fmt, granularity, scale_format, margin=margin) for margin in (0, 2)]
    found += [replace(spec, granularity=PER_TENSOR) for spec in found[-4:-2]]
    needs_rotation = ("unclipped", "ms_eden")  # no recipe has the first; the second is a cell of a recipe
    found += [
        QuantizationSpec(E2M1, BLOCK_1X16, "e4m3", block_scale=rule)
        for rule in BLOCK_SCALES
        if rule not in needs_rotation
    ]
    return list(dict.fromkeys(found))


def matrix_for(rows: int, cols: int, seed: int, bf16: bool) -> Tensor:
    """As matrixFor in run_engine.js."""
    count = rows * cols
    x, runs = twin.normals(seed, 0, count), random_bits(torch.tensor(9 << 32 | seed), count)
    first = runs[torch.arange(count) & -8]
    x = x * 2.0 ** (first % 40 - 20).float() * (first >> 28 != 0)
    strange = torch.tensor([0, torch.inf, torch.nan, -torch.inf])[runs & 3]
    x = torch.where(runs >> 20 == 0xFFF, strange, x).view(rows, cols)
    return x.bfloat16() if bf16 else x


def specced(rows: int, cols: int) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Matrices cast to every spec, FP32 and BF16, with current and with given scales."""
    jobs, wanted = [], []
    for number, spec in enumerate(specs()):
        for bf16 in (False, True):
            scale = 2.5 if spec.predicted and bf16 else None
            job = {
                "spec": cell(spec),
                "rows": rows,
                "cols": cols,
                "words": words(number),
                "bf16": bf16,
                "scale": scale,
            }
            drawn = seeds(3)
            before = torch.random.get_rng_state()
            x_q = ottava.quantize(
                matrix_for(rows, cols, number, bf16), spec, scale=None if scale is None else torch.tensor(scale)
            )
            after, draws = torch.random.get_rng_state(), 0
            torch.random.set_rng_state(before)
            while not torch.equal(torch.random.get_rng_state(), after):
                draw_seed(torch.device("cpu"))
                draws += 1
            inv = x_q.scale_inv.float().contiguous()
            data = x_q.data.contiguous()
            jobs.append(job | {"seeds": drawn})
            wanted.append([digest(codes_of(data, spec.format)), digest(codes_of(inv, FP32)), data.numel(), draws])
    return jobs, wanted


def layers(tokens: int, wide: int, out: int) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """y, dx and dw of a layer under every recipe, with several blocks along each sum."""
    jobs, wanted = [], []
    shapes = ((tokens, wide), (out, wide), (tokens, out))
    x, w, dy = (twin.normals(i, 5, rows * cols).view(rows, cols).bfloat16() for i, (rows, cols) in enumerate(shapes))
    tensors = [{"rows": rows, "cols": cols, "words": [i, 5]} for i, (rows, cols) in enumerate(shapes)]
    for name, recipe in RECIPES.items():
        jobs.append({"recipe": name, "tensors": tensors, "seeds": seeds(12)})

        def cast(operand: Tensor, spec: QuantizationSpec | None, beside: Operand | None = None) -> Operand:
            return operand if spec is None else ottava.quantize(operand, spec, beside=beside)

        x_row, x_col = cast(x, recipe.fprop.lhs), cast(x.t(), recipe.wgrad.rhs)
        w_row, w_col = cast(w, recipe.fprop.rhs, x_row), cast(w.t(), recipe.dgrad.rhs)
        dy_row, dy_col = cast(dy, recipe.dgrad.lhs, w_col), cast(dy.t(), recipe.wgrad.lhs, x_col)
        products = twin.gemm(x_row, w_row), twin.gemm(dy_row, w_col), twin.gemm(dy_col, x_col)
        wanted.append([digest(codes_of(product.float(), FP32)) for product in products])
    return jobs, wanted


def trainings(steps: int, octaves: int) -> tuple[list[dict[str, Any]], list[list[list[int]]]]:
    """Every recipe; losses and digests of the master weights."""
    jobs, wanted = [], []
    for recipe in RECIPES:
        torch.manual_seed(0)
        count = max(steps, 24) if RECIPES[recipe].predicted else steps  # more than a history holds
        jobs.append({"recipe": recipe, "lr": 0.1, "octaves": octaves, "steps": count, "seeds": seeds(24 * count)})
        training = twin.Training(recipe, 0.1, octaves)
        losses = torch.tensor([training.step() for _ in range(count)])
        masters = [digest(codes_of(w, FP32)) for w in training.masters]
        wanted.append([codes_of(losses, FP32).tolist(), masters])
    return jobs, wanted


def check(folder: Path, *answers: Answer, count: int, shape: tuple[int, int], steps: int, octaves: int) -> int:
    """Asserts that all answers of each engine have ottava's bits; the number of casts."""
    torch.manual_seed(1)
    asked = {
        "casts": casts(count),
        "specs": specced(*shape),
        "layers": layers(70, 2 * shape[1], 140),
        "trainings": trainings(steps, octaves),
    }
    jobs = {kind: listed for kind, (listed, _) in asked.items()}
    for answer in answers:
        found = answer(json.loads(json.dumps({"tables": tables()} | jobs)), folder)
        for kind, (listed, wanted) in asked.items():
            for job, got, want in zip(listed, found[kind], wanted, strict=True):
                assert got == want, (answer, kind, {name: value for name, value in job.items() if name != "seeds"})
    return count * len(asked["casts"][0]) + sum(want[2] for want in asked["specs"][1])


def test_node_has_the_bits_of_ottava(tmp_path: Path) -> None:
    """Each format in each rounding, every cell and scale rule, four steps of every recipe behind an outlier."""
    assert check(tmp_path, in_node, count=3000, shape=(40, 72), steps=4, octaves=9) > 300_000


def test_ten_million_casts_and_200_steps(tmp_path: Path) -> None:
    """The whole promise of the page, in both engines of JavaScript."""
    assert check(tmp_path, in_node, in_chromium, count=400_000, shape=(129, 136), steps=200, octaves=8) > 10_000_000


def test_an_outlier_changes_no_bit_in_bf16(tmp_path: Path) -> None:
    """The knob multiplies a channel by a power of two and divides its weights by it: only FP8 has other losses."""
    runs = [
        {"recipe": recipe, "lr": 0.1, "octaves": octaves, "steps": 3, "seeds": None}
        for recipe in ("bf16", "tensorwise")
        for octaves in (0, 20)
    ]
    jobs = {"tables": tables(), "casts": [], "specs": [], "layers": [], "trainings": runs}
    bf16, same, fp8, other = in_node(jobs, tmp_path)["trainings"]
    assert bf16 == same
    assert fp8[0] != other[0]


def test_of_the_first_two_recipes_one_diverges_by_its_forward(tmp_path: Path) -> None:
    """The settings of the page when it opens. Those that learn come below half of their first loss."""
    page = FILES.joinpath("explorer.html.j2").read_text(encoding="utf-8")
    lr, octaves = (float(value) for value in re.findall(r'id="(?:lr|channel)".*? value="([^"]+)"', page))
    mxfp4, high = tables()["recipes"]["mxfp4"], {"lhs": None, "rhs": None}
    forward, backward = mxfp4 | {"dgrad": high, "wgrad": high}, mxfp4 | {"fprop": high}
    runs = [
        {"recipe": recipe, "lr": 2**lr, "octaves": octaves, "steps": 90, "seeds": None}
        for recipe in ("mxfp8", backward, "mxfp4", forward)
    ]
    found = in_node({"tables": tables(), "casts": [], "specs": [], "layers": [], "trainings": runs}, tmp_path)[
        "trainings"
    ]
    losses = torch.tensor([bits for bits, _ in found]).to(torch.int32).view(torch.float32)
    assert (losses[:2, -1] < losses[:2, 0] / 2).all()
    assert not (losses[2:, -1] < 1e6).any()


def test_ordered_sums_are_the_engines_gemm() -> None:
    """The GEMM of the page differs from ottava.gemm by the order of sums: K roundings to FP32, then one to BF16."""
    torch.manual_seed(2)
    x, w = torch.randn(32, 96).bfloat16(), torch.randn(48, 96).bfloat16()
    for name, recipe in RECIPES.items():
        lhs, rhs = recipe.fprop.lhs, recipe.fprop.rhs
        a = x if lhs is None else ottava.quantize(x, lhs)
        b = w if rhs is None else ottava.quantize(w, rhs, beside=a)
        one, other = (t.dequantize(torch.float64) if lhs else t.double() for t in (a, b))
        sizes = one.abs() @ other.abs().t() + (0 if name != "averis" else x.double().mean(0).abs() @ other.abs().t())
        theirs = ottava.gemm(a, b, out_dtype=torch.bfloat16).double()
        bound = 2 * sizes * (96 + 8) * 2.0**-24 + 2.0**-7 * theirs.abs()
        assert ((twin.gemm(a, b).double() - theirs).abs() <= bound).all(), name
