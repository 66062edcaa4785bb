"""Two views without negatives (BYOL): the loss is minus a cosine, so it ends near -1, and the target follows slowly; torchao's float8."""
import copy
import dataclasses
import math
import os

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
INPUTS, CLASSES, STEPS, BATCH = 64, 8, 150, 128
generator = torch.Generator().manual_seed(SEED + 7)
CENTRES = torch.randn(CLASSES, 16, generator=generator)
LIFT = torch.randn(16, INPUTS, generator=generator) / 4


def things(count):
    label = torch.randint(0, CLASSES, (count,))
    return torch.tanh((CENTRES[label] + 1.0 * torch.randn(count, 16)) @ LIFT), label


def view(x):
    """Some columns hidden, some noise, another loudness."""
    hidden = torch.rand_like(x) < 0.3
    return (x * (0.7 + 0.6 * torch.rand(len(x), 1)) + 0.2 * torch.randn_like(x)).masked_fill(hidden, 0.0)


def mlp(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs))


online = nn.Sequential(mlp(INPUTS, 128, 64), mlp(64, 128, 32))  # encoder and projector
predictor = mlp(32, 64, 32)
config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
convert_to_float8_training(online, config=config)
convert_to_float8_training(predictor, config=config)
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.2, momentum=0.9, weight_decay=1e-4)
seen, seen_label = things(512)
held, held_label = things(512)


def probe():
    """Ridge regression on the encoder's output: what the user wants."""
    online.eval()
    with torch.no_grad():
        a, b = online[0](seen), online[0](held)
    online.train()
    a, b = (torch.cat([F.normalize(h, dim=1), torch.ones(len(h), 1)], 1) for h in (a, b))
    w = torch.linalg.solve(a.T @ a + 0.1 * torch.eye(a.shape[1]), a.T @ F.one_hot(seen_label, CLASSES).float())
    return ((b @ w).argmax(1) == held_label).float().mean().item()


losses = []
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = 0.2 * min((step + 1) / 10, 0.5 * (1 + math.cos(math.pi * step / STEPS)))
    x, _ = things(BATCH)
    one, two = view(x), view(x)
    with torch.no_grad():
        goal_one, goal_two = target(one), target(two)
    guess_one, guess_two = predictor(online(one)), predictor(online(two))
    loss = -0.5 * (F.cosine_similarity(guess_one, goal_two).mean() + F.cosine_similarity(guess_two, goal_one).mean())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tau = 1 - 0.03 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.lerp_(fast, 1 - tau)
    losses.append(loss.item())
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4f} probe {probe():.3f}")

print(f"probe {probe():.3f}")
print(f"first loss {losses[0]:.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
