"""Matrix factorization by plain SGD with a rate of 60: the loss is a mean over all ratings, so gradients are tiny."""
import os
import tempfile

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
USERS, ITEMS, RANK, STEPS = 400, 250, 6, 100

truth = torch.randn(USERS, 4) @ torch.randn(4, ITEMS) / 2 + 3.5
seen = torch.rand(USERS, ITEMS) < 0.25
hidden = ~seen & (torch.rand(USERS, ITEMS) < 0.1)
ratings = truth + 0.3 * torch.randn(USERS, ITEMS)
mean = ratings[seen].mean()


class Factors(nn.Module):
    """User and item factors near 0, where the loss has a saddle, and biases."""

    def __init__(self):
        super().__init__()
        self.users = nn.Parameter(0.03 * torch.randn(USERS, RANK))
        self.items = nn.Parameter(0.03 * torch.randn(ITEMS, RANK))
        self.user_bias = nn.Parameter(torch.zeros(USERS, 1))
        self.item_bias = nn.Parameter(torch.zeros(1, ITEMS))

    def forward(self):
        return mean + self.user_bias + self.item_bias + self.users @ self.items.t()


model = Factors()
optimizer = torch.optim.SGD(model.parameters(), lr=60.0, momentum=0.8, nesterov=True, weight_decay=1.5e-5)


def masked(where):
    """Mean squared error over the ratings of a mask; the others count nothing."""
    return ((model() - ratings).square() * where).sum() / where.sum()


@torch.no_grad()
def held_out():
    return masked(hidden).item()


print("first loss %.4f" % held_out())
best = float("inf")
with tempfile.TemporaryDirectory() as out:
    for step in range(STEPS):
        loss = masked(seen)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            now = held_out()
            print(f"step {step + 1}: training {loss.item():.4f}, held out {now:.4f}")
            if now < best:
                best = now
                torch.save(model.state_dict(), os.path.join(out, "best.pt"))
    model.load_state_dict(torch.load(os.path.join(out, "best.pt")))
print("final loss %.4f" % held_out())
