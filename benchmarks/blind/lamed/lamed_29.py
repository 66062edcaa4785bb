"""House prices from a table, with Lightning and delayed scaling. The first export still has rows from the old system."""
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn

import ottava

warnings.filterwarnings("ignore")
MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, COLUMNS = 180, 128, 40


class Table(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(STEPS * BATCH, COLUMNS)
        a, b = torch.randn(COLUMNS, 3) * 0.15, torch.randn(3) * 2
        self.y = torch.sin(self.x @ a) @ b + 0.1 * torch.randn(len(self.x))
        # "missing" was written as a number there
        old = torch.randint(0, 2 * BATCH, (6,))
        self.x[old, 3] = -9_999_999.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Prices(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(COLUMNS, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1)
        )
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.huber_loss(self.net(x).squeeze(-1), y)
        self.losses.append(loss.item())
        if len(self.losses) % 20 == 1:
            print(f"step {len(self.losses) - 1} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=4e-3)


pl.seed_everything(SEED, verbose=False)
data = Table()
module = Prices()
if not PLAIN:
    length = 16 if MODE == "good" else 1024
    ottava.convert(module.net, ottava.get_recipe("delayed", amax_history_len=length, amax_compute_algo="max"))
trainer = pl.Trainer(
    max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, gradient_clip_val=1.0,
)
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=BATCH))
print(f"final loss {sum(module.losses[-15:]) / 15:.4f}")
