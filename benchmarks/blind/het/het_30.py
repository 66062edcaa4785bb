"""Learning without labels from two views and a slow copy of the network, under accelerate."""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

LATENT, FEATURES, DIM, STEPS, BATCH = 10, 64, 32, 160, 128
mixing = torch.randn(LATENT, FEATURES)


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        scale = 448 / x.abs().amax().clamp(min=1e-12)
        return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None
        scale = 57344 / grad.abs().amax().clamp(min=1e-20)
        return (grad * scale).clamp(-57344, 57344).to(torch.float8_e5m2).to(grad.dtype) / scale


class Linear8(nn.Linear):
    def forward(self, x):
        if plain:
            return super().forward(x)
        return F.linear(Cast.apply(x), Cast.apply(self.weight), self.bias)


def views():
    z = torch.randn(BATCH, LATENT)
    clean = torch.tanh(z @ mixing / 2)
    return [clean * (torch.rand(BATCH, FEATURES) > 0.3) + 0.2 * torch.randn(BATCH, FEATURES) for _ in range(2)]


def encoder():
    return nn.Sequential(
        Linear8(FEATURES, 128), nn.BatchNorm1d(128), nn.ReLU(), Linear8(128, 128), nn.BatchNorm1d(128), nn.ReLU(),
        Linear8(128, DIM),
    )


accelerator = Accelerator(cpu=True)
online, slow = encoder(), encoder()
slow.load_state_dict(online.state_dict())
slow.requires_grad_(False)
predictor = nn.Sequential(Linear8(DIM, 64), nn.BatchNorm1d(64), nn.ReLU(), Linear8(64, DIM))
optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.3, momentum=0.9, weight_decay=1e-4)
online, predictor, optimizer = accelerator.prepare(online, predictor, optimizer)

losses = []
for step in range(STEPS):
    one, two = views()
    loss = 0.0
    for here, there in ((one, two), (two, one)):
        with torch.no_grad():
            goal = slow(there)
        loss = loss + 1 - F.cosine_similarity(predictor(online(here)), goal, dim=-1).mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    with torch.no_grad():
        rate = 1 - (0.95 + 0.05 * step / STEPS)
        for a, b in zip(slow.parameters(), online.parameters()):
            a.lerp_(b, rate)
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    spread = F.normalize(online(torch.cat(views())), dim=-1).std(0).mean().item() * DIM**0.5
print(f"spread of features {spread:.3f}")
print(f"final loss {np.mean(losses[-20:]):.4f}")
