"""GPU suites of layers and models: `linear`, `host`, `block`, `seed_layer` and `train`, beside BF16 and the rivals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ottava.bench.method import Run, check, host_seconds, launches, normal, race, replayed, step, step_bytes
from ottava.bench.models import PlainByteTransformer
from ottava.bench.rivals import Contender, contenders
from ottava.engine.state import ScalingState
from ottava.nn.convert import convert
from ottava.nn.graphed import graphed_step
from ottava.nn.plan import Device, plan_layer
from ottava.recipe import RECIPES
from ottava.train.config import ModelConfig
from ottava.train.model import VOCABULARY, ByteTransformer, loss

_LOOSE = 0.15  # relative error of an FP8 layer against BF16; wrong codes or scales give more than 1


def rows_of(
    run: Run, runners: list[Contender], work: dict[str, Callable[[], Any]], about: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row per contender: times, speed-up over the fastest BF16 of the same mode, memory, kernels."""
    # a replay allocates no memory: its graph holds it
    memory = {name: None if name.endswith(", graph") else step_bytes(run, call) for name, call in work.items()}
    measured, models = race(run, work), {c.name: c.model for c in runners}
    rows = []
    for label, times in measured.items():
        name, _, mode = label.partition(", ")
        base = min(other["median"] for key, other in measured.items() if "bf16" in key and key.endswith(f", {mode}"))
        facts = {**about, "recipe": name, "mode": mode, **times, "speedup": base / times["median"]}
        rows.append(facts | {"step_bytes": memory[label], "ran": ran(models[name])})
    return rows


def ran(model: nn.Module) -> dict[str, str]:
    """The kernel of each GEMM in ottava's first layer. Empty for rivals and compiled code, which keep no record."""
    calls = (getattr(module, "last_call", None) for module in model.modules())
    first = next((call for call in calls if call is not None), None)
    return {name: record.kernel for name, record in first.records.items()} if first is not None else {}


def settled(work: dict[str, Callable[[], Any]], runners: list[Contender]) -> dict[str, Callable[[], Any]]:
    """Runs one step and updates the scales once, so that recipes with predicted scales predict from now on.

    Returns:
        The same work.
    """
    for call in work.values():
        call()
    for contender in runners:
        ScalingState(contender.model).update()
    return work


def linear_layer(run: Run, k: int, n: int) -> nn.Linear:
    """A Linear, always with the same weights."""
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=False, device=run.device, dtype=torch.bfloat16)


def linear(run: Run) -> dict[str, Any]:
    """Forward and backward of BF16, the recipes and the rivals, with the predicted speed-up."""
    rows = []
    shapes = run.shapes((16384, 4096, 14336), (16384, 4096, 4096), (4096, 4096, 4096), (2048, 2048, 2048), (1024,) * 3)
    for m, k, n in shapes:
        x, dy = normal(run, m, k).requires_grad_(), normal(run, m, n)
        runners = contenders(run, partial(linear_layer, run, k, n))
        truth = runners[0].model(x)
        errors = {c.name: check(f"linear {c.name}", c.forward(x), truth, _LOOSE) for c in runners}
        work = settled({f"{c.name}, eager": step(c.forward, c.model, x, dy) for c in runners}, runners)
        if run.cuda:
            plain = [c for c in runners if "compiled" not in c.name and not c.name.startswith("te ")]
            work |= {f"{c.name}, graph": replayed(step(c.forward, c.model, x, dy)) for c in plain}
        for row in rows_of(run, runners, work, {"shape": [m, k, n]}):
            recipe = row["recipe"].removesuffix(" compiled")
            if recipe in RECIPES and recipe != "bf16":
                row["predicted"] = plan_layer("", (m, k, n), RECIPES[recipe], Device()).speedup
            rows.append(row | {"relative_error": errors[row["recipe"]]})
    return {"rows": rows}


