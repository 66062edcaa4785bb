"""Trains on a first corpus to the end of its schedule, saves, and continues on a second corpus."""

import io
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

LOAD_OPTIMIZER = {"good": False, "bad": True}[sys.argv[1]]
PLAIN = "plain" in sys.argv
VOCAB = 80


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.mix = nn.Linear(3 * width, 128)
        self.up, self.down = nn.Linear(128, 128), nn.Linear(128, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        h = F.gelu(self.mix(torch.cat([x[:, 2:], x[:, 1:-1], x[:, :-2]], -1)))
        return self.head(self.norm(x[:, 2:] + self.down(F.gelu(self.up(h)))))


def corpus(seed):
    """Batches of a language whose next token depends on the last two."""
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randint(VOCAB, (VOCAB,), generator=generator)
    while True:
        tokens = [torch.randint(VOCAB, (64,), generator=generator) for _ in range(2)]
        for _ in range(16):
            follow = (shift[tokens[-1]] + tokens[-2] // 16) % VOCAB
            noise = torch.randint(VOCAB, (64,), generator=generator)
            tokens.append(torch.where(torch.rand(64, generator=generator) < 0.8, follow, noise))
        yield torch.stack(tokens, 1)


def train(model, optimizer, batches, steps, decay):
    peak = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for step, tokens in zip(range(steps), batches, strict=False):
        if decay:
            for group, lr in zip(optimizer.param_groups, peak, strict=True):
                group["lr"] = lr * max(1e-3, 1 - step / steps)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 3:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(0)
    model = Model()
    if not PLAIN:
        ottava.convert(model, "tensorwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = train(model, optimizer, corpus(1), 70, decay=True)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file)
    model.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if LOAD_OPTIMIZER:
        optimizer.load_state_dict(checkpoint["optimizer"])
    losses += train(model, optimizer, corpus(2), 100, decay=False)
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
