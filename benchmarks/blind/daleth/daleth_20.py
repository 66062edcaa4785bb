"""A switch layer of eight experts, balanced without a loss: a bias, moved by hand, pushes tokens to idle experts."""
import os

import torch
import torch.nn.functional as F
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
EXPERTS, WIDTH, KINDS = 8, 64, 8
kinds = torch.randn(KINDS, WIDTH)
maps = torch.randn(KINDS, WIDTH, 32) / WIDTH**0.5


def tokens(count):
    """Kinds of tokens of very different frequency; each has its own map to the target."""
    kind = torch.multinomial(0.6 ** torch.arange(KINDS), count, replacement=True)
    x = kinds[kind] + torch.randn(count, WIDTH)
    return x, torch.einsum("nd,ndo->no", x, maps[kind])


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)) for _ in range(EXPERTS)
        )
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x):
        score = self.router(x).sigmoid()
        chosen = (score + self.bias).argmax(1)  # the bias chooses, the score weights
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):  # an expert may have no token at all
                out = out.index_add(0, rows, score[rows, i, None] * expert(x[rows]))
        self.load = torch.bincount(chosen, minlength=EXPERTS)
        return out

    @torch.no_grad()
    def balance(self, rate):
        self.bias += rate * (self.load.float().mean() - self.load).sign()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.switch, self.head = nn.LayerNorm(WIDTH), Switch(), nn.Linear(WIDTH, 32)

    def forward(self, x):
        return self.head(x + self.switch(self.norm(x)))


net = Net()
ottava.convert(net, "tensorwise", filter=lambda name, layer: "experts" in name)
optimizer = torch.optim.RMSprop(net.parameters(), 1e-3, alpha=0.95, momentum=0.5)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 20) * (1 - s / 260))
held = tokens(2000)
net.eval()
with torch.no_grad():
    print("first loss %.4f" % F.mse_loss(net(held[0]), held[1]).item())
net.train()
for step in range(260):
    x, y = tokens(256)
    loss = F.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    net.switch.balance(0.01 if step < 200 else 0.001)
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}, tokens {net.switch.load.tolist()}")
net.eval()
with torch.no_grad():
    print("final loss %.4f" % F.mse_loss(net(held[0]), held[1]).item())
