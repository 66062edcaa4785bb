"""Step counts from a wristband: a GRU over recordings of varied length, each batch of one length; delayed scaling."""
import os
import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, DIM = 150, 32, 48


def recordings(length):
    """Three axes. A tenth of the wearers runs, with far more steps and larger swings."""
    lengths = torch.randint(max(4, length - 4), length + 1, (BATCH,))
    runs = torch.rand(BATCH) < 0.1
    pace = torch.where(runs, 2.2, 0.8) + 0.2 * torch.rand(BATCH)
    t = torch.arange(length).float()
    size = torch.where(runs, 4.0, 1.0)[:, None, None]
    phase = torch.rand(BATCH, 1, 3) * 6.28
    wave = size * torch.sin(pace[:, None, None] * t[None, :, None] + phase) + 0.3 * torch.randn(BATCH, length, 3)
    return wave, lengths, pace * lengths / 6.28


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.axes = nn.Linear(3, DIM)
        self.front = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU())
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.back = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU())
        self.head = nn.Linear(DIM, 1)

    def forward(self, wave, lengths):
        frames = self.front(self.axes(wave))
        _, last = self.gru(pack_padded_sequence(frames, lengths, batch_first=True, enforce_sorted=False))
        return self.head(self.back(last[0])).squeeze(-1)


torch.manual_seed(SEED)
net = Counter()
if not PLAIN:
    ottava.convert(net, "delayed")
optimizer = torch.optim.AdamW(net.parameters(), lr=6e-3)
losses = []
for step in range(STEPS):
    wave, lengths, count = recordings(8 + 4 * int(torch.randint(0, 5, (1,))))
    loss = nn.functional.mse_loss(net(wave, lengths), count)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} length {wave.shape[1]} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-30:]) / 30:.4f}")
