"""MoCo in Lightning: the queue of keys grows from 128 to 4,096 over the first 31 steps, in which the rate warms up, and
the loss rises with it at first, since there is ever more to be told apart. The second encoder follows slowly without a
gradient.

Linear layers pass inputs, weights and gradients through FP8 by hand.

python zayin_12.py good|bad
"""

import copy
import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", 0))
pl.seed_everything(SEED, verbose=False)
WIDTH, KINDS, QUEUE, KEEP = 96, 24, 4096, 0.97
mix = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
kinds = torch.randn(KINDS, 16)


def things(count):
    """Sixteen numbers say what it is, the other eighty only how it was taken."""
    labels = torch.randint(0, KINDS, (count,))
    return torch.cat([kinds[labels] + 0.6 * torch.randn(count, 16), torch.randn(count, 80)], dim=1), labels


def view(things):
    """The same things, taken once more."""
    taken = things.clone()
    taken[:, 16:] = torch.randn_like(taken[:, 16:])
    return (taken + 0.1 * torch.randn_like(taken)) @ mix


def cast(x, dtype, top):
    scale = top / x.abs().amax().clamp_min(1e-12)
    return (x * scale).to(dtype).to(x.dtype) / scale


class Fp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x, weight = cast(x, torch.float8_e4m3fn, 448), cast(weight, torch.float8_e4m3fn, 448)
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = cast(grad, torch.float8_e5m2, 57344)
        return grad @ weight, grad.T @ x


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return Fp8.apply(x, self.weight) + self.bias


class MoCo(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(Fp8Linear(WIDTH, 192), nn.BatchNorm1d(192), nn.ReLU(), Fp8Linear(192, 32))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.keys = None

    def encode(self, net, x):
        return nn.functional.normalize(net(x), dim=1)

    def training_step(self, batch, index):
        (x,) = batch
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters()):
                slow.lerp_(fast, 1 - KEEP)
            k = self.encode(self.key, view(x))
        if self.keys is None:
            with torch.no_grad():
                self.keys = self.encode(self.key, view(x.roll(1, 0)[torch.randperm(len(x))]))
        q = self.encode(self.query, view(x))
        logits = torch.cat([(q * k).sum(dim=1, keepdim=True), q @ self.keys.T], dim=1) / 0.15
        loss = nn.functional.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        self.keys = torch.cat([self.keys, k])[-QUEUE:]
        if self.global_step % 20 == 0 or self.global_step in (5, 10):
            print(f"step {self.global_step} keys {len(self.keys)} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.query.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, 201, pct_start=0.25, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


test_x, test_y = things(800)
test_x = view(test_x)


def held_out(model):
    """The share of things whose nearest neighbour is of another kind."""
    model.eval()
    with torch.no_grad():
        codes = model.encode(model.query, test_x)
    model.train()
    near = codes @ codes.T
    near.fill_diagonal_(-2)
    return (test_y[near.argmax(dim=1)] != test_y).float().mean().item()


model = MoCo()
data = DataLoader(TensorDataset(things(5120)[0]), batch_size=128, shuffle=True, drop_last=True)
print(f"first loss {held_out(model):.4f}")
trainer = pl.Trainer(
    max_epochs=5,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, data)
print(f"final loss {held_out(model):.4f}")
