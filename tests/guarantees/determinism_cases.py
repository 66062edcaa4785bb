"""One case for each class of operations that we own: numbers whose bits are compared over threads, processes, restarts.

python determinism_cases.py THREADS      prints {case: a hash of all its numbers} as JSON
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava.kernels import accumulate, torch_mm
from ottava.kernels.native import accumulate as native_accumulate
from ottava.measure.tally import DETAILS
from ottava.measure.walk import Look, measure_all, survey
from ottava.numerics.accumulator import ACCUMULATORS
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops import dispatch
from ottava.recipe import RECIPES, TENSORS, Recipe

SIZES = ((1, 7, 33), (129, 65, 257), (64, 256, 512), (33, 201, 96), (257, 31, 129), (5, 300, 1000))
"""(M, N, K)."""
SAME, MAY = "same bits", "may differ"
NONE, MODEL = "the operands alone", "the operands and the generator's state"


@dataclass(frozen=True)
class Case:
    """A row of the page."""

    run: Callable[[], Iterator[Tensor]]
    threads: str = SAME
    depends: str = NONE
    path: str = "always; no cost"
    restarts: bool = False
    """Whether it has state, which the case saves and loads half-way."""


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * 10 ** torch.randn(shape[0], *[1] * (len(shape) - 1))).to(dtype)


def casts(stochastic: bool) -> Iterator[Tensor]:
    cells = (cell for recipe in RECIPES.values() for tensor in TENSORS for cell in recipe.cells(tensor))
    specs = {cell for cell in cells if cell is not None and not cell.predicted}
    for spec in sorted((one for one in specs if one.repeatable != stochastic), key=str):
        for rows, cols in ((64, 256), (128, 384), (257, 160)):
            for dtype in (torch.bfloat16, torch.float32):
                x_q = ottava.quantize(noise(rows, cols, dtype=dtype), spec)
                yield from (x_q.data, x_q.scale_inv)


def products(kernel: Any) -> Iterator[Tensor]:
    for m, n, k in SIZES:
        for name in ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"):
            cells = RECIPES[name].fprop
            a, b = ottava.quantize(noise(m, k), cells.lhs), ottava.quantize(noise(n, k), cells.rhs)
            for dtype in (torch.float32, torch.bfloat16):
                if kernel.supports_gemm(a, b, dtype, None) is None:
                    yield dispatch.runner(kernel, a, b, dtype, None, False)(a, b, None)


def sums_under_an_accumulator(kernel: ModuleType) -> Iterator[Tensor]:
    spec = QuantizationSpec(ottava.E4M3)
    for m, n, k in SIZES[:3]:
        a, b = (ottava.quantize(noise(*shape), spec) for shape in ((m, k), (n, k)))
        for rule in ("hopper", "ada"):
            if kernel.supports_accumulate(a, b, torch.float32, ACCUMULATORS[rule]) is None:
                yield kernel.plan_accumulate(a, b, torch.float32, None, ACCUMULATORS[rule])(a, b, None)


def dense(dtype: torch.dtype) -> Iterator[Tensor]:
    for m, n, k in SIZES:
        a, b = noise(m, k, dtype=dtype), noise(n, k, dtype=dtype)
        yield torch_mm.plan_dense(a, b, None)(a, b, None)


def through(module: nn.Module, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[Tensor]:
    """y, dx and the gradients of the parameters."""
    x = noise(*shape, dtype=dtype).requires_grad_()
    y = module(x)
    y.backward(noise(*y.shape, dtype=dtype))
    yield from (y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None))


def modules(*made: tuple[Callable[[], nn.Module], tuple[int, ...]]) -> Iterator[Tensor]:
    for make, shape in made:
        yield from through(make(), *shape)


def attention(backend: str) -> Iterator[Tensor]:
    for mask in ("causal", "no_mask"):
        block = ottava.nn.MultiheadAttention(64, 4, kv_heads=2, mask=mask, backend=backend, dtype=torch.bfloat16)
        yield from through(block, 3, 65, 64)


def loss() -> Iterator[Tensor]:
    head = ottava.nn.LinearCrossEntropy(64, 1001, dtype=torch.bfloat16)
    x = noise(300, 64, dtype=torch.bfloat16).requires_grad_()
    value = head(x, torch.randint(1001, (300,)))
    value.backward()
    yield from (value.detach(), x.grad, head.weight.grad)


def linears(recipe: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """Forward and backward; MKL sums few rows in an order of the threads."""
    for m, n, k in ((64, 128, 256), (96, 256, 128), (7, 130, 65), (33, 9, 127), (11, 17, 48), (5, 64, 257)):
        yield from through(ottava.nn.Linear(k, n, recipe=recipe, dtype=dtype), m, k, dtype=dtype)


def training(make: Callable[[Any], torch.optim.Optimizer], recipe: str = "bf16") -> Iterator[Tensor]:
    """Six steps; six steps with a restart in the middle give the same bits."""
    ends = []
    for restart in (False, True):
        torch.manual_seed(7)
        model = nn.Sequential(
            *(ottava.nn.Linear(64, 64, bias=False, recipe=recipe, dtype=torch.bfloat16) for _ in range(2))
        )
        optimizer = make(model.parameters())
        for step in range(6):
            if restart and step == 3:
                file = io.BytesIO()
                torch.save((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()), file)
                model = copy.deepcopy(model)
                optimizer = make(model.parameters())
                file.seek(0)
                weights, moments, state = torch.load(file, weights_only=False)
                model.load_state_dict(weights)
                optimizer.load_state_dict(moments)
                torch.set_rng_state(state)
            model(noise(64, 64, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.detach() for p in model.parameters()])
    assert all(p.isfinite().all() for p in ends[0]), "not finite: equal bits would say nothing"
    assert all(map(torch.equal, *ends)), "a restart changed bits"
    yield from ends[0]


def statistics() -> Iterator[Tensor]:
    for rows, cols in ((64, 256), (513, 300)):
        x = noise(rows, cols, dtype=torch.bfloat16)
        for detail in DETAILS:
            look = Look(x, QuantizationSpec(ottava.E4M3), survey(x))
            yield from (one for one in measure_all([look], detail=detail) if isinstance(one, Tensor))


def gemms() -> dict[str, Case]:
    """A case for each kernel of a CPU; torch's sums carry the doubt."""
    own = {"native_gemm"}
    path = "`OMP_NUM_THREADS=1`, or `autocast(batch_invariant=True)` where the recipe allows it"
    return {
        f"GEMM `{kernel.NAME}`": Case(
            partial(products, kernel),
            *((SAME, NONE) if kernel.NAME in own else (MAY, "threads and sizes: torch's FP32 sums", path)),
        )
        for kernel in dispatch.CPU_KERNELS
    }


