"""A spiking network with surrogate gradients on rate-coded pictures; weights and spikes pass through E4M3 by hand.

After the training a temperature is fitted on other rows by L-BFGS, with the network frozen.

python zayin_21.py good|bad
"""

import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
PIXELS, HIDDEN, CLASSES, TICKS, DECAY = 64, 128, 10, 12, 0.85
patterns = (torch.rand(CLASSES, PIXELS) < 0.3).float()


def pictures(count):
    labels = torch.randint(0, CLASSES, (count,))
    rates = (0.2 + 0.16 * patterns[labels] + 0.12 * torch.randn(count, PIXELS)).clamp(0, 1)
    return rates, labels


class Spike(torch.autograd.Function):
    """A step; its derivative is that of a fast sigmoid."""

    @staticmethod
    def forward(ctx, potential):
        ctx.save_for_backward(potential)
        return (potential > 0).float()

    @staticmethod
    def backward(ctx, grad):
        (potential,) = ctx.saved_tensors
        return grad / (1 + 5 * potential.abs()) ** 2


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = 448 / x.abs().amax().clamp_min(1e-12)
        return (x * scale).to(torch.float8_e4m3fn).float() / scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(Cast.apply(x), Cast.apply(self.weight), self.bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Fp8Linear(PIXELS, HIDDEN), Fp8Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, CLASSES)
        self.rate = 0.0

    def forward(self, rates):
        a = b = torch.zeros(len(rates), HIDDEN)
        voltage, spikes = torch.zeros(len(rates), CLASSES), []
        for _ in range(TICKS):
            a = DECAY * a + self.first(torch.bernoulli(rates))
            fired_a = Spike.apply(a - 1.0)
            a = a - fired_a.detach()  # what fires loses its threshold
            b = DECAY * b + self.second(fired_a)
            fired_b = Spike.apply(b - 1.0)
            b = b - fired_b.detach()
            voltage = voltage + self.out(fired_b)
            spikes.append(fired_b.mean())
        self.rate = torch.stack(spikes).mean()
        return voltage / TICKS


net = Net()
for layer in (net.first, net.second):
    layer.weight.data.mul_(3.0)
optimizer = torch.optim.NAdam(net.parameters(), lr=2e-3)
test_x, test_y = pictures(1000)


def held_out(temperature=1.0):
    with torch.no_grad():
        return nn.functional.cross_entropy(net(test_x) / temperature, test_y).item()


print(f"first loss {held_out():.4f}")
for step in range(140):
    x, y = pictures(96)
    loss = nn.functional.cross_entropy(net(x), y) + 20 * (net.rate - 0.15).square()  # near 15 % should fire
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} firing {net.rate.item():.3f}")
before = held_out()
net.requires_grad_(False)
with torch.no_grad():
    x, y = pictures(1000)
    logits = net(x)
log_temperature = torch.zeros(1, requires_grad=True)
lbfgs = torch.optim.LBFGS([log_temperature], lr=0.5, max_iter=20, line_search_fn="strong_wolfe")


def closure():
    lbfgs.zero_grad()
    loss = nn.functional.cross_entropy(logits / log_temperature.exp(), y)
    loss.backward()
    return loss


lbfgs.step(closure)
print(f"held out {before:.4f}, temperature {log_temperature.exp().item():.3f}")
print(f"final loss {held_out(log_temperature.exp().detach()):.4f}")
