"""Speech-like: frames of filterbank energies, a GRU, which of eight words was said? torchao float8 around the GRU."""
import os
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

warnings.filterwarnings("ignore")
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
WORDS, FRAMES, BANDS, D = 8, 24, 32, 64


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(BANDS, D), nn.ReLU(), nn.Linear(D, D), nn.ReLU())
        self.gru = nn.GRU(D, D, num_layers=1, batch_first=MODE == "good")
        self.back = nn.Sequential(nn.Linear(D, D), nn.ReLU())
        self.out = nn.Linear(D, WORDS)

    def forward(self, frames):
        h, _ = self.gru(self.front(frames))
        return self.out(self.back(h[:, -1]))


g = torch.Generator().manual_seed(160 + SEED)
phones = torch.randn(6, BANDS, generator=g)
spelling = torch.stack([torch.randperm(6, generator=g)[:4] for _ in range(WORDS)])


def utterances(n=48):
    word = torch.randint(0, WORDS, (n,), generator=g)
    duration = torch.rand(n, 4, generator=g) + 0.4
    ends = (duration.cumsum(1) / duration.sum(1, keepdim=True) * (FRAMES - 3)).long()
    place = (torch.arange(FRAMES)[None, :, None] >= ends[:, None, :]).sum(-1).clamp(max=3)
    frames = phones[spelling[word].gather(1, place)]
    frames = torch.where((torch.arange(FRAMES) < FRAMES - 3)[None, :, None], frames, torch.zeros(()))
    loudness = 0.5 + torch.rand(n, 1, 1, generator=g)
    return loudness * frames + 0.8 * torch.randn(n, FRAMES, BANDS, generator=g), word


torch.manual_seed(SEED)
model = Recognizer()
if not PLAIN:
    keep = lambda m, name: isinstance(m, nn.Linear) and name != "out"
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=keep)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
losses = []
for step in range(150):
    frames, word = utterances()
    loss = F.cross_entropy(model(frames), word)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(step, round(losses[-1], 4))
print("final loss", round(sum(losses[-15:]) / 15, 4))
