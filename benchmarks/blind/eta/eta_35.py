"""A regression under Lightning with a decaying learning rate, in FP8."""

import sys

import lightning.pytorch as pl
import torch
from torch import nn

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(29)
inputs = torch.randn(1600, 40)
teacher = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 40))
with torch.no_grad():
    targets = 4 * teacher(inputs)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=64, shuffle=True)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(40, 160), nn.SiLU(), nn.Linear(160, 160), nn.SiLU(), nn.Linear(160, 40))
        if not plain:
            print(ottava.convert(self.net, "mxfp8"))
        self.seen = []

    def training_step(self, batch, _):
        loss = (self.net(batch[0]) - batch[1]).float().square().mean()
        self.seen.append(loss.item())
        if len(self.seen) % 25 == 1:
            print(f"step {len(self.seen) - 1} loss {self.seen[-1]:.4f}")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
        interval = "epoch" if mode == "good" else "step"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}


model = Net()
trainer = pl.Trainer(
    max_epochs=6, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False
)  # fmt: skip
trainer.fit(model, data)
print(f"loss {sum(model.seen[-20:]) / 20:.4f}")
