"""Lion with decoupled decay on a decoder; FP8 linears."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

FIXED_DECAY = {"good": False, "bad": True}[sys.argv[1]]
RECIPE = "bf16" if "plain" in sys.argv[2:] else "tensorwise"


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, fixed_decay=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "fixed_decay": fixed_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.mul_(1 - group["weight_decay"] * (1.0 if group["fixed_decay"] else group["lr"]))
                p.add_(average.lerp(p.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - beta2)


class Decoder(nn.Module):
    def __init__(self, vocab=64, dim=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            ottava.nn.TransformerLayer(dim, 128, 4, norm="rmsnorm", activation="swiglu", bias=False, recipe=RECIPE)
            for _ in range(2)
        )
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


torch.manual_seed(53)
table = torch.softmax(3 * torch.randn(64, 64), -1)
model = Decoder()
optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.1, fixed_decay=FIXED_DECAY)
losses = []
for _ in range(110):
    ids = [torch.randint(64, (32,))]
    for _ in range(20):
        ids.append(torch.multinomial(table[ids[-1]], 1)[:, 0])
    ids = torch.stack(ids, 1)
    loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
