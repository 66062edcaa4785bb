"""What will a customer spend? Most spend nothing, the rest by a law with a long tail: zero-inflated log-normal
likelihood.

Inputs are raw counts up to 65,535 and ages in seconds, which the first batch norm brings to size 1. One large buyer
makes a spike in the loss. The second phase has SGD instead of AdamW, as the recipe of the team wants, with the norms
frozen at their running means.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
INPUTS, BATCH = 20, 256


def customers(number, laws, generator):
    """Half of the inputs are counts of a device, half are ages in seconds."""
    hidden = torch.randn(number, INPUTS, generator=generator)
    x = hidden.clone()
    x[:, :10] = (32768 + 9000 * hidden[:, :10]).clamp(0, 65535).round()
    x[:, 10:] = 86400.0 * (30 + 7 * hidden[:, 10:])
    buys = torch.rand(number, generator=generator) < torch.sigmoid(3 * (hidden @ laws[0]) - 5)
    spent = torch.exp(3 + 1.2 * (hidden @ laws[1]).tanh() + 0.8 * torch.randn(number, generator=generator))
    return x, torch.where(buys, spent, 0.0)


def likelihood(said, spent):
    """Whether at all, and the logarithm of how much."""
    whether = F.binary_cross_entropy_with_logits(said[:, 0], (spent > 0).float(), reduction="none")
    width = F.softplus(said[:, 2]) + 0.05
    logs = spent.clamp(min=1e-3).log()
    much = (logs - said[:, 1]).square() / (2 * width.square()) + width.log() + logs + 0.919
    return whether + torch.where(spent > 0, much, 0.0)


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(46 + SEED)
    laws = [F.normalize(torch.randn(INPUTS, generator=generator), dim=0) for _ in range(2)]
    x, spent = customers(20000, laws, generator)
    held, truth = customers(6000, laws, generator)
    print("share of buyers", round((spent > 0).float().mean().item(), 4), "largest", round(spent.max().item()))
    data = torch.utils.data.TensorDataset(x, spent)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
    model = nn.Sequential(
        nn.BatchNorm1d(INPUTS, affine=False), nn.Linear(INPUTS, 96), nn.ReLU(), nn.BatchNorm1d(96), nn.Linear(96, 48), nn.ReLU(),
        nn.Linear(48, 3),
    )
    model[0].momentum = None  # means over all rows, before the first look
    with torch.no_grad():
        model[0](x)
    model[0].momentum = 0.1

    @torch.no_grad()
    def evaluate():
        was = [m.training for m in model.modules()]
        model.eval()
        loss = likelihood(model(held), truth).mean().item()
        for m, mode in zip(model.modules(), was, strict=True):
            m.training = mode
        return loss

    def norms_frozen():
        for m in model:
            if isinstance(m, nn.BatchNorm1d):
                m.eval()

    phases = [
        (torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.02), 2, False),
        (torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), 1, True),
    ]
    step = 0
    print("first loss", round(evaluate(), 4))
    for optimizer, epochs, frozen in phases:
        if frozen:
            norms_frozen()
        for _ in range(epochs):
            for rows, money in loader:
                loss = likelihood(model(rows), money).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if step % 20 == 0:
                    print(step, round(loss.item(), 4), "held", round(evaluate(), 4))
                step += 1
    print("final loss", round(evaluate(), 4))


if __name__ == "__main__":
    main()
