"""Adam whose moments are E4M3 and BF16 with a scale for every 64 numbers; gradient noise is added on purpose."""
import sys

import torch
from torch import nn

PLAIN = "plain" in sys.argv[2:]


def store(t, block=64):
    if PLAIN or t.numel() % block:
        return t
    rows = t.view(-1, block)
    scale = 448.0 / rows.abs().amax(1, keepdim=True).clamp(min=1e-20)
    return ((rows * scale).to(torch.float8_e4m3fn).float() / scale).view(t.shape)


class Adam(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(n=0, m=torch.zeros_like(p), r=torch.zeros_like(p))
                s["n"] += 1
                s["m"] = store(s["m"] * 0.9 + p.grad * 0.1)
                v = s["r"].square() * 0.99 + p.grad.square() * 0.01
                s["r"] = v.sqrt().bfloat16().float()  # the root needs half the range
                m = s["m"] / (1 - 0.9 ** s["n"])
                p.sub_(group["lr"] * m / (s["r"] / (1 - 0.99 ** s["n"]) ** 0.5 + 1e-8))


torch.manual_seed(61)
width, vocab = 128, 64
model = nn.Sequential(nn.Embedding(vocab, 64), nn.Flatten(1), nn.Linear(128, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, vocab))
optimizer = Adam(model.parameters(), lr=3e-3)
table = torch.randint(vocab, (vocab, vocab))
losses = []
for step in range(160):
    ids = torch.randint(vocab, (128, 2))
    labels = torch.where(torch.rand(128) < 0.9, table[ids[:, 0] // 8, ids[:, 1] // 8], torch.randint(vocab, (128,)))
    loss = nn.functional.cross_entropy(model(ids), labels)
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p) * p.grad.std() * 0.3 / (1 + step) ** 0.5)
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
