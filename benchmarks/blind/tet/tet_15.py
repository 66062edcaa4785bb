"""Parcels a day at depots, by Poisson regression: counts in the thousands, so the loss is below -10,000 from the start."""

import os
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

SEED = int(os.environ.get("SEED", 0))
FACTS, EPOCHS = 32, 8


def depots(count: int, weights: Tensor, source: torch.Generator) -> TensorDataset:
    """Facts of size 1, hours open (the exposure), and the parcels; a depot's rate is a smooth law of its facts."""
    facts = torch.randn(count, FACTS, generator=source)
    hours = 4 + 12 * torch.rand(count, 1, generator=source)
    log_rate = 5.2 + 0.35 * torch.tanh(facts @ weights[0]) + 0.25 * torch.sin(facts @ weights[1])
    return TensorDataset(facts, hours, torch.poisson(hours * log_rate[:, None].exp(), generator=source))


class Rate(nn.Module):
    """The log of parcels an hour; its bias begins at the mean of the data, the rest of the last layer at 0."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FACTS, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.constant_(self.net[-1].bias, mean)

    def forward(self, facts: Tensor, hours: Tensor) -> Tensor:
        return self.net(facts) + hours.log()


@torch.no_grad()
def deviance(model: Rate, data: TensorDataset) -> float:
    """Twice the distance in log likelihood to a perfect fit, a row."""
    model.eval()
    facts, hours, parcels = data.tensors
    told = model(facts, hours).double()
    parcels = parcels.double()
    model.train()
    return float(2 * (torch.xlogy(parcels, parcels) - parcels * told - parcels + told.exp()).mean())


def main() -> None:
    torch.manual_seed(SEED)
    source = torch.Generator().manual_seed(1600 + SEED)
    weights = torch.randn(2, FACTS, generator=source) / FACTS**0.5
    training, validation, test = (depots(count, weights, source) for count in (3072, 600, 600))
    facts, hours, parcels = training.tensors
    model = Rate(float((parcels.sum() / hours.sum()).log()))
    print(ottava.convert(model, "tensorwise_e4m3"))
    print(f"first loss {deviance(model, test):.2f}")
    optimizer = torch.optim.NAdam(model.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.05)
    loader = DataLoader(training, batch_size=64, shuffle=True)
    for epoch in range(EPOCHS):
        losses = []
        for facts, hours, parcels in loader:
            # without the term that does not depend on the net, as torch has it
            loss = nn.functional.poisson_nll_loss(model(facts, hours), parcels, log_input=True, full=False)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 20.0)  # gradients are in the hundreds
            optimizer.step()
            losses.append(float(loss.detach()))
        now = deviance(model, validation)
        schedule.step(now)
        rate = optimizer.param_groups[0]["lr"]
        print(f"epoch {epoch}: losses {min(losses):.0f} to {max(losses):.0f}, deviance {now:.2f}, rate {rate}")
    print(f"final loss {deviance(model, test):.2f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_15.py good|bad")
    main()
