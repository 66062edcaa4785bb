"""An echo state network: a frozen random recurrent net, of which L-BFGS trains the linear read-out alone."""
import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
UNITS, WASH = 200, 100


def mackey_glass(count):
    """The chaotic series of Mackey and Glass, from a random start."""
    history = (1.2 + 0.2 * (torch.rand(18) - 0.5)).tolist()
    for _ in range(count + 300):
        past = history[-18]
        history.append(history[-1] + 0.2 * past / (1 + past**10) - 0.1 * history[-1])
    return torch.tensor(history[-count:], dtype=torch.float32)


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.RNN(1, UNITS, batch_first=True)
        self.inner.requires_grad_(False)
        weight = self.inner.weight_hh_l0
        weight.normal_().mul_(torch.rand_like(weight) < 0.1)  # nine in ten connections are missing
        weight.mul_(0.95 / torch.linalg.eigvals(weight).abs().max())
        self.inner.weight_ih_l0.uniform_(-0.5, 0.5)
        self.readout = nn.Linear(UNITS, 1)
        nn.init.zeros_(self.readout.weight)

    def forward(self, series):
        return self.readout(self.inner(series)[0][:, WASH:])


def pairs(rows, length=400, ahead=12):
    series = torch.stack([mackey_glass(length + ahead) for _ in range(rows)]) - 0.9
    return series[:, :length, None], series[:, WASH + ahead :, None]


net = Echo()
train, test = pairs(6), pairs(4)
optimizer = torch.optim.LBFGS(net.readout.parameters(), lr=1.0, max_iter=4, history_size=20, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(train[0]), train[1]) + 1e-7 * net.readout.weight.square().sum()
    loss.backward()
    return loss


@torch.no_grad()
def held_out():
    return nn.functional.mse_loss(net(test[0]), test[1]).item()


print("first loss %.6f" % held_out())
for step in range(60):
    loss = optimizer.step(closure)
    if step % 10 == 0:
        print(f"step {step}: {loss.item():.3e}")
print("final loss %.6f" % held_out())
