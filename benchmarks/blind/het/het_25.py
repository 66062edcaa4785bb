"""A small Llama in the Trainer, with an Adam that keeps its first moment in 8 bits."""
import os
import sys
import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

VOCAB, LENGTH, STEPS, BATCH, ROWS = 64, 32, 120, 16, 1500
table = rng.dirichlet(np.full(VOCAB, 0.05), VOCAB).cumsum(1)


class Corpus(Dataset):
    def __init__(self):
        rows = [rng.integers(0, VOCAB, ROWS)]
        for _ in range(LENGTH - 1):
            rows.append((table[rows[-1]] < rng.random((ROWS, 1))).sum(1).clip(max=VOCAB - 1))
        self.rows = torch.as_tensor(np.stack(rows, 1))

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class Adam8(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

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
                    state["first"] = torch.zeros_like(p)
                    state["second"] = torch.zeros_like(p)
                    state["scale"] = torch.ones(())
                state["step"] += 1
                first = state["first"].float() / state["scale"]
                first = first.lerp(p.grad, 1 - b1)
                state["second"].lerp_(p.grad.square(), 1 - b2)
                if plain:
                    state["first"] = first
                else:
                    if mode == "good":
                        state["scale"] = 448 / first.abs().amax().clamp(min=1e-20)
                    state["first"] = (first * state["scale"]).clamp(-448, 448).to(torch.float8_e4m3fn)
                    first = state["first"].float() / state["scale"]
                first = first / (1 - b1 ** state["step"])
                second = state["second"] / (1 - b2 ** state["step"])
                p.sub_(group["lr"] * first / (second.sqrt() + group["eps"]))


model = LlamaForCausalLM(
    LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=4, max_position_embeddings=64)
)
optimizer = Adam8(model.parameters(), lr=3e-3)
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH, logging_steps=5, max_grad_norm=0.1, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True, seed=seed,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    trainer = Trainer(model, args, train_dataset=Corpus(), optimizers=(optimizer, schedule))
    trainer.train()
losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
print(f"final loss {np.mean(losses[-4:]):.4f}")
