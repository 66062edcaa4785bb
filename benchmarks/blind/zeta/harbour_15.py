"""A small convolution-free image classifier in Lightning with manual optimization and eight micro-batches."""
import logging
import sys
import tempfile

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

import ottava

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
L.seed_everything(23, verbose=False)
MICRO = 8
yy, xx = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
angles = torch.arange(12) * 3.1416 / 12


class Stripes(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            kind = torch.randint(0, 12, (16,))
            wave = xx * angles[kind].cos()[:, None, None] + yy * angles[kind].sin()[:, None, None]
            yield torch.sin(6 * wave + 6.3 * torch.rand(16, 1, 1)) + 0.6 * torch.randn(16, 16, 16), kind


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 12)
        )
        if not PLAIN:
            ottava.convert(self.net, "tensorwise")
        self.losses = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.12, momentum=0.9)

    def training_step(self, batch, index):
        x, kind = batch
        loss = F.cross_entropy(self.net(x), kind)
        self.manual_backward(loss / MICRO if VARIANT == "good" else loss)
        if index % MICRO == MICRO - 1:
            self.optimizers().step()
            self.optimizers().zero_grad()
        self.losses.append(loss.item())
        return loss


model = Classifier()
trainer = L.Trainer(
    max_steps=125, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=tempfile.mkdtemp(),
)
trainer.fit(model, torch.utils.data.DataLoader(Stripes(), batch_size=None))
print(f"loss {sum(model.losses[-160:]) / 160:.4f}")
