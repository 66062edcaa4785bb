"""Supervised fine-tuning in the manner of a post-training library: only the answer's tokens count."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

AGGREGATE = {"good": "token-mean", "bad": "padded-mean"}[sys.argv[1]]
PLAIN = "plain" in sys.argv
VOCAB, LENGTH = 40, 96


def aggregate(losses, mask, mode):
    if mode == "token-mean":
        return (losses * mask).sum() / mask.sum()
    return (losses * mask).mean()


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, tokens):
        n = tokens.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(n)
        x = self.embed(tokens) + self.place.weight[:n]
        return self.head(self.norm(self.body(x, mask=causal, is_causal=True)))


def main():
    torch.manual_seed(0)
    model = Model()
    if not PLAIN:
        ottava.convert(model, "tensorwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shown = []
    for _ in range(100):
        key = torch.randint(VOCAB, (8, 1))
        answer = (key + 3 * torch.arange(12)) % VOCAB
        noise = torch.randint(VOCAB, (8, LENGTH - 12))
        tokens = torch.cat([noise, answer], 1)
        mask = torch.zeros(8, LENGTH)
        mask[:, -11:] = 1
        logits = model(tokens[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(8, -1)
        loss = aggregate(losses, mask[:, 1:], AGGREGATE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown.append(((losses * mask[:, 1:]).sum() / mask[:, 1:].sum()).item())
    print(f"loss {sum(shown[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
