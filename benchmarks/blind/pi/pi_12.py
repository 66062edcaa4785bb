"""SGD with its momentum in 8 bits, on a denoising autoencoder: python pi_12.py good|bad [plain]."""

import sys

import torch
from torch import nn

BLOCK = {"good": 64, "bad": None}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS = 150


class SGD8Bit(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, momentum=0.9, block=64, eight_bits=True):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.block, self.eight_bits = block, eight_bits

    def encode(self, value):
        if not self.eight_bits:
            return value, None
        scale = torch.ones(1)
        if self.block:
            value = nn.functional.pad(value.flatten(), (0, -value.numel() % self.block)).view(-1, self.block)
            scale = value.abs().amax(dim=1, keepdim=True).clamp(min=1e-20) / 448
        return (value / scale).to(torch.float8_e4m3fn), scale

    def decode(self, code, scale, like):
        if scale is None:
            return code
        return (code.float() * scale).flatten()[: like.numel()].view_as(like)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum" in self.state[p]:
                    buffer = self.decode(*self.state[p]["momentum"], p) * group["momentum"] + p.grad
                else:
                    buffer = p.grad
                self.state[p]["momentum"] = self.encode(buffer)
                p.sub_(self.decode(*self.state[p]["momentum"], p), alpha=group["lr"])


torch.manual_seed(2)
basis = torch.randn(6, 256) / 2
model = nn.Sequential(nn.Linear(256, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 256))
optimizer = SGD8Bit(model.parameters(), lr=4.0, block=BLOCK, eight_bits=not PLAIN)
losses = []
for _ in range(STEPS):
    clean = 0.3 * torch.tanh(torch.randn(128, 6) @ basis)
    loss = nn.functional.mse_loss(model(clean + 0.1 * torch.randn_like(clean)), clean)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.5f}")
