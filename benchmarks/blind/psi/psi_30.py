"""Classifies sets of tags of different sizes with torch's transformer encoder under ottava."""
import os
import sys
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F
import ottava

warnings.filterwarnings("ignore")
mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
VOCAB, DIM, LONGEST, CLASSES, BATCH, STEPS = 120, 64, 20, 10, 48, 150


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, ids, attention_mask):
        mask = attention_mask.bool() if mode == "bad" else ~attention_mask.bool()
        h = self.layers(self.embed(ids), src_key_padding_mask=mask)
        m = attention_mask[..., None].float()
        return self.head((h * m).sum(1) / m.sum(1))


votes = torch.randn(VOCAB, CLASSES) * 2
pair = torch.randint(0, CLASSES, (VOCAB // 10, VOCAB // 10))


def batch():
    """The rarest tag and the most frequent tag of a set name its class together."""
    length = torch.randint(4, LONGEST, (BATCH,))
    ids = torch.randint(1, VOCAB, (BATCH, LONGEST))
    attention_mask = (torch.arange(LONGEST) < length[:, None]).long()
    real = ids * attention_mask
    low = torch.where(attention_mask.bool(), ids, VOCAB).amin(1)
    y = pair[(low // 10).clamp(max=11), real.amax(1) // 10]
    return real, attention_mask, y


model = Encoder()
if not plain:
    ottava.convert(model, "rowwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
losses = []
for step in range(STEPS):
    ids, attention_mask, y = batch()
    loss = F.cross_entropy(model(ids, attention_mask), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
