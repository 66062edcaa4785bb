"""A sequence tagger that is saved and resumed in the middle, as on a cluster with short jobs."""
import io
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
VOCAB, TAGS, DIM, LENGTH, BATCH, STEPS, WARMUP = 40, 12, 64, 24, 16, 200, 20


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.GRU(DIM, DIM // 2, bidirectional=True, batch_first=True)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, TAGS)

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.head(self.norm(h + self.down(F.gelu(self.up(h)))))


def factor(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return max(0.01, (STEPS - step) / (STEPS - WARMUP))


def make():
    model = Tagger()
    if not plain:
        ottava.convert(model, "mxfp8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


rule = torch.randint(0, TAGS, (VOCAB, VOCAB))


def batch():
    ids = (VOCAB * torch.rand(BATCH, LENGTH) ** 2).long()
    tags = rule[ids, ids.roll(1, 1)]
    wrong = torch.rand(BATCH, LENGTH) < 0.02
    return ids, torch.where(wrong, torch.randint(0, TAGS, ids.shape), tags)


def job(model, optimizer, schedule, first, last, losses):
    for step in range(first, last):
        ids, tags = batch()
        loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 25 == 0:
            print(f"step {step} loss {loss.item():.4f} lr {optimizer.param_groups[0]['lr']:.5f}")


losses = []
model, optimizer, schedule = make()
job(model, optimizer, schedule, 0, 150, losses)
file = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, file)
file.seek(0)

saved = torch.load(file)
model, optimizer, schedule = make()
model.load_state_dict(saved["model"])
if mode == "bad":
    optimizer.load_state_dict(saved["optimizer"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
else:
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
job(model, optimizer, schedule, 150, STEPS, losses)
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
