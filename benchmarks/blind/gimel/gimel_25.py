"""Predicts the next state of a plant from its sensors, with the Trainer; ottava's recipes in the linears."""

import os
import sys

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
SENSORS, WIDTH, BATCH, STEPS = 64, 128, 128, 160
RECIPE = "mxfp8" if MODE == "good" else "nvfp4"


class Plant(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(SENSORS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.leave = nn.Linear(WIDTH, 32)

    def forward(self, sensors, labels):
        x = self.enter(sensors)
        for norm, layer in zip(self.norms, self.hidden):
            x = x + nn.functional.gelu(layer(norm(x)))
        predicted = self.leave(x)
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


class Measurements(torch.utils.data.Dataset):
    """64 sensors: every sixteenth is a pressure in bar, the others are deviations from a set point."""

    def __init__(self, n):
        state = torch.randn(n, SENSORS)
        law = torch.randn(SENSORS, 32) / SENSORS**0.5
        law[::16] = 0.0
        self.after = torch.tanh(state @ law) + 0.05 * torch.randn(n, 32)
        self.sensors = state.clone()
        self.sensors[:, ::16] = 60.0 + 3.0 * state[:, ::16]

    def __len__(self):
        return len(self.sensors)

    def __getitem__(self, i):
        return {"sensors": self.sensors[i], "labels": self.after[i]}


data = Measurements(BATCH * STEPS)
model = Plant()
if not PLAIN:
    print(ottava.convert(model, RECIPE))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=2e-3, lr_scheduler_type="cosine",
    warmup_steps=10, logging_steps=4, save_strategy="no", report_to=[], remove_unused_columns=False, seed=SEED,
    use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
history = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(history[-5:]) / 5:.4f}")
