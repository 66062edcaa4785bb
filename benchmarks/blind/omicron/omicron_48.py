"""Static activation scales from a calibration, in a network that learns the energy of small systems."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

CALIBRATE_EVERY = {"good": 10, "bad": 0}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def straight(x):
    return x + (x.to(torch.float8_e4m3fn).to(x.dtype) - x).detach()


class StaticLinear(nn.Linear):
    """The input's scale comes from the last calibration; the weight's is current."""

    def __init__(self, fan_in, fan_out):
        super().__init__(fan_in, fan_out)
        nn.init.normal_(self.weight, std=0.05)
        nn.init.zeros_(self.bias)
        self.register_buffer("amax", torch.tensor(0.0))
        self.calibrating = True

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        if self.calibrating:
            self.amax.copy_(1.5 * x.detach().abs().amax())
        scale, weight_scale = 448.0 / self.amax, 447.0 / self.weight.detach().abs().amax()
        codes, weight = straight((x * scale).clamp(-448, 448)), straight(self.weight * weight_scale)
        return F.linear(codes, weight) / (scale * weight_scale) + self.bias


torch.manual_seed(127)
charges = torch.randn(24, 24) / 5
model = nn.Sequential(
    StaticLinear(24, 128), nn.SiLU(), StaticLinear(128, 128), nn.SiLU(), StaticLinear(128, 64), nn.SiLU(),
    StaticLinear(64, 4),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
losses = []
for step in range(200):
    for module in model:
        if isinstance(module, StaticLinear):
            module.calibrating = step == 0 or (CALIBRATE_EVERY > 0 and step % CALIBRATE_EVERY == 0)
    x = torch.randn(128, 24)
    pulled = torch.tanh(x @ charges)
    energy = 3 * pulled.unflatten(1, (4, 6)).sum(-1)
    loss = F.mse_loss(model(x), energy)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
