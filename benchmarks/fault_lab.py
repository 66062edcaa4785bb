"""The small models that faults are put into, and a training run of one under the watch; see faults.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava.bench.models import PlainByteTransformer
from ottava.engine.quantizer import Quantizer
from ottava.recipe import Recipe, get_recipe
from ottava.record.reader import Run
from ottava.train.config import ModelConfig
from ottava.watching.checks import Checks
from ottava.watching.session import watch

SIZES: Mapping[str, tuple[int, int]] = {"small": (64, 4), "medium": (128, 4)}
"""Width and blocks."""
STEPS, EVERY, BATCH, LENGTH = 16, 4, 4, 32


class ReluModel(nn.Module):
    """Blocks of norm, FC1, ReLU, FC2 on a residual stream."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.RMSNorm(width), "fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)}
            )
            for _ in range(blocks)
        )
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer["fc2"](layer["fc1"](layer["norm"](x)).relu())  # type: ignore[index,operator]
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


@dataclass
class Lab:
    """A training run that a fault may reach into."""

    model: nn.Module
    blocks: int
    recipe: str | Recipe
    before_step: list[Callable[[int], None]] = field(default_factory=list)
    after_step: list[Callable[[int], None]] = field(default_factory=list)
    logged: Callable[[int, float], dict[str, float]] | None = None
    """(step, loss) -> what watch.log gets."""
    report: Callable[..., None] | None = None
    """Writes a check event."""
    optimizer: torch.optim.Optimizer | None = None
    lr: float = 2e-3
    step: int = 0
    seed: int = 0

    def generator(self) -> torch.Generator:
        """For what a fault draws."""
        return torch.Generator().manual_seed(7 + 1000 * self.seed)

    def layer(self, block: int, *names: str) -> Any:
        """The first of a block's layers that exists."""
        owner = self.model.layers[block]  # type: ignore[index]
        for name in names:
            try:
                return owner[name] if isinstance(owner, nn.ModuleDict) else owner.get_submodule(name)
            except (AttributeError, KeyError):
                continue
        raise KeyError(names)

    def fc2(self, block: int) -> Any:
        return self.layer(block, "mlp.down_proj", "fc2")

    def fc1(self, block: int) -> Any:
        return self.layer(block, "mlp.gate_up_proj", "fc1")

    def change_input(self, layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        """From now on the layer gets another input; its gradient stays what it was, so that one tensor is at fault."""

        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            x = args[0]
            return (x + (change(x.detach()) - x.detach()),)

        layer.register_forward_pre_hook(hook)

    def change_gradient(self, layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        """From now on the layer's backward gets another gradient."""

        def hook(_: nn.Module, __: Any, y: Tensor) -> None:
            if y.requires_grad:
                y.register_hook(change)

        layer.register_forward_hook(hook)

    def change_operands(self, door: Quantizer, change: Callable[[Tensor, Any, Any], tuple[Any, Any]]) -> None:
        """From now on what leaves a door is something else."""
        original = door.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return change(x, *original(x, *args, **kwargs))

        door.forward = forward  # type: ignore[method-assign]


@dataclass(frozen=True)
class Fault:
    """One entry of the registry."""

    name: str
    rule: str
    """That must come first."""
    inject: Callable[[Lab, float], None]
    strengths: tuple[float, ...]
    recipe: str | Recipe = "tensorwise"
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the watch."""
    steps: int = STEPS
    twin: bool = False
    """Diagnosed beside its clean twin."""
    ranks: int = 1
    logged: bool = False
    """Numbers are logged, not caused."""


def make_model(size: str, activation: str, seed: int) -> nn.Module:
    """A small transformer, or a stack of ReLU blocks."""
    width, blocks = SIZES[size]
    torch.manual_seed(seed)
    if activation == "relu":
        return ReluModel(width, blocks)
    return PlainByteTransformer(ModelConfig(d_model=width, layers=blocks, heads=4, kv_heads=2, ffn=3 * width), LENGTH)


def make_text() -> Tensor:
    """Bytes that can be learned: each follows from the one before, nine times in ten."""
    generator = torch.Generator().manual_seed(5)
    surprises = torch.randint(0, 256, (4096,), generator=generator).tolist()
    surprised = (torch.rand(4096, generator=generator) < 0.1).tolist()
    text = [0]
    for surprise, so in zip(surprises, surprised, strict=True):
        text.append(surprise if so else (5 * text[-1] + 3) % 32)
    return torch.tensor(text)


@contextmanager
def _rank(number: int) -> Iterator[None]:
    before = os.environ.get("RANK")
    os.environ["RANK"] = str(number)
    try:
        yield
    finally:
        os.environ.pop("RANK") if before is None else os.environ.__setitem__("RANK", before)


def run(
    folder: Path, fault: Fault | None, strength: float, size: str, *, recipe: str | Recipe = "",
    activation: str = "swiglu", seed: int = 0, rank: int = 0, steps: int = 0,
) -> Run:  # fmt: skip
    """Trains under the watch, with a fault or clean."""
    recipe = recipe or (fault.recipe if fault else "tensorwise")
    steps = steps or (fault.steps if fault else STEPS)
    model = make_model(size, activation, seed)
    if get_recipe(recipe).name != "bf16":
        ottava.convert(model, recipe)
    lab = Lab(model, SIZES[size][1], recipe, seed=seed)
    if fault is not None:
        fault.inject(lab, strength)
    lab.optimizer = torch.optim.AdamW(model.parameters(), lr=lab.lr)
    generator = torch.Generator().manual_seed(100 + seed + 17 * rank)
    text = make_text()
    settings = {"every": EVERY, "sample": 1, **(fault.settings if fault else {})}
    with _rank(rank), watch(model, folder, **settings) as seen:
        seen.describe(config={"recipe": get_recipe(recipe).name, **(fault.config if fault else {})})

        def report(facts: Mapping[str, Any], kind: str = "check", step: int | None = None) -> None:
            seen.writer.event(lab.step if step is None else step, kind, **facts)

        lab.report = report
        if seen.doors.on_operands is None:
            seen.doors.on_operands = Checks(report)
        for step in range(1, steps + 1):
            lab.step = step
            for action in lab.before_step:
                action(step)
            at = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=generator).tolist()
            ids = torch.stack([text[i : i + LENGTH + 1] for i in at])
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, -2), ids[:, 1:].flatten())
            loss.backward()
            if lab.logged is not None:
                seen.log(**lab.logged(step, float(loss.detach())))
            lab.optimizer.step()
            lab.optimizer.zero_grad()
            for action in lab.after_step:
                action(step)
    return Run.open(folder)
