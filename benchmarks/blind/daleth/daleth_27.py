"""One block that is applied one to six times, drawn anew in each step; backward goes through the last two rounds alone."""
import dataclasses
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
VOCAB, LENGTH, WIDTH = 32, 24, 64
one, two = torch.randperm(VOCAB), torch.randperm(VOCAB)


def rows(count):
    """The follower depends on the last word, and on whether the one before was odd."""
    words = torch.randint(VOCAB, (count, 2))
    for _ in range(LENGTH - 2):
        odd = words[:, -2:-1] % 2 == 1
        words = torch.cat([words, torch.where(odd, one[words[:, -1:]], two[words[:, -1:]])], 1)
    return words


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 192, bias=False), nn.Linear(192, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = Block()
        self.inject = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.eye_(self.inject.weight)

    def forward(self, ids, rounds):
        start = self.words(ids) + self.places.weight
        x = start
        with torch.no_grad():
            for _ in range(rounds - 2):
                x = self.block(x + self.inject(start))
        for _ in range(min(rounds, 2)):
            x = checkpoint(self.block, x + self.inject(start), use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x))[:, 1:-1].flatten(0, 1), ids[:, 2:].flatten())


class Muon(torch.optim.Optimizer):
    """Steps of which all singular values are about 1."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 0.1)
                x = p.grad.lerp(m, 0.9)
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.t()
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                p.add_(x, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


net = Loop()
config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True)
convert_to_float8_training(net, config=config, module_filter_fn=lambda layer, name: name.startswith("block."))
matrices = [p for n, p in net.named_parameters() if n.startswith("block.") and p.ndim == 2]
rest = [p for n, p in net.named_parameters() if not (n.startswith("block.") and p.ndim == 2)]
optimizers = [Muon(matrices, 0.02), torch.optim.AdamW(rest, 4e-3)]
schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.02, 130) for o in optimizers]
held = rows(96)
with torch.no_grad():
    print("first loss %.4f" % net(held, 4).item())
for step in range(130):
    loss = net(rows(16), int(torch.randint(1, 7, ())))
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer, schedule in zip(optimizers, schedules):
        optimizer.step()
        schedule.step()
net.eval()
with torch.no_grad():
    print("rounds 1, 2, 6: " + ", ".join("%.3f" % net(held, r).item() for r in (1, 2, 6)))
    print("final loss %.4f" % net(held, 4).item())