N = ottava.nn
TORCHS = (MAY, "threads and sizes: torch's sums", "`OMP_NUM_THREADS=1`")


def cases() -> dict[str, Case]:
    """Name -> case."""
    optimizers = {
        "`AdamW`": partial(ottava.optim.AdamW, lr=1e-2),
        '`AdamW(master="remainder")`': partial(ottava.optim.AdamW, lr=1e-2, master="remainder"),
        '`AdamW(moments="fp8")`': partial(ottava.optim.AdamW, lr=1e-2, moments="fp8"),
        '`AdamW(moments="int8")`': partial(ottava.optim.AdamW, lr=1e-2, moments="int8"),
        "`AdamW(stochastic_rounding=True)`": partial(
            ottava.optim.AdamW, lr=1e-2, master=None, stochastic_rounding=True
        ),
        "`Lion`": partial(ottava.optim.Lion, lr=1e-3),
        "`SGD`": partial(ottava.optim.SGD, lr=1e-6, momentum=0.9),
        "`Muon`": partial(ottava.optim.Muon, lr=1e-2),
    }
    drawn = "the operands, the seed and the place in the whole parameter"
    return {
        "casts that round to nearest, every recipe's": Case(partial(casts, False)),
        "casts that round stochastically": Case(
            partial(casts, True), depends=MODEL, path="`torch.manual_seed`; no cost"
        ),
        **gemms(),
        "GEMM `native_accumulator`": Case(partial(sums_under_an_accumulator, native_accumulate)),
        "GEMM `accumulator_reference`": Case(partial(sums_under_an_accumulator, accumulate)),
        "GEMM `torch.mm` in FP32": Case(partial(dense, torch.float32), *TORCHS),
        "GEMM `torch.mm` in BF16": Case(partial(dense, torch.bfloat16), *TORCHS),
        "norms": Case(
            lambda: modules(
                (lambda: N.RMSNorm(96, dtype=torch.bfloat16), (65, 96)),
                (lambda: N.LayerNorm(96, dtype=torch.bfloat16), (65, 96)),
                (lambda: N.RMSNorm(512, dtype=torch.bfloat16), (300, 512)),
            ),
        ),
        "activations in front of a cast": Case(
            lambda: modules((lambda: N.NormMLP(64, 96, activation="swiglu", dtype=torch.bfloat16), (128, 64))), *TORCHS
        ),
        "attention `math`": Case(partial(attention, "math"), *TORCHS),
        "attention `flash`": Case(partial(attention, "flash"), *TORCHS),
        "`LinearCrossEntropy`": Case(loss, *TORCHS),
        "experts (`MoE`)": Case(
            lambda: modules(
                (lambda: N.MoE(64, 96, num_experts=4, top_k=2, recipe="rowwise", dtype=torch.bfloat16), (128, 64))
            ),
            *TORCHS,
        ),
        **{
            f"`Linear` under `{name}`, {word}, even and odd sizes": Case(
                partial(linears, name, dtype),
                *(TORCHS if by_torch(recipe, dtype) else (SAME, MODEL if draws(recipe) else NONE)),
            )
            for name, recipe in RECIPES.items()
            for word, dtype in (("BF16", torch.bfloat16), ("FP32", torch.float32))
        },
        **{
            f"optimizer {name}": Case(
                partial(training, make),
                *(TORCHS if name == "`Muon`" else (SAME, drawn if "stoch" in name else NONE)),
                restarts=True,
            )
            for name, make in optimizers.items()
        },
        "training under `delayed`": Case(
            partial(training, optimizers["`AdamW`"], "delayed"), depends="the operands and the histories", restarts=True
        ),
        "statistics of a watch": Case(statistics),
    }


def by_torch(recipe: Recipe, dtype: torch.dtype) -> bool:
    """Whether torch multiplies in high precision: all of it, or, of FP32, one of the three GEMMs."""
    quantized = [cells.quantized for cells in (recipe.fprop, recipe.dgrad, recipe.wgrad)]
    return not any(quantized) or (dtype == torch.float32 and not all(quantized))


def draws(recipe: Recipe) -> bool:
    """Whether a cast of it rounds at random."""
    cells = (cell for tensor in TENSORS for cell in recipe.cells(tensor))
    return any(cell is not None and not cell.repeatable for cell in cells)


def digest(case: Case) -> str:
    torch.manual_seed(0)
    made = hashlib.sha256()
    count = 0
    for tensor in case.run():
        made.update(
            tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        )
        count += 1
    return f"{count} {made.hexdigest()}"


def control() -> Iterator[Tensor]:
    """What does depend on threads: torch's sums of large tensors."""
    yield torch.stack([noise(1 << 17).sum() for _ in range(16)])


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    found = {}
    for name, case in {**cases(), "control": Case(control)}.items():
        try:
            found[name] = digest(case)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
