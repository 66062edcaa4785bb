"""A forecast from a rack of thermometers, with a model of our own in the Trainer of transformers."""
import os
import sys
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, SENSORS = 150, 128, 48


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.intake = nn.Linear(SENSORS, 128)
        self.norm = nn.BatchNorm1d(128)
        self.body = nn.Sequential(nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU())
        self.head = nn.Linear(64, 1)

    def forward(self, kelvin, labels=None):
        hidden = self.norm(self.intake(kelvin))
        guess = self.head(self.body(hidden)).squeeze(-1)
        return {"loss": nn.functional.mse_loss(guess, labels), "logits": guess}


class Readings(torch.utils.data.Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(SEED)
        weather = torch.randn(STEPS * BATCH, 6, generator=draw)
        place = torch.randn(6, SENSORS, generator=draw)
        level = 285 + 10 * torch.rand(SENSORS, generator=draw)
        self.kelvin = level + 0.8 * weather @ place + 0.3 * torch.randn(STEPS * BATCH, SENSORS, generator=draw)
        self.rain = torch.sin(weather[:, 0] * 1.5) * weather[:, 1] + torch.relu(weather[:, 2])

    def __len__(self):
        return len(self.rain)

    def __getitem__(self, i):
        return {"kelvin": self.kelvin[i], "labels": self.rain[i]}


def wanted(name, layer):
    if name == "intake" and MODE == "good":
        return "raw readings come in here"
    return name != "head"


torch.manual_seed(SEED)
model = Forecast()
if not PLAIN:
    print(ottava.convert(model, "mxfp8", filter=wanted))
with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=4e-3, warmup_steps=10, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, seed=SEED, disable_tqdm=True, weight_decay=0.01,
    )
    trainer = Trainer(model, args, train_dataset=Readings())
    trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
