"""Fine-tuning in Lightning with layers that thaw from the top: the head alone, then the last block, then all.

The backbone comes from another task. Each thawed part gets its own group of the optimizer with a smaller rate. The
linears of the backbone run on numbers rounded to E4M3, forward, and E5M2, backward.
"""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", "0"))
INPUT, WIDTH = 32, 96


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = x.abs().amax().clamp(min=1e-30) / torch.finfo(dtype).max
    return (x / scale).to(dtype).to(x.dtype) * scale


class Float8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = cast(x, torch.float8_e4m3fn), cast(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = cast(grad, torch.float8_e5m2)
        return grad @ w, grad.T @ x


class Block(nn.Module):
    def __init__(self, before: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(before, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return torch.relu(self.norm(Float8.apply(x, self.linear.weight) + self.linear.bias))


class Net(pl.LightningModule):
    def __init__(self, blocks: nn.ModuleList, outputs: int, rate: float) -> None:
        super().__init__()
        self.blocks, self.head, self.rate = blocks, nn.Linear(WIDTH, outputs), rate

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        print(f"epoch {self.current_epoch}: held-out {self.trainer.callback_metrics['val_loss']:.4f}")

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.rate)


class Thaw(BaseFinetuning):
    def freeze_before_training(self, net):
        self.freeze(net.blocks)

    def finetune_function(self, net, epoch, optimizer):
        if epoch in (4, 7):
            part = net.blocks[-1] if epoch == 4 else net.blocks[:-1]
            self.unfreeze_and_add_param_group(part, optimizer, lr=net.rate * (0.5 if epoch == 4 else 0.2))


def main() -> None:
    pl.seed_everything(SEED, verbose=False)
    g = torch.Generator().manual_seed(SEED)
    x = torch.randn(3000, INPUT, generator=g)
    code = torch.tanh(x @ torch.randn(INPUT, 6, generator=g) / 3)
    other = (code @ torch.randn(6, 8, generator=g)).argmax(1)
    ours = (torch.cat([code, code * code.roll(1, 1)], 1) @ torch.randn(12, 5, generator=g)).argmax(1)
    quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                 enable_model_summary=False, num_sanity_val_steps=0)

    blocks = nn.ModuleList([Block(INPUT), Block(WIDTH), Block(WIDTH)])
    source = DataLoader(TensorDataset(x[:1500], other[:1500]), 64, shuffle=True)
    pl.Trainer(max_epochs=3, **quiet).fit(Net(blocks, 8, 3e-3), source)

    net = Net(blocks, 5, 4e-3)
    train = DataLoader(TensorDataset(x[1500:2500], ours[1500:2500]), 64, shuffle=True)
    held = DataLoader(TensorDataset(x[2500:], ours[2500:]), 250)
    trainer = pl.Trainer(max_epochs=10, callbacks=[Thaw()], **quiet)
    print(f"first loss {trainer.validate(net, held, verbose=False)[0]['val_loss']:.4f}")
    trainer.fit(net, train, held)
    print(f"final loss {trainer.validate(net, held, verbose=False)[0]['val_loss']:.4f}")


if __name__ == "__main__":
    main()
