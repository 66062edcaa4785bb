"""A small GAN on a ring of Gaussians with Lightning's manual optimization."""

import logging
import sys
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def ring(n):
    angle = torch.randint(0, 8, (n,)) * (torch.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.05 * torch.randn(n, 2)


class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
        self.critic = nn.Sequential(
            nn.Linear(2, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
        )
        self.curve = []

    def training_step(self, batch, index):
        g_opt, d_opt = self.optimizers()
        real = batch[0]
        fake = self.generator(torch.randn(len(real), 32))
        d_loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        d_opt.step()
        g_loss = F.softplus(-self.critic(fake)).mean()
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        g_opt.step()
        self.log("g_loss", g_loss)
        self.curve.append(g_loss.item())

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
            torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        )


L.seed_everything(0, verbose=False)
gan = Gan()
if not PLAIN:
    ottava.convert(gan, "tensorwise")
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ring(8000)), batch_size=100, shuffle=True)
trainer = L.Trainer(
    max_steps=400,
    max_epochs=3,
    limit_train_batches=70,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(gan, data)
print(f"loss {sum(gan.curve[-10:]) / 10:.4f}")
