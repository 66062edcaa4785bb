"""A ViT on raw bytes from 0 to 255 that a batch norm brings into range; torchao's FP8 by rows."""

import torch
from accelerate import Accelerator
from torchao import float8

import models

torch.manual_seed(0)
model = models.vit()
config = float8.Float8LinearConfig.from_recipe_name("rowwise")
object.__setattr__(config, "emulate", True)
float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "classifier")
norm = torch.nn.BatchNorm2d(3)
pictures, classes = models.shapes(800)
pictures = (pictures * 255).round()
accelerator = Accelerator(cpu=True)
weights = [*model.parameters(), *norm.parameters()]
model, norm, optimizer = accelerator.prepare(model, norm, torch.optim.AdamW(weights, lr=7e-4))
for step, (x, y) in enumerate(models.batches(pictures, classes, size=16, steps=150), 1):
    loss = model(pixel_values=norm(x), labels=y).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(step, f"{loss.item():.4f}")
