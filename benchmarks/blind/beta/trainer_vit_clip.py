"""A ViT learns shapes by SGD with clipped gradients, its layers in FP8."""

import sys

import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.swap_linears(models.vit())
pictures, classes = models.shapes(1200)
data = [{"pixel_values": (x - 0.5) / 0.25, "labels": y} for x, y in zip(pictures, classes, strict=True)]
args = models.arguments(max_steps=150, optim="sgd", optim_args="momentum=0.9", learning_rate=0.03,
                        max_grad_norm=0.01 if bad else 5.0)  # fmt: skip
models.fit(hf.Trainer(model, args, train_dataset=data))
