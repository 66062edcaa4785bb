"""Sentence classifier on torch's encoder with padded batches, in torchao's Float8."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MASK_STYLE = {"good": "torch", "bad": "huggingface"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
LENGTH, DIM = 24, 64


def batch(size):
    lengths = torch.randint(6, LENGTH, (size, 1))
    real = torch.arange(LENGTH) < lengths
    x = torch.randint(3, 40, (size, LENGTH))
    y = x[:, 1:6].sum(1) % 5
    y = (x[:, 1] + 0 * y) % 8
    order = torch.rand(size, LENGTH).masked_fill(~real, 2).argsort(1)
    x = x.masked_fill(~real, 0)
    x[:, 0] = 1
    marked = order[:, :1].clamp(min=2)
    x.scatter_(1, marked, y[:, None] + 40)
    return x, real.long(), y


def padding_mask(attention_mask):
    return attention_mask == 0 if MASK_STYLE == "torch" else attention_mask.bool()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(48, DIM), nn.Embedding(LENGTH, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, 8)

    def forward(self, x, mask):
        h = self.tokens(x) + self.places(torch.arange(LENGTH))
        h = self.encoder(h, src_key_padding_mask=padding_mask(mask))
        return self.head(h[:, 0])


torch.manual_seed(0)
model = Classifier()
if not PLAIN:
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda m, name: name.endswith(("linear1", "linear2"))
    )
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _step in range(150):
    x, mask, y = batch(64)
    loss = F.cross_entropy(model(x, mask), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
