"""A byte model on text of which one batch in twelve comes from another source."""

import sys

import torch
from torch import nn

PLAIN = "plain" in sys.argv
VOCABULARY, WIDTH, STEPS = 48, 64, 140


def cast(x, kind=torch.float8_e4m3fn):
    if PLAIN:
        return x
    scale = torch.finfo(kind).max / x.detach().abs().amax().clamp(min=1e-20)
    return x + ((x * scale).to(kind).to(x.dtype) / scale - x).detach()


class Linear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(cast(x), cast(self.weight), self.bias)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.recent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Linear(WIDTH, 128), Linear(128, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.recent(self.words(ids))[0]
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))))


torch.manual_seed(12)
usual = torch.softmax(torch.randn(VOCABULARY, VOCABULARY) * 4, 1)
strange = torch.softmax(torch.randn(VOCABULARY, VOCABULARY) * 0.5, 1)
model = Mixer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(STEPS):
    table = strange if step % 12 == 7 else usual
    ids = torch.randint(0, VOCABULARY, (16, 1))
    while ids.shape[1] < 20:
        ids = torch.cat([ids, torch.multinomial(table[ids[:, -1]], 1)], 1)
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
