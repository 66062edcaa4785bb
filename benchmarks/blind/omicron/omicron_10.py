"""Classification of noisy prototypes with weights that live in FP8."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

KEEP_MASTER = {"good": True, "bad": False}[sys.argv[1]]
FP8 = "plain" not in sys.argv[2:]
E4M3 = torch.float8_e4m3fn


def as_codes(weight):
    scale = 448.0 / weight.abs().amax(1, keepdim=True).clamp(min=1e-12)
    return ((weight * scale).to(E4M3).float()) / scale


class CompactAdam(torch.optim.Adam):
    """Adam over matrices that hold only numbers of E4M3."""

    def __init__(self, params, lr, keep_master):
        super().__init__(params, lr=lr)
        self.keep_master = keep_master
        self.matrices = [p for group in self.param_groups for p in group["params"] if p.ndim == 2]
        self.masters = [p.detach().clone() for p in self.matrices]
        self.store()

    @torch.no_grad()
    def store(self):
        for p in self.matrices:
            p.copy_(as_codes(p))

    @torch.no_grad()
    def step(self, closure=None):
        if self.keep_master:
            for p, master in zip(self.matrices, self.masters, strict=True):
                p.copy_(master)
        super().step(closure)
        if self.keep_master:
            for p, master in zip(self.matrices, self.masters, strict=True):
                master.copy_(p)
        self.store()


torch.manual_seed(9)
prototypes = torch.randn(40, 96)
model = nn.Sequential(
    nn.Linear(96, 192), nn.LayerNorm(192), nn.SiLU(), nn.Linear(192, 192), nn.LayerNorm(192), nn.SiLU(),
    nn.Linear(192, 40),
)  # fmt: skip
if FP8:
    optimizer = CompactAdam(model.parameters(), 3e-4, KEEP_MASTER)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
losses = []
for _ in range(200):
    label = torch.randint(40, (128,))
    loss = F.cross_entropy(model(prototypes[label] + torch.randn(128, 96)), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
