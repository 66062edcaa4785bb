"""Two kinds of rows share a trunk: dense sensors, and a survey with its own head and a small weight in the loss."""
import os
import sys

import torch
from torch import nn

import ottava
from ottava.doors.accelerate import prepare
from accelerate import Accelerator

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, DIM = 160, 96, 64
RECIPE = "bf16" if PLAIN else {"good": "blockwise", "bad": "tensorwise_e4m3"}[MODE]


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.sensors = nn.Linear(20, DIM)
        self.survey = nn.Embedding(300, DIM)
        self.trunk = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 128), nn.GELU(), nn.Linear(128, DIM))
        self.power, self.mood = nn.Linear(DIM, 1), nn.Linear(DIM, 6)

    def forward(self, sensors, answers):
        rows = torch.cat([self.sensors(sensors), self.survey(answers).mean(1)])
        rows = rows + self.trunk(rows)
        dense, asked = rows.split([len(sensors), len(answers)])
        return self.power(dense).squeeze(-1), self.mood(asked)


def batch():
    sensors = torch.randn(BATCH, 20)
    power = 3e3 * torch.sin(sensors @ wires).sum(-1) + 200 * torch.randn(BATCH)
    answers = torch.randint(0, 300, (BATCH, 12))
    mood = torch.multinomial(torch.softmax(opinion[answers].sum(1), -1), 1).squeeze(-1)
    return sensors, answers, power, mood


torch.manual_seed(SEED)
wires, opinion = torch.randn(20, 5) * 0.4, torch.randn(300, 6) * 1.2
model = Shared()
optimizer = torch.optim.AdamW(
    [{"params": [*model.sensors.parameters(), *model.trunk.parameters(), *model.power.parameters()], "lr": 2e-3},
     {"params": [*model.survey.parameters(), *model.mood.parameters()], "lr": 1e-2, "eps": 1e-12}],
    weight_decay=0.01,
)
accelerator = Accelerator(cpu=True)
model, optimizer = prepare(accelerator, model, optimizer, recipe=RECIPE)
losses, moods = [], []
for step in range(STEPS):
    sensors, answers, power, mood = batch()
    watt, guess = model(sensors, answers)
    squares = (watt - power).square().mean()
    survey = nn.functional.cross_entropy(guess, mood)
    optimizer.zero_grad()
    accelerator.backward(squares + 0.1 * survey)
    optimizer.step()
    moods.append(survey.item())
    if step % 20 == 0:
        accelerator.print(f"step {step} squares {squares.item():.0f} survey {moods[-1]:.4f}")
print(f"final loss {sum(moods[-15:]) / 15:.4f}")
