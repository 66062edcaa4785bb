"""A generator of pictures against a ViT that tells them from real ones."""

import torch
from accelerate import Accelerator
from torch.nn import functional as F

import models

torch.manual_seed(0)
critic = models.vit(num_labels=1)
maker = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 768), torch.nn.Tanh())
accelerator = Accelerator(cpu=True)
critic, maker, fast, slow = accelerator.prepare(
    critic,
    maker,
    torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.99)),
    torch.optim.Adam(maker.parameters(), lr=5e-4, betas=(0.5, 0.99)),
)
pictures = (models.shapes(600)[0] - 0.5) / 0.5
for step, (real,) in enumerate(models.batches(pictures, size=16, steps=120), 1):
    fake = maker(torch.randn(16, 32)).view(16, 3, 16, 16)
    loss = F.softplus(-critic(real).logits).mean() + F.softplus(critic(fake.detach()).logits).mean()
    accelerator.backward(loss)
    fast.step()
    against = F.softplus(-critic(fake).logits).mean()
    accelerator.backward(against)
    slow.step()
    fast.zero_grad()
    slow.zero_grad()
    print(step, f"{loss.item():.4f} {against.item():.4f}")
