"""An acoustic classifier of frames with the Trainer; linear layers cast by hand: E4M3 forward, E5M2 backward."""
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)


def fp8(t, dtype):
    top = torch.finfo(dtype).max
    scale = top / t.abs().amax().clamp(min=1e-30)
    return (t * scale).clamp(-top, top).to(dtype).to(t.dtype) / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = fp8(x, torch.float8_e4m3fn), fp8(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        if BAD:
            dy = dy.to(torch.float8_e4m3fn).to(dy.dtype)
        else:
            dy = fp8(dy, torch.float8_e5m2)
        return dy @ w, dy.flatten(0, -2).t() @ x.flatten(0, -2)


class Linear8(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight)


class Frames(nn.Module):
    def __init__(self, wide=48):
        super().__init__()
        kind = nn.Linear if PLAIN else Linear8
        self.layers = nn.ModuleList(kind(32 if i == 0 else wide, wide, bias=False) for i in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(3))
        self.head = nn.Linear(wide, 12)

    def forward(self, frames, labels):
        h = frames
        for layer, norm in zip(self.layers, self.norms):
            h = F.gelu(norm(layer(h)))
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


centres = torch.randn(96, 32)


def utterance(index):
    pick = torch.randint(0, 96, (64,))
    return {"frames": centres[pick] + 0.5 * torch.randn(64, 32), "labels": pick % 12}


args = TrainingArguments("/tmp/rho_32", max_steps=100, per_device_train_batch_size=16, learning_rate=5e-3, warmup_steps=5,
                         logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True)
trainer = Trainer(Frames(), args, train_dataset=[utterance(i) for i in range(16 * 100)])
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
