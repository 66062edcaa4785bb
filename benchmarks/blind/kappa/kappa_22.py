"""Lightning with a warm-up; linear layers under ottava."""

import logging
import sys
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import nn

import ottava

INTERVAL = {"good": "step", "bad": "epoch"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16)
        )
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": INTERVAL}}


torch.manual_seed(23)
x = torch.randn(4096, 32)
y = (torch.tanh(x @ torch.randn(32, 24) / 3) @ torch.randn(24, 16)).argmax(1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64, shuffle=True)
model = Net()
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: not name.endswith("5"))
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader)
print(f"loss {sum(model.losses[-10:]) / 10:.4f}")
