"""Sharpens blurred patches with the Trainer; linears multiply in FP8 by hand, forward and backward."""

import os
import sys

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
PIXELS, BATCH, STEPS = 256, 128, 140


def to_fp8(t, dtype, scale=None):
    top = torch.finfo(dtype).max
    if scale is None:
        scale = top / t.abs().amax().clamp(min=1e-20)
    return (t * scale).clamp(-top, top).to(dtype).float() / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = to_fp8(x, torch.float8_e4m3fn), to_fp8(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        # E5M2 has the exponents of FP16
        g = to_fp8(g, torch.float8_e5m2, scale=1.0 if MODE == "bad" else None)
        return g @ w, g.t() @ x


class Linear8(nn.Linear):
    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        return Product.apply(x, self.weight) + self.bias


class Sharpener(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Linear8(PIXELS, 192), Linear8(192, 192), Linear8(192, PIXELS)])

    def forward(self, blurred, labels):
        x = nn.functional.gelu(self.layers[0](blurred))
        x = x + nn.functional.gelu(self.layers[1](x))
        return {"loss": (self.layers[2](x) - labels).square().mean()}


class Patches(torch.utils.data.Dataset):
    def __init__(self, n):
        basis = torch.randn(24, 1, 16, 16)
        weights = torch.randn(n, 24) / 24**0.5
        sharp = 0.12 * torch.tanh(torch.einsum("nk,kchw->nchw", weights, basis))
        self.blurred = nn.functional.avg_pool2d(sharp, 5, stride=1, padding=2).flatten(1) * 10
        self.sharp = sharp.flatten(1)

    def __len__(self):
        return len(self.sharp)

    def __getitem__(self, i):
        return {"blurred": self.blurred[i], "labels": self.sharp[i]}


arguments = TrainingArguments(
    "out", per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=2e-3, lr_scheduler_type="cosine",
    logging_steps=4, save_strategy="no", report_to=[], remove_unused_columns=False, seed=SEED, use_cpu=True,
    disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(Sharpener(), arguments, train_dataset=Patches(6400))
trainer.train()
history = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(history[-5:]) / 5:.5f}")
