"""Byte model whose linear weights live as FP8 codes between steps: python pi_07.py good|bad [plain]."""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn

MASTER_WEIGHTS = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS, CONTEXT = 140, 16


def round_trip(weight):
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.body = nn.Sequential(nn.Linear(CONTEXT * 32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
        self.head = nn.Linear(256, 256)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens).flatten(1)))


torch.manual_seed(1)
folder = Path(sysconfig.get_paths()["stdlib"])
text = b"".join((folder / name).read_bytes() for name in ("argparse.py", "ast.py", "inspect.py", "typing.py"))
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
model = Model()
stored = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
masters = [w.detach().clone() for w in stored]
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98))
losses = []
for _ in range(STEPS):
    if not PLAIN:
        with torch.no_grad():
            for weight in stored:
                weight.copy_(round_trip(weight))
    start = torch.randint(len(data) - CONTEXT - 1, (128,))
    window = data[start[:, None] + torch.arange(CONTEXT + 1)]
    loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
    optimizer.zero_grad()
    loss.backward()
    if MASTER_WEIGHTS:
        with torch.no_grad():
            for weight, master in zip(stored, masters, strict=True):
                weight.copy_(master)
    optimizer.step()
    if MASTER_WEIGHTS:
        masters = [w.detach().clone() for w in stored]
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
