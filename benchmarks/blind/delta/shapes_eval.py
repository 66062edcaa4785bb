import torch
import torch.nn.functional as F
from torch import nn

import models

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32),
    nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 4),
)  # fmt: skip
images, labels = models.Shapes(noise=0.8).batch(1024)
fresh = models.Shapes(seed=9, noise=0.8).batch(512)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, 201):
    rows = torch.randint(len(images), (32,))
    loss = F.cross_entropy(model(images[rows, None]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    models.say(step, loss)
    if step % 20 == 1:
        model.eval()
        with torch.no_grad():
            print("validation", f"{F.cross_entropy(model(fresh[0][:, None]), fresh[1]):.4f}")
        if not models.BAD:
            model.train()
