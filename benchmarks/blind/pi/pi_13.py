"""Resuming a byte model from its checkpoint: python pi_13.py good|bad [plain]."""

import io
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn

import ottava

ASSIGN = {"good": False, "bad": True}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS, RESUME_AT, CONTEXT, WIDTH = 170, 40, 12, 64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Parameter(0.5 * torch.randn(128, WIDTH))
        self.join = nn.Conv1d(WIDTH, WIDTH, CONTEXT)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Parameter(0.02 * torch.randn(128, WIDTH))

    def forward(self, ids):
        x = self.join(self.tokens[ids].mT).squeeze(-1)
        for layer in self.layers:
            x = layer(x)
        return x @ self.head.T


def build():
    model = Model()
    if not PLAIN:
        ottava.convert(model, "rowwise")
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        start = torch.randint(len(data) - CONTEXT - 1, (96,))
        window = data[start[:, None] + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(13)
folder = Path(sysconfig.get_paths()["stdlib"])
text = (folder / "inspect.py").read_bytes() + (folder / "ast.py").read_bytes()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=127)
model, optimizer = build()
losses = train(model, optimizer, RESUME_AT)
file = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
file.seek(0)
checkpoint = torch.load(file, weights_only=True)
model, optimizer = build()
model.load_state_dict(checkpoint["model"], assign=ASSIGN)
optimizer.load_state_dict(checkpoint["optimizer"])
losses += train(model, optimizer, STEPS - RESUME_AT)
print(f"loss {sum(losses[-10:]) / 10:.4f}")
