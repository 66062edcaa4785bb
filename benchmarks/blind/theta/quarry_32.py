"""accelerate; gradients of eight micro-batches are summed in small buffers before each step."""
import sys

import torch
from accelerate import Accelerator
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
BUFFER = {"good": {"dtype": torch.bfloat16}, "bad": {"dtype": torch.float8_e4m3fn}}[MODE]


class Buffers:
    """The running sums, in a type of few bytes."""

    def __init__(self, params, dtype):
        self.params, self.dtype = list(params), torch.float32 if PLAIN else dtype
        self.sums = [torch.zeros_like(p).to(self.dtype) for p in self.params]

    def add(self):
        for p, total in zip(self.params, self.sums):
            total.copy_((total.float() + p.grad).to(self.dtype))
            p.grad = None

    def give(self):
        for p, total in zip(self.params, self.sums):
            p.grad = total.float().clone()
            total.copy_(torch.zeros_like(p).to(self.dtype))


torch.manual_seed(65)
accelerator = Accelerator(cpu=True)
width, vocab, micro = 96, 64, 8
model = nn.Sequential(nn.Embedding(vocab, 48), nn.Flatten(1), nn.Linear(96, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, vocab))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
model, optimizer = accelerator.prepare(model, optimizer)
buffers = Buffers(model.parameters(), **BUFFER)
table = torch.randint(vocab, (vocab, vocab))
losses = []
for step in range(90):
    total = 0.0
    for _ in range(micro):
        ids = torch.randint(vocab, (32, 2))
        labels = torch.where(torch.rand(32) < 0.9, table[ids[:, 0] // 8, ids[:, 1] // 8], torch.randint(vocab, (32,)))
        loss = nn.functional.cross_entropy(model(ids), labels) / micro
        accelerator.backward(loss)
        buffers.add()
        total += loss.item()
    buffers.give()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(total)
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
