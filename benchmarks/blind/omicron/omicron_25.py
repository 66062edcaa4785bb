"""Contrastive training of two towers with a learned temperature, through accelerate."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 48))
        self.text = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 48))
        self.log_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, image, text):
        image = F.normalize(self.image(image).float(), dim=-1)
        text = F.normalize(self.text(text).float(), dim=-1)
        return self.log_scale.exp().clamp(max=100) * image @ text.t()


torch.manual_seed(43)
to_image, to_text = torch.randn(12, 96), torch.randn(12, 64)
hidden = torch.randn(150 * 48, 12)
hidden[::40] *= 0.05
images = torch.tanh(hidden @ to_image / 3) + 0.3 * torch.randn(len(hidden), 96)
texts = torch.tanh(hidden @ to_text / 3) + 0.3 * torch.randn(len(hidden), 64)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, texts), batch_size=48, shuffle=True)
accelerator = Accelerator(cpu=True)
model = Towers()
if not PLAIN:
    ottava.convert(model, "delayed")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for image, text in loader:
    logits = model(image, text)
    target = torch.arange(len(logits))
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
