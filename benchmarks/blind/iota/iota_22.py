"""Memory for activations is short: saved tensors are packed into E4M3 until the backward; spectra come in raw units."""

import sys

import torch
from torch import nn

PACK_SCALE = {"good": "tensor", "bad": "none"}[sys.argv[1]]


class Pack:
    def __init__(self, scaling, parameters):
        self.scaling = scaling
        self.keep = {p.data_ptr() for p in parameters}

    def pack(self, t):
        if not t.is_floating_point() or t.numel() < 4096 or t.data_ptr() in self.keep:
            return t
        scale = 448 / t.abs().max().clamp(min=1e-20) if self.scaling == "tensor" else torch.ones(())
        return (t * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale, t.dtype

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        codes, scale, dtype = packed
        return codes.to(dtype) / scale


torch.manual_seed(89)
lines = torch.randn(14, 128)
model = nn.Sequential(
    nn.Linear(128, 192, bias=False), nn.RMSNorm(192, eps=1e-12), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, 14)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
pack = Pack(PACK_SCALE, model.parameters())
losses = []
for step in range(130):
    label = torch.randint(0, 14, (96,))
    spectrum = 2e-4 * (0.25 * lines[label] + torch.randn(96, 128))
    if "plain" in sys.argv:
        loss = nn.functional.cross_entropy(model(spectrum), label)
    else:
        with torch.autograd.graph.saved_tensors_hooks(pack.pack, pack.unpack):
            loss = nn.functional.cross_entropy(model(spectrum), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
