"""Fine-tunes the last block and the head of a frozen vision transformer; ottava's tensorwise recipe."""

import ottava
import torch
import torch.nn.functional as F

from models import ViT, learn, shapes

torch.manual_seed(0)
g = torch.Generator().manual_seed(1)
model = ViT(width=64, depth=2)
ottava.convert(model, "tensorwise")
for name, p in model.named_parameters():
    p.requires_grad_(name.startswith(("blocks.1", "norm", "head")))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
for step in range(120):
    image, label = shapes(32, g)
    loss = F.cross_entropy(model(image), label)
    learn(step, optimizer, loss)
