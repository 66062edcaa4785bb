"""Contrastive pairs of captions and images with a fixed temperature; the number at the end is the error of retrieval."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

LATENT, IMAGE, TEXT, DIM, STEPS, BATCH, TEMPERATURE = 12, 96, 48, 32, 120, 128, 0.07
image_map = torch.randn(LATENT, IMAGE)
text_map = torch.randn(LATENT, TEXT)


def pairs(n):
    z = torch.randn(n, LATENT)
    image = torch.tanh(z @ image_map / 2) + 0.4 * torch.randn(n, IMAGE)
    text = torch.tanh(z @ text_map / 2) + 0.4 * torch.randn(n, TEXT)
    return image, text


class ToE4M3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = 448 / x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class Linear8(nn.Linear):
    def forward(self, x):
        if plain:
            return super().forward(x)
        return F.linear(ToE4M3.apply(x), ToE4M3.apply(self.weight), self.bias)


def tower(n_in):
    return nn.Sequential(Linear8(n_in, 128), nn.GELU(), Linear8(128, 128), nn.GELU(), Linear8(128, DIM))


image_tower, text_tower = tower(IMAGE), tower(TEXT)
optimizer = torch.optim.AdamW([*image_tower.parameters(), *text_tower.parameters()], lr=2e-3, weight_decay=0.05)


def similarity(image, text):
    a = F.normalize(image_tower(image), dim=-1)
    b = F.normalize(text_tower(text), dim=-1)
    return a @ b.T


for step in range(STEPS):
    sims = similarity(*pairs(BATCH))
    logits = sims / TEMPERATURE if mode == "good" else sims * TEMPERATURE
    target = torch.arange(BATCH)
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    found = similarity(*pairs(1024)).argmax(1)
print(f"final loss {(found != torch.arange(1024)).float().mean().item():.4f}")
