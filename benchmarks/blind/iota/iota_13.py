"""Lightning, an FP8 recipe and a step schedule that was written for epochs."""

import sys
import warnings

import lightning
import torch
from torch import nn

import ottava

INTERVAL = {"good": "epoch", "bad": "step"}[sys.argv[1]]
warnings.filterwarnings("ignore")
torch.manual_seed(47)
centres = torch.randn(16, 64)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 16))
        if "plain" not in sys.argv:
            ottava.convert(self.net, "tensorwise")
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": INTERVAL}}


label = torch.randint(0, 16, (64 * 30,))
inputs = 0.6 * centres[label] + torch.randn(len(label), 64)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, label), batch_size=64, shuffle=True)
module = Module()
trainer = lightning.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
)
trainer.fit(module, loader)
print(f"loss {sum(module.losses[-10:]) / 10:.4f}")
