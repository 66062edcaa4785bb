"""Order of tones: a transformer says which of two marked tones in a sequence is the higher one, and where."""
import os
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, LENGTH, DIM, TONES = 150, 32, 20, 64, 16


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tone, self.mark, self.place = nn.Embedding(TONES, DIM), nn.Embedding(2, DIM), nn.Embedding(LENGTH, DIM)
        options = {"batch_first": True} if MODE == "good" else {}
        layer = nn.TransformerEncoderLayer(DIM, 4, 128, dropout=0.0, norm_first=True, **options)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, TONES)

    def forward(self, tones, marks):
        x = self.tone(tones) + self.mark(marks) + self.place(torch.arange(LENGTH))
        return self.head(self.body(x).mean(1))


def batch():
    tones = torch.randint(0, TONES, (BATCH, LENGTH))
    where = torch.rand(BATCH, LENGTH).topk(2).indices
    marks = torch.zeros(BATCH, LENGTH, dtype=torch.long).scatter_(1, where, 1)
    pair = tones.gather(1, where)
    return tones, marks, (pair.sum(1) // 2)


torch.manual_seed(SEED)
net = Encoder()
if not PLAIN:
    print(ottava.convert(net, "tensorwise"))
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 15)
losses = []
for step in range(STEPS):
    tones, marks, label = batch()
    loss = nn.functional.cross_entropy(net(tones, marks), label)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
