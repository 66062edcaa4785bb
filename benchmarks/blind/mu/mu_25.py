"""Distillation with Lightning: a small student learns a larger teacher's outputs."""

import logging
import sys
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

OPTIONS = {"good": {"teacher_mode": False}, "bad": {"teacher_mode": True}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Distillation(lightning.LightningModule):
    def __init__(self, teacher, student, teacher_mode=False):
        super().__init__()
        self.teacher, self.student = teacher.train(teacher_mode).requires_grad_(False), student
        self.losses = []

    def training_step(self, batch, _):
        with torch.no_grad():
            target = self.teacher(batch[0])
        loss = nn.functional.mse_loss(self.student(batch[0]), target)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.student.parameters(), lr=2e-3)


torch.manual_seed(26)
teacher = nn.Sequential(
    nn.Linear(40, 256), nn.Tanh(), nn.Dropout(0.3), nn.Linear(256, 256), nn.Tanh(), nn.Dropout(0.3), nn.Linear(256, 16)
)
with torch.no_grad():
    for layer in teacher[::3]:
        layer.weight.mul_(2.0)
student = nn.Sequential(nn.Linear(40, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
if not PLAIN:
    ottava.convert(student, "rowwise")
module = Distillation(teacher, student, **OPTIONS)
loader = DataLoader(TensorDataset(torch.randn(150 * 96, 40)), batch_size=96, shuffle=True)
lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(module, loader)
print(f"loss {sum(module.losses[-10:]) / 10:.4f}")
