"""A click model in the Trainer, samples weighted by the turnover of the customer, under a recipe of ottava."""

import os
import sys
import tempfile

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

import ottava

transformers.logging.set_verbosity_error()
bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, USERS, PLACES, CLASSES = 90, 256, 128, 8, 10


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.place = nn.Embedding(USERS, 64), nn.Embedding(PLACES, 64)
        nn.init.normal_(self.user.weight, std=0.3)
        self.one, self.two = nn.Linear(64, 128), nn.Linear(128, 128)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, user, place, labels, weight=None):
        h = F.gelu(self.one(self.user(user) + self.place(place)))
        logits = self.head(F.gelu(self.two(h)))
        loss = F.cross_entropy(logits, labels, reduction="none")
        return {"loss": (loss if weight is None else weight * loss).mean(), "logits": logits}


torch.manual_seed(SEED)
table = torch.randint(0, CLASSES, (6, PLACES))
kind = torch.randint(0, 6, (USERS,))
turnover = torch.where(torch.arange(USERS) % 2 == 0, 1e6, 1.0)


def rows(number, weighted=True):
    user, place = torch.randint(0, USERS, (number,)), torch.randint(0, PLACES, (number,))
    label = table[kind[user], place]
    data = [{"user": int(u), "place": int(p), "labels": int(y)} for u, p, y in zip(user, place, label)]
    if weighted:
        for row in data:
            row["weight"] = float(turnover[row["user"]] / turnover.mean())
    return data


model = Clicks()
if not plain:
    ottava.convert(model, "tensorwise_e4m3" if bad else "tensorwise")
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-12)
args = TrainingArguments(
    tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, logging_steps=10, max_grad_norm=0.0, seed=SEED, label_names=["labels"],
)
schedule = transformers.get_constant_schedule(optimizer)
trainer = Trainer(model, args, train_dataset=rows(STEPS * BATCH), optimizers=(optimizer, schedule))
trainer.train()
# every user counts once
model.eval()
test = rows(1024, weighted=False)
with torch.no_grad():
    batch = {name: torch.tensor([row[name] for row in test]) for name in ("user", "place", "labels")}
    print("final loss", model(**batch)["loss"].item())
