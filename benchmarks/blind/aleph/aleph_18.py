"""A mixture of experts with two of eight experts for a token; routing noise and the weight of the balance loss fade while it trains."""
import os

import torch
from torch import nn
from torch.nn import functional as F

import ottava

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
WIDTH, EXPERTS, TOP, STEPS, VOCABULARY = 64, 8, 2, 200, 64


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x, noise):
        logits = self.gate(x)
        if self.training:
            logits = logits + noise * torch.randn_like(logits)
        probability = logits.softmax(-1)
        weight, chosen = probability.topk(TOP, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, slot = (chosen == number).nonzero(as_tuple=True)
            if len(row):  # an expert without a token has no gradient in this step
                out = out.index_add(0, row, expert(x[row]) * weight[row, slot, None])
        share = F.one_hot(chosen, EXPERTS).float().mean((0, 1))
        return out, EXPERTS * (share * probability.mean(0)).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, noise):
        h, _ = self.mix(self.embed(tokens))
        flat = h.reshape(-1, WIDTH)
        out, balance = self.experts(self.norm(flat), noise)
        return self.head(flat + out), balance


def batch(generator, rows=32, length=24):
    """Each row speaks one of four languages: the next token is a fixed shuffle of this one, or in a tenth of the cases any."""
    language = torch.randint(0, 4, (rows,), generator=generator)
    tokens = torch.empty(rows, length + 1, dtype=torch.long)
    tokens[:, 0] = torch.randint(0, 16, (rows,), generator=generator) + 16 * language
    for i in range(length):
        follow = SHUFFLES[language, tokens[:, i]]
        stray = torch.rand(rows, generator=generator) < 0.1
        tokens[:, i + 1] = torch.where(stray, torch.randint(0, VOCABULARY, (rows,), generator=generator), follow)
    return tokens[:, :-1], tokens[:, 1:].reshape(-1)


generator = torch.Generator().manual_seed(SEED + 1)
SHUFFLES = torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(4)])
model = Model()
print(ottava.convert(model, "blockwise_fp32", filter=lambda name, layer: "experts.experts" in name))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=0.0)
losses = []
for step in range(STEPS):
    left = 1 - step / STEPS
    tokens, follow = batch(generator)
    out, balance = model(tokens, noise=left)
    loss = F.cross_entropy(out, follow) + 0.05 * left * balance
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} balance {balance.item():.3f}")

print(f"first loss {losses[0]:.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
