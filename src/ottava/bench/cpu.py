"""`ottava bench cpu`: casts, linear layers and a transformer block on a CPU, beside BF16, memcpy and torchao.

torchao emulates FP8 on a CPU (emulate=True). Rivals that are not installed are left out and named in the result.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from ottava.bench.rounds import Timing, interleaved
from ottava.formats import E4M3
from ottava.nn.convert import convert
from ottava.ops import quantize
from ottava.quantized_tensor import QuantizationSpec
from ottava.scaling import BLOCK_1X32

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
"""Those that have a goal."""
CAST_ELEMENTS = (1 << 20, 1 << 22, 1 << 25)
LINEAR_SHAPES = ((2048, 512, 512), (2048, 1024, 4096), (4096, 2048, 2048))
"""(rows, in_features, out_features)."""
SUITES = ("cast", "linear", "block")


@dataclass(frozen=True)
class Case:
    """One table: the first timing is what the others are compared with."""

    suite: str
    """One of SUITES."""
    name: str
    """Sizes."""
    timings: tuple[Timing, ...]
    """In the order of the round."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"suite": self.suite, "name": self.name, "timings": [timing.to_dict() for timing in self.timings]}

    def __str__(self) -> str:
        width = max(len(timing.name) for timing in self.timings)
        lines = [f"{self.suite} {self.name}, ratio to {self.timings[0].name}"]
        lines += [
            f"  {t.name.ljust(width)}  {t.milliseconds:9.3f} ms  {t.ratio:6.2f} [{low:.2f}-{high:.2f}]"
            for t in self.timings
            for low, high in [t.quartiles]
        ]
        return "\n".join(lines)


class Block(nn.Module):
    """A GPT block without dropout: attention and a feed-forward of 4 d, LayerNorm before each."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        batch, length, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, d))
        return torch.add(x, self.down(nn.functional.gelu(self.up(self.norm2(x)))))


def bench(
    suites: Iterable[str] = SUITES, *, rounds: int = 15, compiled: bool = False, cpu_time: bool = False
) -> Iterator[Case]:
    """Measures case after case.

    Args:
        suites: of SUITES.
        rounds: of every case; quartiles are over them.
        compiled: also torchao under torch.compile, which takes minutes.
        cpu_time: count the process's CPU time instead of the clock's: with one thread, good on a busy machine.
    Raises:
        ValueError: an unknown suite.
    """
    chosen = list(suites)
    for suite in chosen:
        if suite not in SUITES:
            raise ValueError(f"suite: got {suite!r}; there are {', '.join(SUITES)}")
    clock = time.process_time if cpu_time else time.perf_counter
    if "cast" in chosen:
        for n in CAST_ELEMENTS:
            yield Case("cast", f"bf16 {n >> 20}M", tuple(interleaved(_casts(n), rounds, clock=clock)))
    if "linear" in chosen:
        for rows, k, n in LINEAR_SHAPES:
            x, dy = torch.randn(rows, k), torch.randn(rows, n)
            variants = _steps(lambda k=k, n=n: nn.Linear(k, n), x, dy, compiled)  # type: ignore[misc]
            yield Case("linear", f"fwd+bwd ({rows}, {k}, {n})", tuple(interleaved(variants, rounds, clock=clock)))
    if "block" in chosen:
        x, dy = torch.randn(8, 256, 512), torch.randn(8, 256, 512)
        variants = _steps(lambda: Block(512, 8), x, dy, compiled)
        yield Case("block", "d=512 h=8 T=256 B=8, fwd+bwd", tuple(interleaved(variants, rounds, clock=clock)))


def machine() -> dict[str, Any]:
    """What ratios depend on: CPU, threads, versions."""
    versions: dict[str, str | None] = {}
    for name in ("ottava", "torch", "torchao"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "cpu": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def _casts(n: int) -> dict[str, Callable[[], object]]:
    x = torch.randn(n // 1024, 1024).bfloat16()
    other = torch.empty_like(x)
    tensor, delayed = QuantizationSpec(E4M3), QuantizationSpec(E4M3, scaling="delayed")
    mx = QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")
    scale = torch.tensor(64.0)
    variants: dict[str, Callable[[], object]] = {
        "copy": lambda: other.copy_(x),
        "ottava tensor": lambda: quantize(x, tensor),
        "ottava tensor, scale known": lambda: quantize(x, delayed, scale=scale),
        "ottava 1x32": lambda: quantize(x, mx),
    }
    if n <= 1 << 22:
        variants["eager torch"] = lambda: (x * (448.0 / x.abs().max())).clamp(-448, 448).to(torch.float8_e4m3fn)
    return variants


def _steps(make: Callable[[], nn.Module], x: Tensor, dy: Tensor, compiled: bool) -> dict[str, Callable[[], object]]:
    """Forward and backward of the same module under BF16, ottava's recipes and torchao."""
    x, dy = x.bfloat16().requires_grad_(), dy.bfloat16()

    def module() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(make()).bfloat16()

    def step(run: Callable[[Tensor], Tensor], owner: nn.Module) -> Callable[[], object]:
        def once() -> None:
            owner.zero_grad()
            x.grad = None
            run(x).backward(dy)

        return once

    bf16 = module()
    variants: dict[str, Callable[[], object]] = {"BF16": step(bf16, bf16)}
    for recipe in RECIPES:
        model = module()
        convert(model, recipe, filter=lambda name, layer: True)
        variants[f"ottava {recipe}"] = step(model, model)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return variants
    for name, wrap in (("torchao tensorwise", False), ("torchao tensorwise, compiled", True)):
        if not wrap or compiled:
            model = module()
            convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
            variants[name] = step(torch.compile(model) if wrap else model, model)
    return variants
