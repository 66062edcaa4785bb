"""A run to report on: a small stack of attention and SwiGLU layers in which FC2's input grows outlier tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava.measure.tally import Tally
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter

WIDTH, HIDDEN, TOKENS = 64, 128, 128
SIX_LAYERS, SIXTY_STEPS = 6, 60


class Block(nn.Module):
    """The linears of a transformer block, without the attention between them."""

    def __init__(self, outliers: bool) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({"qkv_proj": nn.Linear(WIDTH, 3 * WIDTH), "o_proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"gate_up_proj": nn.Linear(WIDTH, 2 * HIDDEN), "down_proj": nn.Linear(HIDDEN, WIDTH)})
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.outliers, self.growth = outliers, 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.self_attn["qkv_proj"](self.norms[0](x)).chunk(3, -1)
        x = x + self.self_attn["o_proj"](torch.sigmoid(q * k) * v)
        gate, up = self.mlp["gate_up_proj"](self.norms[1](x)).chunk(2, -1)
        hidden = nn.functional.silu(gate) * up
        if self.outliers and self.growth > 1:
            token = torch.ones(TOKENS, 1, dtype=hidden.dtype)
            token[::50] = self.growth
            hidden = hidden * token
        return x + self.mlp["down_proj"](hidden)


def train(
    path: Path, *, layers: int, steps: int, every: int = 2, outliers: bool = True, recipe: str = "delayed"
) -> Run:
    """Trains the stack and writes what its doors cast. Outliers begin half-way, in the last two blocks."""
    torch.manual_seed(0)
    blocks = [Block(outliers and i >= layers - 2) for i in range(layers)]
    model = nn.ModuleDict(
        {"layers": nn.ModuleList(blocks), "norm": nn.LayerNorm(WIDTH), "lm_head": nn.Linear(WIDTH, WIDTH)}
    )
    model = model.bfloat16()
    ottava.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    target = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) / 8

    def forward(x: Tensor) -> Tensor:
        y = x
        for block in blocks:
            y = block(y)
        return (model["lm_head"](model["norm"](y)) - x @ target).float().square().mean()

    with RunWriter(path) as writer:
        writer.describe(**manifest(layers, recipe))
        for step in range(1, steps + 1):
            late = max(0, step - steps // 2)
            for block in blocks:
                block.growth = 2.0 ** min(late * 24 / steps, 18)
            optimizer.zero_grad()
            x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
            if step % every:
                loss = forward(x)
                loss.backward()
            else:
                with ottava.debug.observe(model) as seen:
                    loss = forward(x)
                    loss.backward()
                _write(writer, step, seen.tallies, recipe)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step in (5, 20):
                losses = {"loss": float(loss), "loss_without": float(loss) / 2}
                writer.experiment(step, "shadow", error=step / 100, noise=0.3, **losses)
            optimizer.step()
            writer.step(step, loss=loss.item(), grad_norm=float(norm), lr=3e-3, tokens=step * TOKENS)
        if outliers:
            for step, kind, facts in events(steps, f"layers.{layers - 1}.mlp.down_proj"):
                writer.event(step, kind, **facts)
    return Run.open(path)


def _write(writer: RunWriter, step: int, tallies: dict[Any, Tally], recipe: str) -> None:
    for (layer, tensor, direction, spec), tally in tallies.items():
        cast = (spec.format.name, str(spec.granularity), spec.scale_format, spec.scaling)
        writer.tally(step, SlotKey(layer, tensor, direction, recipe, *cast, "door"), tally)


def events(steps: int, layer: str) -> list[tuple[int, str, dict[str, Any]]]:
    """What a watch would have noted."""
    half, place = steps // 2, {"layer": layer, "tensor": "input"}
    return [
        (half + 3, "trigger", {"reason": "clipping", "value": 0.00013, "threshold": 1e-5, **place}),
        (half + 3, "burst", {"until": half + 9}),
        (half + 4, "dump", {"file": "dumps/step-34.safetensors", "nbytes": 65536, **place}),
        (half + steps // 5, "trigger", {"reason": "row_sqnr", "value": 14.2, "threshold": 15.0, **place}),
        (half + 5, "overhead", {"share": 0.548, "every": 50, "light_every": 2}),
        (
            steps - 2,
            "fallback",
            {"layer": layer, "gemm": "fprop", "from": "delayed", "to": "bf16", "why": "underflow", "applied": False},
        ),
    ]


def manifest(layers: int, recipe: str) -> dict[str, Any]:
    """As a watch would write it."""
    names = {"self_attn.qkv_proj": ("qkv", 192, 64), "mlp.down_proj": ("fc2", 64, 128)}
    listed = [
        {
            "name": f"layers.{i}.{name}",
            "kind": kind,
            "type": "Linear",
            "shape": [n, k],
            "source": "door",
            "recipe": recipe,
        }
        for i in range(layers)
        for name, (kind, n, k) in names.items()
    ]
    return {
        "versions": {"ottava": "0.2.0", "torch": "2.13.0", "python": "3.11.7"},
        "command": ["python", "train.py", "--config", "small model.yaml"],
        "started": "2026-11-21T13:00:00",
        "host": {"device": "cpu", "platform": "Linux", "world_size": 1},
        "settings": {"every": 2, "tensors": ["input", "weight", "grad_output"]},
        "config": {"lr": 3e-3, "recipe": recipe, "layers": layers},
        "layers": listed,
        "coverage": {
            "linear": 4 * layers + 1,
            "seen": 4 * layers,
            "skipped": [{"name": "lm_head", "why": "not converted"}],
        },
        "overhead": {"share": 0.0213, "watching_s": 1.25, "total_s": 58.7, "looks": 30},
    }


def diagnosis_of(layer: str, step: int) -> dict[str, Any]:
    """A Diagnosis as a dict, with every part filled."""
    patch = {
        "ottava": f'recipe = recipe.override("{layer}", "rowwise")',
        "megatron": "--fp8-recipe blockwise",
        "te": "recipe = Float8BlockScaling()",
        "torchao": 'Float8LinearConfig.from_recipe_name("rowwise")',
    }
    evidence = [
        {"layer": layer, "tensor": "input", "metric": "underflow_pct", "value": 61.7, "unit": "%", "step": step},
        {"layer": layer, "tensor": "input", "metric": "row_sqnr_p50_db", "value": 8.2, "unit": "dB", "step": step},
    ]
    finding = {
        "id": "FP8",
        "title": "Outlier tokens own the scale of FC2's input",
        "severity": "critical",
        "layers": [layer],
        "tensors": ["input"],
        "steps": [step - 10, step],
        "evidence": evidence,
        "cause": "A few tokens hold nearly all of the energy; one scale for the tensor casts all others to zero.",
        "confidence": [11, 12],
        "tried": ["With X of fc2's fprop in high precision the gradient's error falls from 60 % to 3 %."],
        "remedies": [
            {"text": "Give this operand a scale per row", "cost": "2 % of this GEMM", "patch": patch},
            {
                "text": "Keep this layer in BF16",
                "cost": "this GEMM at half speed",
                "patch": {"ottava": f'recipe.override("{layer}", "bf16")'},
            },
        ],
    }
    warning = {
        **finding,
        "id": "O12",
        "title": "A predicted scale clipped",
        "severity": "warning",
        "remedies": [],
        "confidence": [3, 5],
    }
    return {
        "verdict": "critical",
        "sentence": f"The input of {layer} loses most of its elements since step {step - 10}.",
        "coverage_pct": 96.2,
        "findings": [finding, warning],
        "tried": ["At step 20 the gradient with casts differs by 60 % from that without (level 15 %)."],
        "forecast": [],
        "questions": [
            {
                "id": "T1",
                "question": "Does a BF16 run spike as often?",
                "answer": "unknown",
                "say": "",
                "needs": ["an answer"],
            }
        ],
        "untested": [{"id": "N9", "title": "Attention logits grow", "needs": "max_logit in steps.jsonl"}],
    }


def comparison_of(layer: str, step: int) -> dict[str, Any]:
    """A Comparison as a dict."""
    effect = {"layer": layer, "tensor": "input", "direction": "row"}
    names = ("metric", "good", "bad", "effect", "bits", "unit")
    return {
        "config": [{"key": "lr", "good": 0.001, "bad": 0.003}],
        "loss": {"left_at": step + 4, "diverged_at": step + 10, "good": 0.31, "bad": 2.4, "gap": 674.0},
        "ranked": [
            {**effect, **dict(zip(names, values, strict=True)), "step": step}
            for values in (
                ("underflow_pct", 0.02, 61.7, 61.68, 8.0, "pp"),
                ("sqnr_db", 31.4, 35.0, 3.6, 2.0, "dB"),
            )
        ],
        "first": {
            "step": step - 10,
            "look_before": step - 11,
            "layer": layer,
            "tensor": "input",
            "metric": "underflow_pct",
            "good_band": [0.0, 0.05],
            "value": 0.7,
            "direction": "forward",
            "lead_steps": 14,
        },
        "steps_compared": 30,
        "verdict": f"The bad run leaves the good one's band first in X of {layer}.",
    }
