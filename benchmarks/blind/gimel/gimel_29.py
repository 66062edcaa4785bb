"""A small CNN on pictures of textures, with batch norm; its classifier's linears under ottava's mxfp8."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
CLASSES, SIZE, STEPS = 10, 12, 110
MOMENTUM = 0.1 if MODE == "good" else 0.001


def block(fan_in, fan_out):
    return nn.Sequential(
        nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=False), nn.BatchNorm2d(fan_out, momentum=MOMENTUM), nn.ReLU()
    )


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(block(3, 16), nn.MaxPool2d(2), block(16, 32), nn.MaxPool2d(2), block(32, 32))
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * 9, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES)
        )

    def forward(self, pictures):
        return self.classifier(self.features(pictures))


textures = torch.randn(CLASSES, 3, SIZE, SIZE)


def pictures(n):
    y = torch.randint(0, CLASSES, (n,))
    shift = torch.randint(0, 3, (n,))
    x = torch.stack([textures[c].roll(int(s), dims=2) for c, s in zip(y, shift)])
    return 110 + 40 * (x + 0.8 * torch.randn_like(x)), y  # values of 8-bit pictures


def evaluate(model):
    model.eval()
    with torch.no_grad():
        x, y = pictures(512)
        logits = model(x)
    model.train()
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


model = Cnn()
if not PLAIN:
    ottava.convert(model, "mxfp8")
optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.02)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
for step in range(STEPS):
    x, y = pictures(48)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 20 == 0:
        print(step, f"training loss {loss.item():.4f}")
loss, hits = evaluate(model)
print(f"validation: {100 * hits:.1f} % right")
print(f"final loss {loss:.4f}")
