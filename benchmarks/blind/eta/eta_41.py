"""A small encoder that tags fixed-width records, BF16 autocast."""

import sys

import torch
from torch import nn

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(11)
WIDTH, FIELDS, BATCH = 64, 24, 24


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(16, WIDTH)
        self.place = nn.Embedding(FIELDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x):
        rows, columns = x.shape
        across, down = self.place(torch.arange(columns))[None], self.place(torch.arange(rows))[:, None]
        where = across if mode == "good" else down
        return self.head(self.body(self.token(x) + where))


model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(140):
    x = torch.randint(0, 16, (BATCH, FIELDS))
    y = (x + 5 * torch.arange(FIELDS)) % 16
    with torch.autocast("cpu", torch.bfloat16, enabled=not plain):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
