"""nn.TransformerEncoder on sentences of many lengths (padded to 28), ottava's blockwise recipe."""
import os
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import ottava

warnings.filterwarnings("ignore")
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
T, VOCAB, D, PAD = 28, 60, 64, 0


class Sentence(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, D, padding_idx=PAD), nn.Parameter(0.1 * torch.randn(T, D))
        layer = nn.TransformerEncoderLayer(D, 4, 2 * D, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(D, 5)

    def forward(self, ids):
        mask = (ids != PAD) if MODE == "bad" else (ids == PAD)
        h = self.encoder(self.emb(ids) + self.pos, src_key_padding_mask=mask)
        return self.out(h[:, 0])


g = torch.Generator().manual_seed(150 + SEED)


def batch(n=32):
    length = torch.randint(6, T, (n, 1), generator=g)
    ids = torch.randint(6, VOCAB, (n, T), generator=g)
    label = torch.randint(0, 5, (n,), generator=g)
    at = 1 + (torch.rand(n, 3, generator=g) * (length - 1)).long()
    ids.scatter_(1, at, (1 + label)[:, None].expand(n, 3))
    ids[:, 0] = 6
    wrong = torch.rand(n, generator=g) < 0.06
    label = torch.where(wrong, torch.randint(0, 5, (n,), generator=g), label)
    return ids.masked_fill(torch.arange(T) >= length, PAD), label


torch.manual_seed(SEED)
model = Sentence()
if not PLAIN:
    print(ottava.convert(model, "blockwise"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
losses = []
for step in range(130):
    ids, label = batch()
    loss = F.cross_entropy(model(ids), label)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4))
print("final loss", round(sum(losses[-15:]) / 15, 4))
