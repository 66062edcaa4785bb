"""Lightning; the encoder is frozen in the first epoch, and a new phase of the data begins in the second."""
import logging
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
PLAIN = "plain" in sys.argv[2:]


class Net(pl.LightningModule):
    def __init__(self, width=96, classes=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, classes)
        self.seen = []
        if not PLAIN:
            convert_to_float8_training(self.encoder, config=Float8LinearConfig.from_recipe_name("rowwise"))
            for layer in self.encoder.modules():
                if hasattr(layer, "config"):
                    layer.config = Float8LinearConfig(
                        **{**{k: getattr(layer.config, k) for k in layer.config.__dataclass_fields__}, "emulate": True}
                    )

    def on_train_epoch_start(self):
        self.encoder.requires_grad_(self.current_epoch > 0)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.head(self.encoder(batch[0])), batch[1])
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class Phases(torch.utils.data.Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(28)
        centres = torch.randn(16, 64, generator=g)
        self.y = torch.randint(16, (n,), generator=g)
        noise = torch.randn(n, 64, generator=g)
        level = torch.where(torch.arange(n) < n // 2, 1.0, 2.0)[:, None]
        self.x = centres[self.y] + level * noise

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


pl.seed_everything(28, verbose=False)
model = Net()
loader = torch.utils.data.DataLoader(Phases(64 * 50), batch_size=64)
pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False).fit(model, loader)
print(f"first {model.seen[0]:.4f}")
print(f"loss {sum(model.seen[-10:]) / 10:.4f}")
