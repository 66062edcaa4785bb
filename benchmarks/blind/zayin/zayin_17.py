"""Differentially private training of a small classifier: each example's gradient is clipped, then noise is added.

python zayin_17.py good|bad
"""

import os

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
CLASSES, WIDTH, CLIP, SIGMA = 8, 32, 1.0, 0.8
RATE = 128 / 4096  # each row is in a batch with this probability (Poisson sampling)

centers = 0.25 * torch.randn(CLASSES, WIDTH)


def rows(count):
    labels = torch.randint(0, CLASSES, (count,))
    return centers[labels] + 0.7 * torch.randn(count, WIDTH), labels


x_train, y_train = rows(4096)
x_test, y_test = rows(1024)

model = nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, CLASSES))
params = dict(model.named_parameters())


def example_loss(weights, x, y):
    return nn.functional.cross_entropy(functional_call(model, weights, x.unsqueeze(0)), y.unsqueeze(0))


per_example = vmap(grad(example_loss), in_dims=(None, 0, 0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.5)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, 160)


def test_loss():
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x_test), y_test).item()


print(f"first loss {test_loss():.4f}")
for step in range(160):
    chosen = torch.rand(len(x_train)) < RATE
    x, y = x_train[chosen], y_train[chosen]
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(x), y)
    grads = per_example({k: v.detach() for k, v in params.items()}, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (CLIP / norms.clamp_min(1e-6)).clamp(max=1.0)
    signal = noise = 0.0
    for name, p in params.items():
        summed = torch.einsum("b,b...->...", factor, grads[name])
        drawn = SIGMA * CLIP * torch.randn_like(summed)
        p.grad = (summed + drawn) / (RATE * len(x_train))  # the expected size of a batch, not the drawn one
        signal, noise = signal + summed.square().sum().item(), noise + drawn.square().sum().item()
    optimizer.step()
    schedule.step()
    if step % 20 == 0:
        print(
            f"step {step} rows {len(x)} loss {loss.item():.4f} clipped {(factor < 1).float().mean():.2f} "
            f"noise over signal {(noise / signal) ** 0.5:.2f} held out {test_loss():.4f}"
        )
print(f"final loss {test_loss():.4f}")
