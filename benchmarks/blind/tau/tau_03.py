"""Curriculum of lengths (8, 16, 32 tokens) under the Trainer, at a constant learning rate; FP8 linears by hand."""
import os
import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

PLAIN, SEED = "plain" in sys.argv, int(os.environ.get("SEED", 0))
VOCAB, STEPS, BATCH = 64, 81, 16


class Matmul8(torch.autograd.Function):
    @staticmethod
    def q(t, dim, dtype=torch.float8_e4m3fn, top=448.0):
        s = t.abs().amax(dim, keepdim=True).clamp_min(1e-20) / top
        return (t / s).to(dtype).to(t.dtype) * s

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return Matmul8.q(x, -1) @ Matmul8.q(w, -1).t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        x, dy2 = x.flatten(0, -2), dy.flatten(0, -2)
        dx = Matmul8.q(dy2, -1, torch.float8_e5m2, 57344.0) @ Matmul8.q(w, 0)
        return dx.view(*dy.shape[:-1], -1), Matmul8.q(dy2, 0, torch.float8_e5m2, 57344.0).t() @ Matmul8.q(x, 0)


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Matmul8.apply(x, self.weight)


class Curriculum(Dataset):
    """Items in the order of training. A text starts with noise, so short ones are harder."""

    def __init__(self, seed):
        g = torch.Generator().manual_seed(seed)
        table = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(23))
        self.rows = []
        for step in range(STEPS):
            length = 8 * 2 ** (step // (STEPS // 3))
            ids = torch.randint(VOCAB, (BATCH, length), generator=g)
            for t in range(4, length):
                ids[:, t] = torch.where(torch.rand(BATCH, generator=g) < 0.1, ids[:, t], table[ids[:, t - 1]])
            self.rows += [{"input_ids": row, "labels": row} for row in ids]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Ordered(Trainer):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset if dataset is None else dataset)


torch.manual_seed(SEED)
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                     num_key_value_heads=4, max_position_embeddings=64, use_cache=False))
for module in model.model.layers.modules():
    if type(module) is nn.Linear:
        module.__class__ = Linear8
losses = []


class Keep(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            losses.append(logs["loss"])


args = TrainingArguments(tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=4e-3, logging_steps=1, warmup_steps=8,
                         lr_scheduler_type="constant_with_warmup", save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True)
Ordered(model, args, train_dataset=Curriculum(SEED + 1), callbacks=[Keep()]).train()
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
