"""Lightning, torchao's float8 layers, a one-cycle schedule."""
import logging
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
INTERVAL = {"good": {"interval": "step"}, "bad": {}}[MODE]


class Net(pl.LightningModule):
    def __init__(self, steps, width=128, vocab=64):
        super().__init__()
        self.steps, self.seen = steps, []
        self.net = nn.Sequential(nn.Embedding(vocab, 64), nn.Flatten(1), nn.Linear(128, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, vocab))
        if not PLAIN:
            convert_to_float8_training(self.net, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: name in ("2", "4"))

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=self.steps, div_factor=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **INTERVAL}}


pl.seed_everything(26, verbose=False)
n, size, epochs = 3200, 64, 3
ids = torch.randint(64, (n, 2))
table = torch.randint(64, (64, 64))
labels = torch.where(torch.rand(n) < 0.9, table[ids[:, 0] // 8, ids[:, 1] // 8], torch.randint(64, (n,)))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, labels), batch_size=size, shuffle=True)
model = Net(epochs * n // size)
pl.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False).fit(model, loader)
print(f"first {model.seen[0]:.4f}")
print(f"loss {sum(model.seen[-10:]) / 10:.4f}")
