"""Self-critical sequence training: the baseline of a sampled row is the reward of the greedy row.

The policy's loss lies around 0 and has either sign; it says nothing. Rows whose sample is as good as the greedy one have
no gradient, more and more of them. The final loss is minus the mean reward of greedy rows on new inputs.
"""

import os

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
SYMBOLS, LENGTH, WIDTH, STEPS, BATCH = 12, 8, 128, 240, 128


class Policy(nn.Module):
    """Reads a row, writes a row; each place sees all of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SYMBOLS, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.around = nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, x):
        h = self.table(x) + self.place
        before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
        h = self.around(torch.cat([h, before], -1)).relu()
        return self.out(h + self.mlp(h)).log_softmax(-1)


def reward(x: torch.Tensor, said: torch.Tensor, rule: torch.Tensor) -> torch.Tensor:
    """The share of right symbols; nobody tells which ones are."""
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return (said == rule[x, before % 2]).float().mean(1)


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    rule = torch.randint(0, SYMBOLS, (SYMBOLS, 2), generator=g)
    policy = Policy()
    ottava.convert(policy, "tensorwise")
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    held = torch.randint(0, SYMBOLS, (512, LENGTH), generator=g)

    @torch.no_grad()
    def greedy_loss() -> float:
        return -reward(held, policy(held).argmax(-1), rule).mean().item()

    print(f"first loss {greedy_loss():.4f}")
    for step in range(STEPS):
        x = torch.randint(0, SYMBOLS, (BATCH, LENGTH), generator=g)
        scores = policy(x)
        with torch.no_grad():
            said = torch.multinomial(scores.exp().flatten(0, 1), 1, generator=g).view_as(x)
            advantage = reward(x, said, rule) - reward(x, scores.argmax(-1), rule)
        spoken = scores.gather(-1, said[..., None])[..., 0].sum(1)
        entropy = -(scores.exp() * scores).sum(-1).mean()
        loss = -(advantage * spoken).mean() - 0.1 * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"{step:4d}  loss {loss.item():+.4f}  held-out {greedy_loss():.4f}")
    print(f"final loss {greedy_loss():.4f}")


if __name__ == "__main__":
    main()
