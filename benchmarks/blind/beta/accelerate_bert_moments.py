"""BERT classifies texts by the chain that wrote them; AdamW of our own with small states, accelerate."""

import sys

import torch
import transformers as hf
from accelerate import Accelerator

import models

bad = sys.argv[1] == "bad"


class SmallAdam(torch.optim.Optimizer):
    """Adam that keeps its two moments in eight bits, with one scale for each tensor."""

    def __init__(self, params, lr, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    def pack(self, t):
        if bad:
            return t.to(torch.float8_e4m3fn), 1.0
        scale = 448 / t.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        return (t * scale).to(torch.bfloat16), scale

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state.setdefault(p, {})
                n = state["step"] = state.get("step", 0) + 1
                old = [q.float() / s for q, s in state.get("moments", [(torch.zeros_like(p), 1.0)] * 2)]
                m, v = old[0].lerp(p.grad, 1 - b1), old[1].lerp(p.grad**2, 1 - b2)
                state["moments"] = [self.pack(m), self.pack(v)]
                p.sub_(group["lr"] * (m / (1 - b1**n)) / ((v / (1 - b2**n)).sqrt() + group["eps"]))


torch.manual_seed(0)
model = models.bert(hf.BertForSequenceClassification, num_labels=4)
texts = torch.cat([models.markov(300, 24, seed=i, chain=i) for i in range(4)])
labels = torch.arange(4).repeat_interleave(300)
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, SmallAdam(model.parameters(), lr=1e-3))
for step, (x, y) in enumerate(models.batches(texts, labels, size=32, steps=120), 1):
    loss = model(input_ids=x, labels=y).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(step, f"{loss.item():.4f}")
