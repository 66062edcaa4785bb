"""Flow matching with classes that are dropped one time in ten: the loss falls little, the samples get better."""
import os

import torch
import torch.nn.functional as F
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
CLASSES, STEPS, WIDTH = 4, 220, 128


def data(count):
    """Four arms of a spiral."""
    label = torch.randint(CLASSES, (count,))
    radius = 0.3 + 1.7 * torch.rand(count)
    angle = label * 1.5708 + radius
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1) + 0.05 * torch.randn(count, 2), label


class Velocity(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("waves", torch.randn(3, 32) * 1.2)
        self.classes = nn.Embedding(CLASSES + 1, WIDTH)  # the last row means no class
        self.enter = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )
        self.leave = nn.Linear(WIDTH, 2)
        nn.init.zeros_(self.leave.weight)

    def forward(self, x, time, label):
        angle = torch.cat([x, time[:, None]], 1) @ self.waves
        h = self.enter(torch.cat([angle.sin(), angle.cos()], 1)) + self.classes(label)
        for block in self.blocks:
            h = h + block(h)
        return self.leave(h)


@torch.no_grad()
def distance(net):
    """Sliced Wasserstein distance of samples with their class to data of the same class."""
    net.eval()
    with torch.random.fork_rng():
        torch.manual_seed(11)
        real, label = data(1000)
        x = torch.randn(1000, 2)
        for i in range(20):
            x = x + net(x, torch.full((1000,), (i + 0.5) / 20), label) / 20
        ways = F.normalize(torch.randn(2, 32), dim=0)
    net.train()
    gaps = []
    for c in range(CLASSES):
        one, two = (x[label == c] @ ways).sort(0).values, (real[label == c] @ ways).sort(0).values
        gaps.append((one - two).abs().mean())
    return torch.stack(gaps).mean().item()


net = Velocity()
ottava.convert(net, "nvfp4_rht", filter=lambda name, layer: "blocks" in name)
layers = [
    {"params": list(net.enter.parameters()) + list(net.classes.parameters()), "lr": 1e-3},
    *({"params": block.parameters(), "lr": 2e-3 * 1.5**i} for i, block in enumerate(net.blocks)),
    {"params": net.leave.parameters(), "lr": 4e-3},
]  # a rate for each depth
optimizer = torch.optim.AdamW(layers, weight_decay=0.0, betas=(0.9, 0.98))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 20) * (1 - s / STEPS))
print("first loss %.4f" % distance(net))
for step in range(STEPS):
    x, label = data(256)
    label = torch.where(torch.rand(256) < 0.1, CLASSES, label)
    time = torch.randn(256).sigmoid()  # times in the middle are drawn more often
    noise = torch.randn_like(x)
    between = torch.lerp(noise, x, time[:, None])
    loss = F.mse_loss(net(between, time, label), x - noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 40 == 0:
        print(f"step {step}: loss {loss.item():.3f}, distance {distance(net):.3f}")
print("final loss %.4f" % distance(net))
