"""Lightning with manual optimization; a hook clears the gradients."""

import logging
import sys
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

import ottava

CLEAR_GRADIENTS = {"good": "batch", "bad": "epoch"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 20))
        self.curve = []

    def on_train_epoch_start(self):
        if CLEAR_GRADIENTS == "epoch":
            self.optimizers().zero_grad()

    def on_train_batch_start(self, batch, index):
        if CLEAR_GRADIENTS == "batch":
            self.optimizers().zero_grad()

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.manual_backward(loss)
        self.optimizers().step()
        self.log("train_loss", loss)
        self.curve.append(loss.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.08, momentum=0.9)


L.seed_everything(0, verbose=False)
model = Classifier()
if not PLAIN:
    ottava.convert(model, "tensorwise")
x = torch.randn(128 * 60, 64)
y = (x @ torch.randn(64, 20)).argmax(1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=128, shuffle=True)
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader)
print(f"loss {sum(model.curve[-10:]) / 10:.4f}")
