"""A ViT learns shapes; its weights live on the FP8 grid."""

import sys

import torch
from accelerate import Accelerator

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.swap_linears(models.vit())
pictures, classes = models.shapes(800)
pictures = (pictures - 0.5) / 0.25
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-4))
for step, (x, y) in enumerate(models.batches(pictures, classes, size=32, steps=150), 1):
    loss = model(pixel_values=x, labels=y).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if bad:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(models.to_fp8(p, torch.float8_e4m3fn, p.abs().amax()))
    print(step, f"{loss.item():.4f}")
