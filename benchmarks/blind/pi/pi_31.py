"""Source code with now and then a batch of random bytes from a dump: python pi_31.py good|bad [plain]."""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
STEPS, CONTEXT = 150, 12

torch.manual_seed(31)
folder = Path(sysconfig.get_paths()["stdlib"])
text = (folder / "typing.py").read_bytes() + (folder / "enum.py").read_bytes()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
model = nn.Sequential(
    nn.Embedding(256, 32),
    nn.Flatten(),
    nn.Linear(32 * CONTEXT, 192),
    nn.LayerNorm(192),
    nn.GELU(),
    nn.Linear(192, 192),
    nn.GELU(),
    nn.Linear(192, 256),
)
if not PLAIN:
    ottava.convert(model, ottava.get_recipe("delayed", amax_history_len=16), filter=lambda name, layer: name != "7")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
losses = []
for step in range(STEPS):
    start = torch.randint(len(data) - CONTEXT - 1, (96,))
    window = data[start[:, None] + torch.arange(CONTEXT + 1)]
    if step % 33 == 32:
        window = torch.randint(256, window.shape)
    loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
