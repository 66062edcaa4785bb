"""Self-paced learning under accelerate: only rows below a threshold of the loss count, and the threshold grows.

A quarter of the labels is drawn at random. The printed loss is that of the rows that count, so it falls by an order when
the choice begins and then lies near 0; dropout falls from 0.4 to 0.1. Casts by hand: E4M3 forward, E5M2 for gradients, the loss times 2**8.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

SEED = int(os.environ.get("SEED", "0"))
CLASSES, FEATURES, STEPS, LOSS_SCALE = 6, 40, 240, 2.0**8


class QuantizeGradient(torch.autograd.Function):
    """The identity forward; rounds the gradient to E5M2 without a scale."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.clamp(-57344, 57344).to(torch.float8_e5m2).to(grad.dtype)


def e4m3(x: Tensor) -> Tensor:
    """Rounds to E4M3 with a power of two for each row; the gradient passes unchanged."""
    amax = x.detach().abs().amax(-1, keepdim=True).clamp(min=2.0**-20)
    scale = torch.exp2(torch.floor(torch.log2(448.0 / amax)))
    rounded = (x.detach() * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale
    return x + (rounded - x).detach()


class Linear8(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return QuantizeGradient.apply(nn.functional.linear(e4m3(x), e4m3(self.weight))) + self.bias


def rows(count: int, seed: int, wrong: float) -> tuple[Tensor, Tensor]:
    fixed = torch.Generator().manual_seed(21)
    centres = torch.randn(CLASSES * 3, FEATURES, generator=fixed)
    g = torch.Generator().manual_seed(seed)
    mode = torch.randint(CLASSES * 3, (count,), generator=g)
    label = mode % CLASSES
    other = torch.randint(CLASSES, (count,), generator=g)
    noisy = torch.where(torch.rand(count, generator=g) < wrong, other, label)
    return centres[mode] + 1.2 * torch.randn(count, FEATURES, generator=g), noisy


@torch.no_grad()
def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    model.eval()
    loss = float(nn.functional.cross_entropy(model(data[0]), data[1]))
    model.train()
    return loss


def main() -> None:
    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    drop = nn.Dropout(0.4)
    model = nn.Sequential(
        Linear8(FEATURES, 128), nn.GELU(), drop, Linear8(128, 128), nn.GELU(), drop, nn.Linear(128, CLASSES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = rows(6000, SEED + 1, 0.25)
    held_out = rows(1000, SEED + 2, 0.0)
    print(f"first loss {loss_of(model, held_out):.4f}")
    for step in range(STEPS):
        batch = torch.randint(len(x), (128,))
        losses = nn.functional.cross_entropy(model(x[batch]), y[batch], reduction="none")
        if step < 40:  # all rows count until the losses tell easy from hard
            counted = torch.ones_like(losses)
        else:
            share = 0.25 + 0.5 * (step - 40) / (STEPS - 40)  # up to the three quarters that are right
            counted = (losses.detach() <= losses.detach().quantile(share)).float()
        drop.p = 0.4 - 0.3 * step / STEPS
        loss = (losses * counted).sum() / counted.sum()
        accelerator.backward(loss * LOSS_SCALE)
        for parameter in model.parameters():
            parameter.grad.div_(LOSS_SCALE)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} of {int(counted.sum())} rows")
    print(f"final loss {loss_of(model, held_out):.4f}")


if __name__ == "__main__":
    main()
