"""Switches from BF16 to delayed scaling, with and without calibration: `python examples/resume_from_bf16.py`.

Trains the demo's byte model in BF16, then continues four times on the same batches: in BF16, and under delayed scaling
that starts from calibrated histories, from the current scale (ottava's default), or from scale 1 (as TransformerEngine
does). Prints the loss of each step minus that of BF16, and the share of the first gradients that the cast turned into
zeros.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace

import torch

import ottava
from ottava.train.config import load_config
from ottava.train.data import ByteCorpus
from ottava.train.model import ByteTransformer, loss

SETTINGS = load_config(None, [])


def bare(recipe: ottava.Recipe) -> ottava.Recipe:
    """The recipe that starts at scale 1: without a history it uses neither a prediction nor the current scale."""
    gemms = {
        name: replace(gemm, lhs=replace(gemm.lhs, bootstrap=False), rhs=replace(gemm.rhs, bootstrap=False))
        for name in ("fprop", "dgrad", "wgrad")
        if (gemm := getattr(recipe, name)).lhs and gemm.rhs
    }
    return replace(recipe, name=f"{recipe.name} from scale 1", **gemms)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, corpus: ByteCorpus, steps: range) -> list[float]:
    """Trains these steps and returns their losses."""
    losses = []
    for step in steps:
        inputs, targets = corpus.batch(seed=0, step=step, batch_size=16, length=64)
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, inputs, targets)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, step / 50)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """The optimizer of every run."""
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)


def main(before: int = 150, after: int = 6) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Prints the table. Returns the losses, and the percentage of zeros in the cast of the first gradients."""
    torch.manual_seed(0)
    corpus = ByteCorpus.load(SETTINGS.data)
    model = ByteTransformer(SETTINGS.model, 64)
    optimizer = adamw(model)
    train(model, optimizer, corpus, range(1, before + 1))
    weights, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    delayed = ottava.RECIPES["delayed"]
    starts = {
        "bf16": ottava.RECIPES["bf16"],
        "calibrated": bare(delayed),
        "current scale first": delayed,
        "scale 1 first": bare(delayed),
    }
    losses: dict[str, list[float]] = {}
    flushed: dict[str, float] = {}
    for name, recipe in starts.items():
        model = ByteTransformer(SETTINGS.model, 64)
        model.load_state_dict(weights)
        ottava.convert(model, recipe)
        optimizer = adamw(model)
        optimizer.load_state_dict(copy.deepcopy(moments))  # load_state_dict keeps the tensors, so each run needs a copy
        if name == "calibrated":
            batches = [corpus.batch(seed=1, step=s, batch_size=16, length=64) for s in range(1, 5)]
            with torch.autocast("cpu", torch.bfloat16):
                ottava.calibrate(model, batches, loss=lambda net, batch: loss(net, *batch))
        with ottava.debug.observe(model) as observation:
            first = train(model, optimizer, corpus, range(before + 1, before + 2))
        flushed[name] = max(
            (row["underflow_pct"] for row in observation.table() if row["tensor"] == "grad_output"), default=0
        )
        losses[name] = first + train(model, optimizer, corpus, range(before + 2, before + after + 1))
    print(f"loss after {before} steps in BF16, minus that of the continued BF16 run (nats per byte)\n")
    print(f"{'step':22}" + "".join(f"{before + 1 + i:>9}" for i in range(after)) + "   first dY cast to zero")
    print(f"{'bf16 itself':22}" + "".join(f"{value:9.4f}" for value in losses["bf16"]))
    for name in list(starts)[1:]:
        gaps = (value - reference for value, reference in zip(losses[name], losses["bf16"], strict=True))
        print(f"{name:22}" + "".join(f"{gap:+9.4f}" for gap in gaps) + f"   {flushed[name]:.2f} % (worst layer)")
    return losses, flushed


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
