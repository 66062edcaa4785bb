"""A tiny Llama that has learned a text, and the view of it: what `evaluate` is tested on."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import torch

from ottava.nn.convert import convert
from ottava.serving.answers import View, blocks_of, decode_bytes, encode_bytes
from ottava.serving.export import export
from ottava.train.config import ModelConfig
from ottava.train.llama import as_llama
from ottava.train.model import ByteTransformer, loss

CONFIG = ModelConfig(d_model=128, layers=2, heads=2, kv_heads=2, ffn=128)
LENGTH = 32
TEXT = "".join(f"line {i}: {i * 7 % 10} and {i * i % 97} make {(i * 7 % 10 + i * i % 97)};\n" for i in range(160))
PROSE = (Path(__file__).resolve().parents[1] / "LICENSE").read_text(encoding="utf-8")[:1200]
"""Another task, which it has not learned."""


@functools.cache
def _learned() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = ByteTransformer(CONFIG, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    ids = torch.tensor(list(TEXT.encode()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        starts = torch.randint(0, len(ids) - LENGTH - 1, (16,), generator=generator)
        window = ids[starts[:, None] + torch.arange(LENGTH + 1)]
        loss(model, window[:, :-1], window[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def learned(recipe: str | None = None, **changes: float) -> ByteTransformer:
    """The model that has learned TEXT, under a recipe; a new object each time."""
    model = ByteTransformer(CONFIG.model_copy(update=changes), LENGTH)
    model.load_state_dict(_learned())
    if recipe is not None:
        convert(model, recipe)
    return model.eval()


def view(model: ByteTransformer, name: str = "model") -> View:
    """As `ottava train` computes."""
    source = as_llama(model, CONFIG, LENGTH)
    return View(name, model, blocks_of(model), source, encode_bytes, decode_bytes, mixed=True, longest=LENGTH)


def exported(layout: str, recipe: str | None = None, **options: object) -> Path:
    """A folder with the checkpoint of that model."""
    folder = Path(tempfile.mkdtemp()) / "out"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    export(as_llama(learned(recipe), CONFIG, LENGTH), folder, layout=layout, **options)  # type: ignore[arg-type]
    return folder
