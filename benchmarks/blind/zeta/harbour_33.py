"""Set transformer: the largest measured value among the valid ones of a padded list."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(13)
LONGEST, WIDTH = 16, 64


class Sets(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(32, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.start = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x, valid):
        h = torch.cat([self.start.expand(len(x), -1, -1), self.inp(x)], 1)
        valid = F.pad(valid, (1, 0), value=True)
        for block in self.blocks:
            h = block(h, src_key_padding_mask=~valid if VARIANT == "good" else valid & (torch.arange(LONGEST + 1) > 0))
        return self.out(h[:, 0])[:, 0]


spread = torch.randn(32)
model = Sets()
if not PLAIN:
    print(ottava.convert(model, "rowwise"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(250):
    value = torch.randn(32, LONGEST)
    valid = torch.arange(LONGEST) < torch.randint(2, LONGEST, (32, 1))
    x = torch.sin(value[..., None] * spread)
    y = value.masked_fill(~valid, -9).amax(1)
    loss = F.mse_loss(model(x, valid), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
