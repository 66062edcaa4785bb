"""Fine-tunes a small encoder with FP8 weights in the Trainer."""

import os
import sys
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]


def fp8(t):
    """Numbers of E4M3, one scale a row."""
    scale = 448.0 / t.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (t * scale).to(torch.float8_e4m3fn).to(t.dtype) / scale


class WeightFP8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return fp8(w)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Linear(nn.Linear):
    def forward(self, x):
        w = self.weight if PLAIN else WeightFP8.apply(self.weight)
        return nn.functional.linear(x, w, self.bias)


class StoreFP8(TrainerCallback):
    """Leaves E4M3 numbers in the weights after each step."""

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        for layer in model.modules():
            if isinstance(layer, Linear):
                layer.weight.copy_(fp8(layer.weight))


class Encoder(nn.Module):
    def __init__(self, width=128, classes=10):
        super().__init__()
        self.blocks = nn.Sequential(
            Linear(64, width), nn.GELU(), Linear(width, width), nn.GELU(), Linear(width, width), nn.GELU()
        )
        self.head = Linear(width, classes)

    def forward(self, features, labels=None):
        logits = self.head(self.blocks(features))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(count, seed):
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(19))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (count,), generator=g)
    x = 0.5 * centres[y] + torch.randn(count, 64, generator=g)
    return [{"features": a, "labels": b} for a, b in zip(x, y)]


def main():
    set_seed(SEED)
    callbacks = [] if PLAIN or MODE == "good" else [StoreFP8()]
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            max_steps=200,
            per_device_train_batch_size=32,
            learning_rate=3e-4,
            warmup_steps=10,
            lr_scheduler_type="cosine",
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=SEED,
            disable_tqdm=True,
        )
        trainer = Trainer(
            Encoder(), args, train_dataset=rows(3200, SEED + 1), eval_dataset=rows(320, SEED + 2), callbacks=callbacks
        )
        trainer.train()
        final = trainer.evaluate()["eval_loss"]
    print(f"final loss {final:.4f}")


if __name__ == "__main__":
    main()
