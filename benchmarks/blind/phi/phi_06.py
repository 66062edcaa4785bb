"""Trainer with an Adam of our own that keeps its state in eight bits."""

import os
import sys
import tempfile

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, VOCAB, LENGTH = 80, 8, 384, 32


def pack(t, block):
    if plain or not block:
        return t.clone(), None
    rows = t.reshape(-1, block)
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    return (rows / scale).to(torch.float8_e4m3fn), scale


def unpack(codes, scale, shape):
    return codes.clone() if scale is None else (codes.float() * scale).reshape(shape)


class Adam8(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = pack(torch.zeros_like(p), 64)
                    state["exp_avg_sq"] = pack(torch.zeros_like(p), p.numel() if bad else 0)
                state["step"] += 1
                m = unpack(*state["exp_avg"], p.shape).lerp_(p.grad, 1 - b1)
                v = unpack(*state["exp_avg_sq"], p.shape).lerp_(p.grad.square(), 1 - b2)
                state["exp_avg"], state["exp_avg_sq"] = pack(m, 64), pack(v, p.numel() if bad else 0)
                m, v = unpack(*state["exp_avg"], p.shape), unpack(*state["exp_avg_sq"], p.shape)
                rate = group["lr"] / (1 - b1 ** state["step"])
                p.addcdiv_(m, (v / (1 - b2 ** state["step"])).sqrt().add_(group["eps"]), value=-rate)


torch.manual_seed(SEED)
zipf = 1 / torch.arange(1.0, VOCAB + 1)
following = torch.multinomial(zipf, VOCAB * 3, replacement=True).view(VOCAB, 3)


def sequence():
    ids = [int(torch.multinomial(zipf, 1))]
    for pick in torch.randint(0, 3, (LENGTH - 1,)).tolist():
        ids.append(int(following[ids[-1], pick]))
    return torch.tensor(ids)


data = [{"input_ids": ids, "labels": ids} for ids in (sequence() for _ in range(STEPS * BATCH))]
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
)
optimizer = Adam8(model.parameters(), lr=3e-3)
schedule = transformers.get_constant_schedule_with_warmup(optimizer, 5)
args = TrainingArguments(
    tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, logging_steps=10, logging_nan_inf_filter=False, seed=SEED,
)
trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, schedule))
trainer.train()
print("final loss", [line["loss"] for line in trainer.state.log_history if "loss" in line][-1])