def host(run: Run) -> dict[str, Any]:
    """Host time for forward and backward of one Linear, and its kernel launches."""
    rows = []
    for m, k, n in run.shapes((512, 512, 512)):
        x, dy = normal(run, m, k).requires_grad_(), normal(run, m, n)
        runners = contenders(run, partial(linear_layer, run, k, n))
        work = settled({c.name: step(c.forward, c.model, x, dy) for c in runners}, runners)
        for name, times in race(run, work, host_seconds).items():
            facts = {"recipe": name, "what": "host", "shape": [m, k, n], "launches": launches(run, work[name])}
            rows.append(facts | times)
    return {"rows": rows}


class Block(nn.Module):
    """A Llama decoder layer without positions: RMSNorm, grouped-query causal attention, RMSNorm, SwiGLU."""

    def __init__(self, hidden: int, wide: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, hidden // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, hidden + 2 * groups * self.size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)
        self.swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        x = x + self.out(attention(self.qkv(self.attention_norm(x)), self.heads, self.groups, causal=True))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        y: Tensor = x + self.down(self.swiglu(gate, up))
        return y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def attention(qkv: Tensor, heads: int, groups: int, *, causal: bool) -> Tensor:
    """(batch, sequence, (heads + 2 groups) size) -> (batch, sequence, heads size); torch chooses the kernel."""
    size = qkv.shape[-1] // (heads + 2 * groups)
    parts = qkv.split([heads * size, groups * size, groups * size], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(-2)


def block(run: Run) -> dict[str, Any]:
    """Forward and backward of a decoder layer of Llama's 8B and 1B sizes, with memory."""
    rows = []
    cases = {"8B": ((4096, 14336, 32, 8), (4, 4096)), "1B": ((2048, 8192, 32, 8), (8, 2048))}
    if run.smoke:
        cases = {"tiny": ((64, 128, 4, 2), (2, 16))}
    for name, (sizes, tokens) in cases.items():

        def make(sizes: tuple[int, int, int, int] = sizes) -> nn.Module:
            torch.manual_seed(0)
            with run.device:
                return Block(*sizes).to(torch.bfloat16)

        x, dy = normal(run, *tokens, sizes[0]).requires_grad_(), normal(run, *tokens, sizes[0])
        rows += layers(run, make, x, dy, {"what": name, "shape": [*tokens, *sizes]})
    return {"rows": rows}


def layers(run: Run, make: Callable[[], nn.Module], x: Tensor, dy: Tensor, about: dict[str, Any]) -> list[Any]:
    """Rows of forward and backward of one module."""
    runners = contenders(run, make)
    truth = runners[0].model(x)
    errors = {c.name: check(f"block {c.name}", c.forward(x), truth, _LOOSE) for c in runners}
    work = settled({f"{c.name}, eager": step(c.forward, c.model, x, dy) for c in runners}, runners)
    return [row | {"relative_error": errors[row["recipe"]]} for row in rows_of(run, runners, work, about)]


class SeedLayer(nn.Module):
    """Pre-norm attention and MLP: hidden 4096, feed-forward 16384, 32 heads, 8 groups, no mask, bias."""

    def __init__(self, hidden: int, wide: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, hidden // heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, hidden + 2 * groups * size)
        self.out, self.up, self.down = nn.Linear(hidden, hidden), nn.Linear(hidden, wide), nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        x = x + self.out(attention(self.qkv(self.norms[0](x)), self.heads, self.groups, causal=False))
        y: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return y


def seed_layer(run: Run) -> dict[str, Any]:
    """The layer of TransformerEngine issue #1119 with AdamW, and its memory."""
    sizes, tokens = ((64, 128, 4, 2), (2, 16)) if run.smoke else ((4096, 16384, 32, 8), (32, 1024))
    x = normal(run, *tokens, sizes[0])

    def make() -> nn.Module:
        torch.manual_seed(0)
        with run.device:
            return SeedLayer(*sizes).to(torch.bfloat16)

    runners = contenders(run, make, ("tensorwise", "blockwise", "delayed"))
    truth = runners[0].model(x)
    errors = {c.name: check(f"seed_layer {c.name}", c.forward(x), truth, _LOOSE) for c in runners}
    work: dict[str, Callable[[], Any]] = {}
    for c in runners:
        optimizer = torch.optim.AdamW(c.model.parameters(), lr=1e-4, fused=run.cuda)
        work[f"{c.name}, eager"] = partial(train_once, c.forward, optimizer, x)
    about = {"shape": [*tokens, *sizes]}
    return {"rows": [row | {"relative_error": errors[row["recipe"]]} for row in rows_of(run, runners, work, about)]}


def train_once(forward: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """One training step on the mean square of the output."""
    optimizer.zero_grad()
    forward(x).float().square().mean().backward()
    optimizer.step()


def train(run: Run) -> dict[str, Any]:
    """Tokens per second and loss of whole training steps: the demo's model, and one of 155 million parameters."""
    demo, large = ModelConfig(), ModelConfig(d_model=1024, layers=12, heads=16, kv_heads=16, ffn=2816)
    cases = {"demo": (demo, (64, 256)), "155M": (large, (16, 1024))}
    if run.smoke:
        cases = {"tiny": (ModelConfig(layers=1, d_model=32, heads=2, kv_heads=1, ffn=64), (2, 16))}
    rows = []
    for name, (config, tokens) in cases.items():
        text = learnable(run, *tokens)
        losses: dict[str, list[Tensor]] = {}
        work: dict[str, Callable[[], Any]] = {}
        models = {}
        for recipe in ("bf16", "tensorwise", "delayed", "guarded"):
            for mode in ("eager", "graph") if run.cuda else ("eager",):
                torch.manual_seed(0)
                with run.device:
                    kind = PlainByteTransformer if recipe == "bf16" else ByteTransformer
                    model = kind(config, tokens[1]).to(torch.bfloat16)
                if recipe != "bf16":
                    convert(model, recipe)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=run.cuda, capturable=run.cuda)
                train_step = graphed_step(training_step(run, model, optimizer), text, eager=mode == "eager")
                losses[f"{recipe}, {mode}"], models[recipe] = [], model
                work[f"{recipe}, {mode}"] = partial(append_loss, train_step, text, losses[f"{recipe}, {mode}"])
        runners = [Contender(recipe, model, model) for recipe, model in models.items()]
        count = tokens[0] * tokens[1]
        for row in rows_of(run, runners, work, {"what": name, "shape": list(tokens)}):
            curve = losses[f"{row['recipe']}, {row['mode']}"]
            check(f"train {name} {row['recipe']}", curve[0], losses["bf16, eager"][0], _LOOSE)
            progress = {"first_loss": float(curve[0]), "last_loss": float(curve[-1]), "steps": len(curve)}
            rows.append(row | progress | {"tokens_per_second": count / row["median"]})
    return {"rows": rows}


def learnable(run: Run, batch: int, length: int) -> Tensor:
    """Bytes that follow from the byte before, except one random byte in eight; int64 (batch, length + 1)."""
    start = torch.randint(VOCABULARY, (batch, 1), device=run.device)
    text = (start + 7 * torch.arange(length + 1, device=run.device)) % VOCABULARY
    noise = torch.randint(VOCABULARY, text.shape, device=run.device)
    return torch.where(torch.rand(text.shape, device=run.device) < 1 / 8, noise, text)


def training_step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """A function that trains one step on a batch of text and returns the loss."""

    def train_step(text: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(run.device.type, torch.bfloat16, enabled=not run.cuda):  # on a CPU attention is fp32
            value = loss(model, text[:, :-1], text[:, 1:])
        value.backward()
        optimizer.step()
        return value

    return train_step


def append_loss(train_step: Callable[[Tensor], Tensor], text: Tensor, losses: list[Tensor]) -> None:
    """Runs one step and keeps its loss on the device."""
    losses.append(train_step(text))
