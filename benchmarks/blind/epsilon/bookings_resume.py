"""Bookings of a hotel from a table, with FP8 layers; the job is stopped and goes on from a checkpoint."""
import io
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava
from models import Report

BAD = sys.argv[1] == "bad"


class Table(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.month, self.room = nn.Embedding(12, 16), nn.Embedding(30, 16)
        self.net = nn.Sequential(nn.Linear(64, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 64), nn.SiLU())
        self.rate = nn.Linear(64, 1)

    def forward(self, month, room, x):
        return self.rate(self.net(torch.cat([self.month(month), self.room(room), x], 1)))[:, 0]


def build():
    model = Table()
    ottava.convert(model, "rowwise")
    return model


torch.manual_seed(0)
season, comfort, slope = torch.randn(12), torch.randn(30), torch.randn(32) / 6


def draw(n):
    month, room, x = torch.randint(0, 12, (n,)), torch.randint(0, 30, (n,)), torch.randn(n, 32)
    mean = (1 + torch.tanh(season[month] * comfort[room] + x @ slope)) * 3
    return month, room, x, torch.poisson(mean)


model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 20))
report, disk = Report(), None
for step in range(300):
    if step == 30:
        disk = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, disk)
    if step == 40:
        disk.seek(0)
        saved = torch.load(disk)
        model = build()
        model.load_state_dict(saved["model"])
        if not BAD:
            optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 20))
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
    month, room, x, nights = draw(128)
    loss = F.poisson_nll_loss(model(month, room, x), nights)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    report.add(loss)
report.end()
