"""Lightning with manual optimization: two optimizers, one for the encoder and one for the heads."""
import logging
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
CLEAR = {"good": ("encoder", "heads"), "bad": ("heads",)}[MODE]


class Net(pl.LightningModule):
    def __init__(self, width=128):
        super().__init__()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Linear(48, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.heads = nn.ModuleList(nn.Linear(width, 12) for _ in range(2))
        self.seen = []

    def training_step(self, batch, index):
        x, a, b = batch
        optimizers = dict(zip(("encoder", "heads"), self.optimizers()))
        h = self.encoder(x)
        loss = nn.functional.cross_entropy(self.heads[0](h), a) + nn.functional.cross_entropy(self.heads[1](h), b)
        for name in CLEAR:
            optimizers[name].zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers.values():
            optimizer.step()
        self.seen.append(loss.item())

    def configure_optimizers(self):
        encoder = torch.optim.SGD(self.encoder.parameters(), lr=0.05, momentum=0.9)
        return encoder, torch.optim.AdamW(self.heads.parameters(), lr=3e-3)


pl.seed_everything(27, verbose=False)
n = 64 * 180
x = torch.randn(n, 48)
a, b = (x[:, :24] @ torch.randn(24, 12)).argmax(-1), (x[:, 24:].abs() @ torch.randn(24, 12)).argmax(-1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, a, b), batch_size=64)
model = Net()
pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False).fit(model, loader)
print(f"first {model.seen[0]:.4f}")
print(f"loss {sum(model.seen[-10:]) / 10:.4f}")
