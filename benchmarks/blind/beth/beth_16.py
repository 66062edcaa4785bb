"""Three regressions with one trunk under accelerate, weighted by learned uncertainties.

The targets are in volts, in millimetres and in kelvin, so they differ by orders; each head has a typical size. The loss is
a sum of negative log likelihoods: it begins above 0, and ends far below as the targets are known ever better.
"""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

SEED = int(os.environ.get("SEED", "0"))
INPUT, WIDTH, EPOCHS = 64, 128, 12
UNITS = torch.tensor([0.05, 1.0, 40.0])
NOISE = torch.tensor([0.003, 0.15, 8.0])


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(INPUT, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()
        )
        self.heads = nn.Linear(WIDTH, 3)
        self.log_variance = nn.Parameter(2 * UNITS.log())

    def forward(self, x, y):
        error = (UNITS * self.heads(self.body(x)) - y).square()
        return 0.5 * (error * torch.exp(-self.log_variance) + self.log_variance).sum(-1).mean()


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED + 9)
    x = torch.randn(3072, INPUT, generator=g)
    first = torch.sin(x @ torch.randn(INPUT, 4, generator=g) / INPUT**0.5)
    y = UNITS * (first @ torch.randn(4, 3, generator=g)) + NOISE * torch.randn(3072, 3, generator=g)

    model = Trunk()
    print(ottava.convert(model, "guarded", filter=lambda name, layer: name.startswith("body")))
    own = [p for name, p in model.named_parameters() if name != "log_variance"]
    optimizer = torch.optim.AdamW(
        [{"params": own, "lr": 3e-3}, {"params": [model.log_variance], "lr": 5e-2, "weight_decay": 0.0}]
    )
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    loader = DataLoader(TensorDataset(x[:2560], y[:2560]), batch_size=64, shuffle=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [3e-3, 5e-2], total_steps=EPOCHS * 20 + 1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    @torch.no_grad()
    def held() -> float:
        model.eval()
        loss = model(x[2560:], y[2560:]).item()
        model.train()
        return loss

    print(f"first loss {held():.4f}")
    for epoch in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(*batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
        print(f"epoch {epoch}: {loss.item():.4f}, held-out {held():.4f}")
    print(f"final loss {held():.4f}")


if __name__ == "__main__":
    main()
