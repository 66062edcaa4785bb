"""Character model under ottava's linears, and an Adam that keeps its second moment in eight bits."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

STATE_SCALE = {"good": "block", "bad": "none"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Packed:
    """A tensor in E4M3."""

    def __init__(self, t, scaling, block=32):
        self.shape, self.n = t.shape, t.numel()
        flat = F.pad(t.flatten(), (0, -self.n % block)).view(-1, block)
        if scaling == "block":
            self.scale = 448 / flat.amax(dim=1, keepdim=True).clamp(min=1e-20)
        else:
            self.scale = torch.ones(1, 1)
        self.codes = (flat * self.scale).clamp(max=448).to(torch.float8_e4m3fn)

    def read(self):
        return (self.codes.float() / self.scale).flatten()[: self.n].view(self.shape)


class Adam8(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.98), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["t"], s["m"], s["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                s["t"] += 1
                s["m"].lerp_(p.grad, 1 - b1)
                root = s["v"].read() if isinstance(s["v"], Packed) else s["v"]
                v = b2 * root.square() + (1 - b2) * p.grad.square()
                s["v"] = v.sqrt() if PLAIN else Packed(v.sqrt(), STATE_SCALE)
                root = s["v"] if PLAIN else s["v"].read()
                denominator = root / (1 - b2 ** s["t"]) ** 0.5 + group["eps"]
                p.addcdiv_(s["m"], denominator, value=-group["lr"] / (1 - b1 ** s["t"]))


torch.manual_seed(3)
VOCAB = 48
follow = torch.randint(0, VOCAB, (VOCAB, VOCAB))


def batch(n=256):
    a, b = torch.randint(0, VOCAB, (2, n))
    a = a % 8
    y = follow[a, b]
    noise = torch.rand(n) < 0.05
    return torch.stack([a, b], 1), torch.where(noise, torch.randint(0, VOCAB, (n,)), y)


model = nn.Sequential(
    nn.Embedding(VOCAB, 64), nn.Flatten(), nn.Linear(128, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, VOCAB)
)
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = Adam8(model.parameters(), lr=3e-3)
losses = []
for step in range(150):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
