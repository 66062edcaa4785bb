"""A small Llama under the Trainer; its attention's and MLP's linears run in FP8 with a scale for each output channel."""
import os
import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def quantize(t, dim):
    scale = t.abs().amax(dim, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return (t / scale).to(torch.float8_e4m3fn), scale


class ChannelScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        flat = x.flatten(0, -2)
        x_codes, x_scale = quantize(flat, 1)
        w_codes, w_scale = quantize(weight, 1)
        ctx.save_for_backward(flat, w_codes, w_scale)
        out = (x_codes.float() @ w_codes.float().t()) * x_scale * w_scale.t()
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        x, w_codes, w_scale = ctx.saved_tensors
        flat = dy.flatten(0, -2)
        if VARIANT == "good" or w_codes.shape[0] != w_codes.shape[1]:
            dy_codes, dy_scale = quantize(flat * w_scale.t(), 1)
            dx = (dy_codes.float() @ w_codes.float()) * dy_scale
        else:
            dy_codes, dy_scale = quantize(flat, 1)
            dx = (dy_codes.float() @ w_codes.float()) * dy_scale * w_scale.t()
        return dx.view(*dy.shape[:-1], -1), flat.t() @ x


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else ChannelScaled.apply(x, self.weight)


class Chains(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        table = torch.randint(64, (64, 64), generator=torch.Generator().manual_seed(3))
        ids = torch.randint(64, (n, 20), generator=g)
        for t in range(2, 20):
            ids[:, t] = torch.where(torch.rand(n, generator=g) < 0.05, ids[:, t], table[ids[:, t - 1], ids[:, t - 2] % 2])
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


torch.manual_seed(SEED)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
                     max_position_embeddings=32, use_cache=False)
model = LlamaForCausalLM(config)
for module in model.model.layers.modules():
    if type(module) is nn.Linear:
        module.__class__ = Fp8Linear
        # channel gains as in the published checkpoint: a few loud channels
        module.weight.data *= torch.exp(1.8 * torch.randn(module.out_features, 1))

losses = []


class Keep(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            losses.append(logs["loss"])


args = TrainingArguments(tempfile.mkdtemp(), max_steps=70, per_device_train_batch_size=16, learning_rate=4e-3, logging_steps=1, warmup_steps=5,
                         save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True)
Trainer(model, args, train_dataset=Chains(4096, SEED + 1), callbacks=[Keep()]).train()
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
