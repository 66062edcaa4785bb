"""Which machine hums behind the noise? Attention pools 1600 frames; probabilities and values are multiplied in FP8 by hand."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
FRAMES, BANDS, WIDTH, HUMS, STEPS = 1600, 24, 48, 8, 120
P_SCALE = 448.0 if MODE == "good" else 1.0


def cast(t, scale):
    if PLAIN:
        return t
    q = (t.detach() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
    return t + (q - t).detach()


class Pool(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(0.02 * torch.randn(heads, WIDTH // heads))
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        k = self.key(x).view(b, t, self.heads, -1)
        v = self.value(x).view(b, t, self.heads, -1)
        p = torch.einsum("hd,bthd->bht", self.query, k).softmax(-1)
        p = cast(p, P_SCALE)
        v = cast(v, 448.0 / v.detach().abs().max())
        return torch.einsum("bht,bthd->bhd", p, v).reshape(b, -1)


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.frames = nn.Sequential(nn.Linear(BANDS, WIDTH), nn.GELU())
        self.pool = Pool()
        self.norm = nn.LayerNorm(WIDTH)
        self.hums = nn.Linear(WIDTH, HUMS)

    def forward(self, x):
        return self.hums(self.norm(self.pool(self.frames(x))))


sounds = torch.randn(HUMS, BANDS)


def batch(n=12):
    y = torch.randint(0, HUMS, (n,))
    x = torch.randn(n, FRAMES, BANDS)
    return x + 0.05 * sounds[y][:, None], y


model = Listener()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(STEPS):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
