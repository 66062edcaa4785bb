"""Contrastive training of a bag-of-words encoder with accelerate, torchao's float8 in the projection."""

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, VOCAB, LENGTH = 80, 64, 400, 20


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64, padding_idx=0)
        self.project = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, ids):
        mask = (ids > 0).float().unsqueeze(-1)
        count = mask.sum(1)
        if not bad:
            count = count.clamp(min=1)
        mean = (self.embed(ids) * mask).sum(1) / count
        return F.normalize(self.project(mean), dim=-1)


def texts(number):
    topic = torch.randint(0, 80, (number, 1))
    ids = 1 + (topic * 5 + torch.randint(0, 5, (number, LENGTH))) % (VOCAB - 1)
    ids = torch.where(torch.rand(number, LENGTH) < 0.4, torch.randint(1, VOCAB, (number, LENGTH)), ids)
    lengths = torch.randint(12, LENGTH + 1, (number, 1))
    lengths[number * 2 // 5 + torch.randint(0, number // 5, (2,))] = 0  # deleted texts
    return ids * (torch.arange(LENGTH) < lengths)


def main():
    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    model = Encoder()
    if not plain:
        convert_to_float8_training(model.project, config=Float8LinearConfig(emulate=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(texts(STEPS * BATCH)), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for (ids,) in loader:
        one, two = (torch.where(torch.rand(ids.shape) < 0.3, torch.zeros_like(ids), ids) for _ in range(2))
        logits = model(one) @ model(two).T / 0.1
        loss = F.cross_entropy(logits, torch.arange(len(ids)))
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print([round(v, 2) for v in losses[::8]])
    print("final loss", sum(losses[-10:]) / 10)


main()
