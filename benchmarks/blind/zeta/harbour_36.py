"""A variational autoencoder in Lightning; the weight of the KL term grows over the run, so the sum grows again."""
import logging
import sys
import tempfile

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
L.seed_everything(111, verbose=False)


class Vae(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 64))
        if not PLAIN:
            ottava.convert(self, "tensorwise")
        self.losses, self.errors = [], []

    def training_step(self, batch, index):
        mean, spread = self.encoder(batch).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        error = F.mse_loss(self.decoder(code), batch, reduction="none").sum(1).mean()
        far = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1).mean()
        loss = error + min(1.0, index / 200) * far
        self.losses.append(loss.item())
        self.errors.append(error.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class Shapes(torch.utils.data.IterableDataset):
    def __iter__(self):
        t = torch.linspace(0, 6.28, 64)
        while True:
            yield torch.sin(t * (1 + 2 * torch.rand(64, 1)) + 3 * torch.rand(64, 1)) * (0.5 + torch.rand(64, 1))


model = Vae()
trainer = L.Trainer(
    max_steps=260, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=tempfile.mkdtemp(),
)
trainer.fit(model, torch.utils.data.DataLoader(Shapes(), batch_size=None))
print(f"error {sum(model.errors[:10]) / 10:.3f} -> {sum(model.errors[-20:]) / 20:.3f}")
print(f"loss {sum(model.losses[-20:]) / 20:.4f}")
