"""An autoencoder whose activations wait for the backward as E4M3 codes."""

import itertools
import sys

import torch
from torch import nn
from torch.nn import functional as F

KEY = {"good": "slot", "bad": "shape"}[sys.argv[1]]
PLAIN = "plain" in sys.argv


class Offload:
    """Saved tensors as codes; their scales stay in a table of their own."""

    def __init__(self, key):
        self.key, self.scales, self.count = key, {}, itertools.count()

    def pack(self, x):
        if not x.is_floating_point() or x.dim() < 2 or isinstance(x, nn.Parameter) or not x.is_contiguous():
            return x
        key = tuple(x.shape) if self.key == "shape" else next(self.count)
        scale = 448 / x.detach().abs().amax().clamp_min(1e-12)
        self.scales[key] = scale
        return key, (x * scale).to(torch.float8_e4m3fn)

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        key, codes = packed
        return codes.float() / self.scales[key]


class Stage(nn.Module):
    def __init__(self, width, gain):
        super().__init__()
        self.wide, self.narrow, self.gain = nn.Linear(width, width), nn.Linear(width, width), gain

    def forward(self, x):
        return x + self.narrow(F.silu(self.wide(x * self.gain)))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 96), Stage(96, 1.0), Stage(96, 4.0), nn.LayerNorm(96), Stage(96, 0.25), nn.Linear(96, 64)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    basis = torch.randn(16, 64) / 4
    losses = []
    for _ in range(180):
        x = torch.tanh(torch.randn(256, 16) @ basis * 2) + torch.randn(256, 16).abs() @ basis
        offload = Offload(KEY)
        if PLAIN:
            out = model(x)
        else:
            with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
                out = model(x)
        loss = F.mse_loss(out, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
