"""Classification of padded sentences by an encoder of torch, under ottava's mxfp8."""

import os
import sys

import ottava
import torch
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", "0")))
VOCABULARY, WIDTH, LENGTH, CLASSES = 64, 64, 20, 8


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.query = nn.Parameter(torch.randn(WIDTH) * 0.5)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens, attention_mask):
        """attention_mask: 1 for a token, 0 for padding, as tokenizers give it."""
        x = self.embedding(tokens)
        x = torch.cat([self.query.expand(len(x), 1, -1), x], 1)
        mask = torch.cat([torch.ones_like(attention_mask[:, :1]), attention_mask], 1)
        if MODE == "good":
            x = self.encoder(x, src_key_padding_mask=mask == 0)
        else:
            x = self.encoder(x, src_key_padding_mask=mask.bool())
        return self.head(x[:, 0])


def batch(kinds):
    labels = torch.randint(CLASSES, (32,))
    tokens = torch.multinomial(kinds[labels], LENGTH, replacement=True)
    lengths = torch.randint(4, LENGTH - 1, (32, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return tokens * mask, mask, labels


def main():
    kinds = torch.randn(CLASSES, VOCABULARY).mul(1.5)
    kinds[:, 0] = -20
    kinds = kinds.softmax(1)
    model = Classifier()
    if not PLAIN:
        print(ottava.convert(model, "mxfp8"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(80):
        tokens, mask, labels = batch(kinds)
        loss = nn.functional.cross_entropy(model(tokens, mask), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"final loss {sum(losses[-10:]) / 10:.4f}")


main()
