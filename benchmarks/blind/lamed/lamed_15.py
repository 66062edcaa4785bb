"""Two towers with shared weights: short queries find their documents. Projections run in FP8 with delayed scales."""
import os
import sys

import torch
from accelerate import Accelerator
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, VOCAB, DIM, LONG = 140, 48, 400, 64, 2500
E4M3_MAX = 448.0


def to_fp8(x, scale):
    return (x * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype) / scale


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return to_fp8(x, scale)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class DelayedLinear(nn.Linear):
    """The input is scaled by the amax that its last call has seen."""

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        self.amax = {}

    def forward(self, x, stream="main"):
        if PLAIN:
            return super().forward(x)
        now = x.detach().abs().max().clamp(min=1e-12)
        scale = E4M3_MAX / self.amax.get(stream, now)
        self.amax[stream] = now
        weight = Cast.apply(self.weight, E4M3_MAX / self.weight.detach().abs().max())
        return nn.functional.linear(Cast.apply(x, scale), weight, self.bias)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(VOCAB, DIM, mode="sum")
        self.up = DelayedLinear(DIM, 128)
        self.down = DelayedLinear(128, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, words, stream):
        stream = stream if MODE == "good" else "main"
        hidden = torch.relu(self.up(self.words(words), stream))
        return nn.functional.normalize(self.norm(self.down(hidden, stream)), dim=-1)


def batch(topics):
    topic = torch.randint(0, len(topics), (BATCH,))
    query = torch.multinomial(topics[topic], 3)
    document = torch.multinomial(topics[topic], LONG, replacement=True)
    return topic, query, document


torch.manual_seed(SEED)
accelerator = Accelerator(cpu=True)
topics = torch.softmax(torch.randn(150, VOCAB) * 2.5, dim=-1)
tower = Tower()
optimizer = torch.optim.AdamW(tower.parameters(), lr=3e-3)
tower, optimizer = accelerator.prepare(tower, optimizer)
losses = []
for step in range(STEPS):
    topic, query, document = batch(topics)
    scores = tower(query, "query") @ tower(document, "document").T / 0.1
    same = topic[:, None] == topic[None, :]
    scores = scores.masked_fill(same & ~torch.eye(BATCH, dtype=torch.bool), -1e4)
    loss = nn.functional.cross_entropy(scores, torch.arange(BATCH))
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        accelerator.print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
