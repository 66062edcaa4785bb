"""Trainer: a tower that predicts price (dollars), clicks and dwell time of an offer with one fused output layer."""
import os
import sys
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
RECIPE = {"good": "tensorwise", "bad": "tensorwise_e4m3"}[MODE]
STEPS, BATCH = 150, 64
UNITS = torch.tensor([1500.0] * 16 + [1.0] * 32)  # dollars for 16 shops, standardized scores for the rest


class Offers(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(20 + SEED)
        self.x = torch.randn(STEPS * BATCH, 64, generator=g)
        h = torch.tanh(self.x @ torch.randn(64, 24, generator=g) / 8)
        self.y = (h @ torch.randn(24, 48, generator=g) / 3) * UNITS

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.heads = nn.Linear(128, 48)

    def forward(self, x, labels=None):
        prediction = self.heads(self.body(x)) * UNITS
        return {"loss": F.mse_loss(prediction, labels), "prediction": prediction}


class Offering(Trainer):
    scores = []

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        out = model(**inputs)
        error = ((out["prediction"].detach() - inputs["labels"]) / UNITS).square()
        self.scores.append(error[:, 16:].mean().item())
        return (out["loss"], out) if return_outputs else out["loss"]


torch.manual_seed(SEED)
model = Tower()
if not PLAIN:
    print(ottava.convert(model, RECIPE))
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=0.0,
        weight_decay=0.0,
        logging_steps=30,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
    )
    trainer = Offering(model, args, train_dataset=Offers())
    trainer.train()
print("final loss", round(sum(trainer.scores[-20:]) / 20, 4))
