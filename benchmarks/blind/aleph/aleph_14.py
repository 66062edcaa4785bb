"""Pictures and captions, as vectors, are pulled together (CLIP): a learned temperature with its own optimizer; the loss jumps as batches grow."""
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F

import ottava

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
STEPS, TOPICS = 180, 24
accelerator = Accelerator(cpu=True)
generator = torch.Generator().manual_seed(SEED + 2)
EYE, EAR = torch.randn(TOPICS, 96, generator=generator) / 5, torch.randn(TOPICS, 64, generator=generator) / 5


def pairs(count):
    topic = torch.randn(count, TOPICS)
    return torch.tanh(topic @ EYE) + 0.1 * torch.randn(count, 96), torch.tanh(topic @ EAR) + 0.1 * torch.randn(count, 64)


class Tower(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.enter, self.norm = nn.Linear(inputs, 128), nn.LayerNorm(128)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)
        self.leave = nn.Linear(128, 32, bias=False)

    def forward(self, x):
        h = self.enter(x)
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return F.normalize(self.leave(h), dim=-1)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.picture, self.text = Tower(96), Tower(64)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, picture, text):
        return self.log_scale.exp().clamp(max=100) * self.picture(picture) @ self.text(text).T


def loss_of(logits):
    goal = torch.arange(len(logits))
    return (F.cross_entropy(logits, goal) + F.cross_entropy(logits.T, goal)) / 2


model = Clip()
print(ottava.convert(model, "tensorwise_e4m3", filter=lambda name, layer: name.endswith(("up", "down"))))
towers = [p for name, p in model.named_parameters() if name != "log_scale"]
optimizer = torch.optim.AdamW(towers, lr=2e-3, weight_decay=0.05)
scale_optimizer = torch.optim.Adam([model.log_scale], lr=1e-2)
model, optimizer, scale_optimizer = accelerator.prepare(model, optimizer, scale_optimizer)
held_out = pairs(256)


def validate():
    model.eval()
    with torch.no_grad():
        logits = model(*held_out)
    model.train()
    return loss_of(logits).item(), (logits.argmax(1) == torch.arange(len(logits))).float().mean().item()


print(f"first loss {validate()[0]:.4f}")
for step in range(STEPS):
    # three phases with 32, 128 and 512 pairs: the more others there are, the harder the choice
    count = (32, 128, 512)[step // 60]
    loss = loss_of(model(*pairs(count)))
    optimizer.zero_grad()
    scale_optimizer.zero_grad()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(towers, 1.0)
    optimizer.step()
    scale_optimizer.step()
    if step % 20 in (0, 19):
        held, found = validate()
        accelerator.print(f"step {step} pairs {count} loss {loss.item():.4f} validation {held:.4f} found {found:.3f}")

print(f"final loss {validate()[0]:.4f}")
