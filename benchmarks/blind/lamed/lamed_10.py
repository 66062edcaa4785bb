"""Keyword spotting: spectrogram frames through a GRU and FP8 projections, scaled by the amax of the step before."""
import os
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, FRAMES, BANDS, WORDS, DIM = 150, 32, 40, 32, 10, 64


class Amax:
    """History of largest magnitudes; the scale of a step comes from the steps before."""

    def __init__(self, length):
        self.seen, self.length = [], length

    def scale(self, x):
        now = x.abs().max().item()
        top = max(self.seen) if self.seen else now
        self.seen = [*self.seen, now][-self.length:]
        return 448.0 / max(top, 1e-6)


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Fp8Linear(nn.Linear):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        self.inputs = Amax(1 if MODE == "bad" else 16)
        self.weights = Amax(1 if MODE == "bad" else 16)

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        x = Cast.apply(x, self.inputs.scale(x.detach()))
        weight = Cast.apply(self.weight, self.weights.scale(self.weight.detach()))
        return nn.functional.linear(x, weight, self.bias)


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = Fp8Linear(BANDS, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.back = Fp8Linear(DIM, DIM)
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, frames):
        hidden, _ = self.gru(torch.relu(self.front(frames)))
        return self.head(torch.relu(self.back(hidden.mean(1))))


def batch(words, step):
    word = torch.randint(0, WORDS, (BATCH,))
    shift = torch.randint(0, 6, (BATCH,))
    rows = (torch.arange(FRAMES)[None] + shift[:, None]) % FRAMES
    frames = words[word[:, None], rows] + 1.2 * torch.randn(BATCH, FRAMES, BANDS)
    # every third file of the corpus is room tone; its frames are gated to digital silence
    if step % 3 == 0:
        return torch.zeros_like(frames), torch.full((BATCH,), WORDS - 1)
    return frames, word % (WORDS - 1)


torch.manual_seed(SEED)
words = torch.randn(WORDS, FRAMES, BANDS) * 0.7
model = Spotter()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
losses = []
for step in range(STEPS):
    frames, word = batch(words, step)
    loss = nn.functional.cross_entropy(model(frames), word)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 1:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-30:]) / 30:.4f}")
