"""Topics of short notes from bags of words, most words rare; accelerate, casts by hand in blocks of 32."""

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, BATCH, WORDS, TOPICS, LENGTH = 150, 16, 2048, 12, 6


class Cast(torch.autograd.Function):
    @staticmethod
    def code(x, kind, largest):
        b = x.unflatten(-1, (-1, 32))
        s = torch.exp2(torch.floor(torch.log2(largest / b.abs().amax(-1, keepdim=True).clamp(min=1e-30))))
        return ((b * s).to(kind).to(x.dtype) / s).flatten(-2)

    @staticmethod
    def forward(ctx, x):
        return Cast.code(x, torch.float8_e4m3fn, 448.0)

    @staticmethod
    def backward(ctx, g):
        return Cast.code(g, torch.float8_e5m2, 57344.0)


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if plain else F.linear(Cast.apply(x), Cast.apply(self.weight), self.bias)


class Topics(nn.Module):
    """Word counts, nearly all of them zero, through linears."""

    def __init__(self):
        super().__init__()
        self.words = Linear8(WORDS, 64)
        self.mid = Linear8(64, 64)
        self.head = nn.Linear(64, TOPICS)

    def forward(self, counts):
        h = F.relu(self.words(counts))
        return self.head(h + F.relu(self.mid(h)))


def notes(n):
    world = torch.Generator().manual_seed(9)
    often = 1.0 / (torch.arange(WORDS) + 5.0)
    likes = often * torch.exp(1.8 * torch.randn(TOPICS, WORDS, generator=world))
    topic = torch.multinomial(1.0 / (torch.arange(TOPICS) + 1.0), n, replacement=True)
    counts = torch.zeros(n, WORDS)
    for i, t in enumerate(topic.tolist()):
        size = LENGTH if i % 25 else 40 * LENGTH
        counts[i].index_add_(0, torch.multinomial(likes[t], size, replacement=True), torch.ones(size))
    return counts, topic


accelerator = Accelerator(cpu=True)
model = Topics()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.03)
data = DataLoader(TensorDataset(*notes(STEPS * BATCH)), batch_size=BATCH)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for step, (counts, topic) in enumerate(data):
    loss = F.cross_entropy(model(counts), topic)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
