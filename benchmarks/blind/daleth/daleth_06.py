"""Counts from 0 to some thousands under the Trainer with the Poisson loss; FP8 casts by hand in the hidden layers."""
import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)


def round_to(x, dtype):
    top = torch.finfo(dtype).max
    scale = x.abs().amax().clamp(min=1e-12) / top
    return (x / scale).clamp(-top, top).to(dtype).to(x.dtype) * scale


class FP8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x, weight = round_to(x, torch.float8_e4m3fn), round_to(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = round_to(grad, torch.float8_e5m2)
        return grad @ weight, grad.t() @ x


class FP8Linear(nn.Linear):
    def forward(self, x):
        return FP8Matmul.apply(x, self.weight) + self.bias


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, 128), nn.SiLU(), FP8Linear(128, 128), nn.SiLU(), FP8Linear(128, 128), nn.SiLU(), nn.Linear(128, 1)
        )

    def forward(self, x, labels=None):
        log_rate = self.net(x)[:, 0]
        return {"loss": F.poisson_nll_loss(log_rate, labels, log_input=True, full=False), "log_rate": log_rate}


mix = torch.randn(12, 6)


def rows(count):
    x = torch.randn(count, 12)
    hidden = (x @ mix / 3.5).tanh()
    log_rate = 3.5 + 2.0 * hidden[:, 0] + 1.5 * hidden[:, 1] * hidden[:, 2] - hidden[:, 3]
    y = torch.poisson(log_rate.exp())
    return [{"x": a, "labels": b} for a, b in zip(x, y)]


model = Counter()
with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out,
        max_steps=300,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=512,
        learning_rate=1e-3,
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=30,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=100,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = Trainer(model, args, train_dataset=rows(6000), eval_dataset=rows(1024))
    print("first loss %.3f" % trainer.evaluate()["eval_loss"])
    trainer.train()
    print("final loss %.3f" % trainer.evaluate()["eval_loss"])
