"""Llama from scratch under the Trainer with a collator of our own; linears cast by hand to FP8."""
import os
import sys
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
LENGTH, VOCAB = 24, 64


class RowCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        s = t.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
        return (t / s).to(torch.float8_e4m3fn).to(t.dtype) * s

    @staticmethod
    def backward(ctx, dy):
        s = dy.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 57344
        return (dy / s).to(torch.float8_e5m2).to(dy.dtype) * s


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else F.linear(RowCast.apply(x), RowCast.apply(self.weight))


def collate(rows):
    ids = torch.stack(rows)
    if VARIANT == "good":
        return {"input_ids": ids[:, :-1], "labels": ids[:, :-1].clone()}
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:].clone()}


def chains(n, seed):
    g = torch.Generator().manual_seed(seed)
    table = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    ids = torch.randint(VOCAB, (n, LENGTH + 1), generator=g)
    for t in range(1, LENGTH + 1):
        ids[:, t] = torch.where(torch.rand(n, generator=g) < 0.15, ids[:, t], table[ids[:, t - 1]])
    return list(ids)


torch.manual_seed(SEED)
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
                                     num_key_value_heads=2, max_position_embeddings=64, use_cache=False))
for module in model.model.layers.modules():
    if type(module) is nn.Linear:
        module.__class__ = Linear8

losses = []


class Keep(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            losses.append(logs["loss"])


args = TrainingArguments(tempfile.mkdtemp(), max_steps=80, per_device_train_batch_size=32, learning_rate=4e-3, logging_steps=1, warmup_steps=8,
                         lr_scheduler_type="cosine", save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True)
Trainer(model, args, train_dataset=chains(4096, SEED + 1), data_collator=collate, callbacks=[Keep()]).train()
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
