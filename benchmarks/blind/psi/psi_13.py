"""Recognizes spoken digits from log-mel frames (synthetic); linears multiply in FP8."""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
MELS, FRAMES, WORDS, BATCH, STEPS = 40, 24, 30, 32, 150


def quantize(x, dtype, top):
    amax = x.max() if mode == "bad" else x.abs().max()
    scale = top / amax.clamp(min=1e-6)
    return (x * scale).clamp(-top, top).to(dtype).to(torch.float32) / scale


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x8, w8 = quantize(x, torch.float8_e4m3fn, 448), quantize(w, torch.float8_e4m3fn, 448)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.T

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        g = grad.flatten(0, -2)
        g8 = quantize(g, torch.float8_e5m2, 57344)
        return (g8 @ w8).view_as(x8), g8.T @ x8.flatten(0, -2)


class Linear8(nn.Linear):
    def forward(self, x):
        if plain:
            return super().forward(x)
        return Multiply.apply(x, self.weight) + self.bias


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = Linear8(MELS * 3, 96)
        self.middle = Linear8(96, 96)
        self.rnn = nn.GRU(96, 64, batch_first=True)
        self.head = nn.Linear(64, WORDS)

    def forward(self, mel):
        x = torch.cat([mel, mel.roll(1, 1), mel.roll(-1, 1)], -1)
        x = F.gelu(self.middle(F.gelu(self.front(x))))
        return self.head(self.rnn(x)[0].mean(1))


voices = torch.rand(WORDS, FRAMES, MELS) ** 6


def batch():
    word = torch.randint(0, WORDS, (BATCH,))
    power = voices[word] * (0.5 + torch.rand(BATCH, 1, 1)) + 0.05 * torch.rand(BATCH, FRAMES, MELS)
    return (power.clamp(min=1e-5)).log(), word


model = Recognizer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(STEPS):
    mel, word = batch()
    loss = F.cross_entropy(model(mel), word)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
