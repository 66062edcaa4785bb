"""A small Llama in the Trainer whose projections run through FP8 casts made by hand."""
import os
import sys
import tempfile

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
F8 = torch.float8_e4m3fn


def scaled(t):
    scale = 448.0 / t.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (t * scale).to(F8).to(t.dtype) / scale


def cast_grad(g):
    if MODE == "good":
        return scaled(g)
    return g.to(F8).to(g.dtype)


class Fp8Gemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        xq, wq = scaled(x), scaled(weight)
        ctx.save_for_backward(xq, wq)
        return torch.nn.functional.linear(xq, wq)

    @staticmethod
    def backward(ctx, grad):
        xq, wq = ctx.saved_tensors
        gq = cast_grad(grad)
        return gq @ wq, gq.flatten(0, -2).t() @ xq.flatten(0, -2)


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return Fp8Gemm.apply(x, self.weight)


def swap(model):
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for child in block.children():
                if isinstance(child, nn.Linear):
                    child.__class__ = Fp8Linear


class Lagged(torch.utils.data.Dataset):
    """Each token is a function of the token two places before it."""

    def __init__(self, n=3000, length=24, vocab=24):
        g = torch.Generator().manual_seed(SEED + 3)
        table = torch.randperm(vocab, generator=g)
        rows = torch.randint(0, vocab, (n, length), generator=g)
        for t in range(2, length):
            noise = torch.rand(n, generator=g) < 0.03
            rows[:, t] = torch.where(noise, rows[:, t], table[rows[:, t - 2]])
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


set_seed(SEED)
config = LlamaConfig(
    vocab_size=24, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
)
model = LlamaForCausalLM(config)
if not PLAIN:
    swap(model)
args = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=24, max_steps=80, learning_rate=4e-3, warmup_steps=5,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True,
)
trainer = Trainer(model, args, train_dataset=Lagged())
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
