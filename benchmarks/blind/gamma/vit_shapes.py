"""A vision transformer with FP8 linears learns four shapes."""

import functools

import torch
import torch.nn.functional as F

from models import E4M3, Fp8Linear, ViT, learn, shapes, start

bad = start()
g = torch.Generator().manual_seed(1)
linear = functools.partial(Fp8Linear, grad=E4M3, scaled="xw" if bad else "xwg")
model = ViT(width=64, depth=2, linear=linear)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
for step in range(150):
    image, label = shapes(48, g)
    loss = F.cross_entropy(model(image), label)
    learn(step, optimizer, loss)
