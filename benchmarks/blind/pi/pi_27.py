"""Speech-like frames from quiet to loud, FP8 linears with scales of their own: python pi_27.py good|bad [plain]."""

import sys

import torch
from torch import nn

INPUT_SCALING = {"good": "dynamic", "bad": "static"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS = 120


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, amax):
        scale = 448 / amax
        return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class FP8Linear(nn.Linear):
    input_amax = None

    def forward(self, x):
        if self.input_amax is None or INPUT_SCALING == "dynamic":
            self.input_amax = x.detach().abs().amax()
        weight = Quantize.apply(self.weight, self.weight.detach().abs().amax())
        return nn.functional.linear(Quantize.apply(x, self.input_amax), weight, self.bias)


Linear = nn.Linear if PLAIN else FP8Linear
torch.manual_seed(5)
mixing = torch.randn(40, 40) / 40**0.5
model = nn.Sequential(Linear(40, 128), nn.GELU(), Linear(128, 128), nn.GELU(), Linear(128, 40))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for step in range(STEPS):
    loudness = 0.1 + 2.9 * min(1.0, step / 60)
    x = loudness * torch.randn(256, 40)
    y = torch.tanh(x @ mixing) + 0.3 * x
    loss = nn.functional.mse_loss(model(x), y) / y.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
