"""The Trainer with an AdamW that keeps its moments in 8 bits."""
import os
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


class State8:
    """A tensor in E4M3 with one scale."""

    def __init__(self, like):
        self.codes, self.scale = torch.zeros_like(like, dtype=torch.float8_e4m3fn), torch.ones(())

    def load(self):
        return self.codes.float() * self.scale

    def store(self, value):
        self.scale = (value.abs().amax() / 448).clamp(min=1e-30)
        self.codes = (value / self.scale).to(torch.float8_e4m3fn)


class State32:
    def __init__(self, like):
        self.value = torch.zeros_like(like)

    def load(self):
        return self.value

    def store(self, value):
        self.value = value


class AdamW8(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
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
                    state["t"] = 0
                    state["m"] = State32(p) if PLAIN else State8(p)
                    state["v"] = State32(p) if PLAIN or MODE == "good" else State8(p)
                state["t"] += 1
                m = state["m"].load() * b1 + p.grad * (1 - b1)
                v = state["v"].load() * b2 + p.grad.square() * (1 - b2)
                state["m"].store(m)
                state["v"].store(v)
                m, v = state["m"].load(), state["v"].load()
                m, v = m / (1 - b1 ** state["t"]), v / (1 - b2 ** state["t"])
                p.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))


class Text(torch.utils.data.Dataset):
    def __init__(self, n=2000, length=20, vocab=40):
        g = torch.Generator().manual_seed(SEED + 11)
        after = torch.randint(0, vocab, (vocab, 2), generator=g)
        rows = torch.zeros(n, length, dtype=torch.long)
        rows[:, 0] = torch.randint(0, vocab, (n,), generator=g)
        for t in range(1, length):
            pick = (torch.rand(n, generator=g) < 0.2).long()
            rows[:, t] = after[rows[:, t - 1], pick]
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


set_seed(SEED)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=40, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
)
optimizer = AdamW8(model.parameters(), lr=3e-3)
args = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=16, max_steps=80, logging_steps=1, save_strategy="no",
    report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True,
)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
trainer = Trainer(model, args, train_dataset=Text(), optimizers=(optimizer, schedule))
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
