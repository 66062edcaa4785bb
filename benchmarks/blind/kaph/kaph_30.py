"""A variational graph autoencoder that finds missing links: one pair in seventy is a link, which weighs that much more.

The likelihood is a mean over all pairs, the divergence is divided by the nodes squared, and codes are drawn anew in each
step; the loss stays above a half, while hidden links get ranked. Graph convolutions with torchao's float8 (emulated).
"""

import dataclasses
import os

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
NODES, KINDS, WORDS = 512, 12, 128


def graph(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Links, nine in ten within a kind; bags of words that tell a little of the kind; pairs (i < j) that are hidden."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(KINDS, (NODES,), generator=g)
    same = kind[:, None] == kind
    chance = torch.where(same, 0.9 * 8 * KINDS / NODES, 0.1 * 8 * KINDS / (NODES * (KINDS - 1)))
    links = (torch.rand(NODES, NODES, generator=g) < chance).triu(1)
    hidden = links & (torch.rand(NODES, NODES, generator=g) < 0.15)
    topics = 0.05 + 0.10 * (torch.rand(KINDS, WORDS, generator=g) < 0.2).float()
    words = (torch.rand(NODES, WORDS, generator=g) < topics[kind]).float()
    return links, hidden, words


def smoothing(links: Tensor) -> Tensor:
    """The symmetric normalization of the seen links with loops."""
    seen = (links | links.T).float() + torch.eye(NODES)
    root = seen.sum(1).rsqrt()
    return root[:, None] * seen * root


class Encoder(nn.Module):
    """Two graph convolutions; the second one gives a mean and a logarithm of a deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WORDS, 96, bias=False), nn.Linear(96, 64, bias=False)

    def forward(self, smooth: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(smooth @ self.first(nn.functional.dropout(words, 0.2, self.training)))
        mean, log_dev = (smooth @ self.second(h)).chunk(2, 1)
        return mean, log_dev.clamp(max=3.0)


@torch.no_grad()
def misranked(model: Encoder, smooth: Tensor, words: Tensor, links: Tensor, hidden: Tensor) -> float:
    """One minus the area under the curve for hidden links against pairs without a link."""
    model.eval()
    mean, _ = model(smooth, words)
    model.train()
    scores = mean @ mean.T
    positive = scores[hidden]
    pairs = torch.ones(NODES, NODES, dtype=torch.bool).triu(1) & ~links
    negative = scores[pairs].sort().values
    return 1.0 - float((torch.searchsorted(negative, positive) / len(negative)).mean())


def main() -> None:
    torch.manual_seed(SEED)
    links, hidden, words = graph(SEED + 1)
    seen = links & ~hidden
    smooth = smoothing(seen)
    wanted = (seen | seen.T).float() + torch.eye(NODES)
    weight = (NODES**2 - wanted.sum()) / wanted.sum()
    norm = NODES**2 / (2 * (NODES**2 - wanted.sum()))
    model = Encoder()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=config)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    print(f"first loss {misranked(model, smooth, words, links, hidden):.4f}")
    for step in range(140):
        mean, log_dev = model(smooth, words)
        codes = mean + log_dev.exp() * torch.randn_like(mean)
        likelihood = nn.functional.binary_cross_entropy_with_logits(codes @ codes.T, wanted, pos_weight=weight)
        divergence = 0.5 * ((2 * log_dev).exp() + mean.square() - 1 - 2 * log_dev).sum(1).mean() / NODES
        loss = norm * likelihood + divergence
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} divergence {divergence.item():.4f}")
    print(f"final loss {misranked(model, smooth, words, links, hidden):.4f}")


if __name__ == "__main__":
    main()
