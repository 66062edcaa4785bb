"""Forecasts of a load as quantiles, 1 % to 99 %, under the Trainer with a model of our own.

The pinball loss of the outer quantiles has a gradient of nearly one sign, and the loss cannot reach 0 as the load is
noisy. Rows with a failed meter are masked out.
"""

import os
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import ottava

SEED = int(os.environ.get("SEED", "0"))
HOURS, AHEAD = 48, 12
LEVELS = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99])


class Forecast(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(HOURS, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, width), nn.GELU(),
        )
        self.middle = nn.Linear(width, AHEAD)
        self.steps = nn.Linear(width, AHEAD * (len(LEVELS) - 1))

    def forward(self, past, labels=None, valid=None):
        h = self.inner(past)
        # the gaps between quantiles are positive, so quantiles cannot cross
        gaps = nn.functional.softplus(self.steps(h)).view(-1, AHEAD, len(LEVELS) - 1)
        middle = self.middle(h)[..., None]
        low = middle - gaps[..., :2].flip(-1).cumsum(-1).flip(-1)
        high = middle + gaps[..., 2:].cumsum(-1)
        quantiles = torch.cat([low, middle, high], -1)
        error = labels[..., None] - quantiles
        pinball = torch.maximum(LEVELS * error, (LEVELS - 1) * error).mean(-1)
        return {"loss": (pinball * valid).sum() / valid.sum().clamp(min=1), "quantiles": quantiles}


def days(count: int, g: torch.Generator) -> list[dict]:
    hour = torch.arange(HOURS + AHEAD) / 24 * 2 * torch.pi
    phase = torch.rand(count, 1, generator=g) * 2 * torch.pi
    size = 0.5 + torch.rand(count, 1, generator=g) * 2
    clean = size * torch.sin(hour + phase) + 0.4 * torch.sin(2 * hour + 2 * phase)
    spread = 0.05 + 0.2 * clean.relu()
    load = clean + spread * torch.randn(clean.shape, generator=g)
    valid = (torch.rand(count, AHEAD, generator=g) < 0.8).float()
    return [{"past": a, "labels": b, "valid": v} for a, b, v in zip(load[:, :HOURS], load[:, HOURS:], valid)]


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED + 1)
    train, held = days(4096, g), days(512, g)
    model = Forecast()
    ottava.convert(model, "blockwise", filter=lambda name, layer: name.startswith("inner"))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=200, per_device_train_batch_size=64, per_device_eval_batch_size=256, learning_rate=3e-3,
            lr_scheduler_type="cosine", warmup_steps=10, max_grad_norm=0.1, logging_steps=25, save_strategy="no",
            report_to=[], seed=SEED, use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
        )
        trainer = Trainer(model, args, train_dataset=train, eval_dataset=held)
        print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
        trainer.train()
        print(f"final loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
