"""An image classifier in Lightning with a one-cycle schedule; torchao's float8 in its linear layers."""
import dataclasses
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

warnings.filterwarnings("ignore")
MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
EPOCHS, STEPS, BATCH, CLASSES, SIZE = 3, 50, 48, 8, 16


def pictures(count):
    label = torch.randint(0, CLASSES, (count,))
    y, x = torch.meshgrid(torch.linspace(0, 6.28, SIZE), torch.linspace(0, 6.28, SIZE), indexing="ij")
    angle = label.float()[:, None, None] / CLASSES * 3.14
    wave = torch.sin(3 * (x * angle.cos() + y * angle.sin()) + 6.28 * torch.rand(count, 1, 1))
    return torch.utils.data.TensorDataset((wave + 0.7 * torch.randn(count, SIZE, SIZE))[:, None], label)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES),
        )
        self.losses = []

    def training_step(self, batch, _):
        x, label = batch
        loss = nn.functional.cross_entropy(self.net(x), label)
        self.losses.append(loss.item())
        if len(self.losses) % 20 == 1:
            print(f"step {len(self.losses) - 1} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=EPOCHS * STEPS)
        if MODE == "bad":
            return [optimizer], [cycle]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


pl.seed_everything(SEED, verbose=False)
module = Classifier()
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(
        module.net, config=config, module_filter_fn=lambda m, name: isinstance(m, nn.Linear) and m.out_features > CLASSES
    )
loader = torch.utils.data.DataLoader(pictures(STEPS * BATCH), batch_size=BATCH, shuffle=True)
trainer = pl.Trainer(
    max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, loader)
print(f"final loss {sum(module.losses[-15:]) / 15:.4f}")
