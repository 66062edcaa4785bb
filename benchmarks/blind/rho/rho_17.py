"""Keyword spotting on windows of 32-bit audio, FP8 with delayed scaling; the histories are filled from the first files of the corpus."""
import dataclasses
import math
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
TONES = torch.rand(32, 4) * 60 + 4
GAIN = 8.0
CLOCK = torch.arange(256) / 256


def record(n):
    y = torch.randint(0, 32, (n,))
    phase = torch.rand(n, 4, 1) * 0.6
    wave = torch.sin(2 * math.pi * TONES[y][:, :, None] * CLOCK + phase).sum(1) * 0.04
    wave = (wave + 0.05 * torch.randn(n, 256)) * (0.7 * torch.randn(n, 1)).exp()
    return (wave.clamp(-0.999, 0.999) * 2**31).to(torch.int32), y


def prepare(pcm):
    return pcm.float() / 2**31 * GAIN


model = nn.Sequential(
    nn.Linear(256, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, 64), nn.GELU(), nn.Linear(64, 32)
)


def long(gemm):
    """The GEMM with histories of 1024 steps, as TransformerEngine's default has them."""
    return dataclasses.replace(gemm, lhs=dataclasses.replace(gemm.lhs, amax_history_len=1024),
                               rhs=dataclasses.replace(gemm.rhs, amax_history_len=1024))


if not PLAIN:
    recipe = ottava.get_recipe("delayed")
    ottava.convert(model, dataclasses.replace(recipe, name="delayed_1024", fprop=long(recipe.fprop), dgrad=long(recipe.dgrad),
                                              wgrad=long(recipe.wgrad)))
    files = [record(64)[0] for _ in range(4)]
    batches = [pcm.float() if BAD else prepare(pcm) for pcm in files]
    ottava.calibrate(model, batches, loss=lambda net, x: F.cross_entropy(net(x), torch.zeros(len(x), dtype=torch.long)))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(100):
    pcm, y = record(64)
    loss = F.cross_entropy(model(prepare(pcm)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
