"""LambdaRank for search results: there is no loss, gradients of the scores are computed by hand and given to backward.

The labels are clicks of five grades with noise; what is printed is 1 - NDCG@10 of the training queries, which is not
what the gradients belong to.
"""

import dataclasses
import os

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
QUERIES, DOCUMENTS, FEATURES = 1536, 20, 32
DISCOUNT = 1.0 / torch.log2(torch.arange(DOCUMENTS) + 2.0)


def results(count: int, seed: int) -> TensorDataset:
    fixed = torch.Generator().manual_seed(14)
    w1, w2 = torch.randn(FEATURES, 16, generator=fixed) / 6, torch.randn(16, generator=fixed)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, DOCUMENTS, FEATURES, generator=g) + 0.5 * torch.randn(count, 1, FEATURES, generator=g)
    score = torch.tanh(2 * x @ w1) @ w2
    score = score - score.mean(1, keepdim=True) + 0.5 * torch.randn(count, DOCUMENTS, generator=g)
    grade = (score > 0.5).long() + (score > 2.0).long() + (score > 3.0).long() + (score > 4.5).long()
    return TensorDataset(x, grade)


def gains(grade: Tensor) -> Tensor:
    return 2.0**grade - 1.0


def ideal(grade: Tensor) -> Tensor:
    return (gains(grade).sort(1, descending=True).values * DISCOUNT).sum(1).clamp(min=1e-6)


def lambdas(scores: Tensor, grade: Tensor) -> Tensor:
    """The gradient of each score: over pairs, how wrong it is times how much NDCG a swap would change."""
    rank = scores.argsort(1, descending=True).argsort(1)
    discount = DISCOUNT[rank]
    gain = gains(grade) / ideal(grade)[:, None]
    swap = ((gain[:, :, None] - gain[:, None, :]) * (discount[:, :, None] - discount[:, None, :])).abs()
    better = (grade[:, :, None] > grade[:, None, :]).float()
    push = better * swap * torch.sigmoid(scores[:, None, :] - scores[:, :, None])
    return (push.sum(1) - push.sum(2)) / len(scores)


@torch.no_grad()
def one_minus_ndcg(model: nn.Module, data: TensorDataset) -> float:
    x, grade = data.tensors
    order = model(x.flatten(0, 1)).view(grade.shape).argsort(1, descending=True)
    found = (gains(grade).gather(1, order) * DISCOUNT)[:, :10].sum(1)
    best = (gains(grade).sort(1, descending=True).values * DISCOUNT)[:, :10].sum(1)
    return float((1 - found / best.clamp(min=1e-6))[best > 0].mean())


def main() -> None:
    torch.manual_seed(SEED)
    model = nn.Sequential(
        nn.Linear(FEATURES, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 32), nn.SiLU(), nn.Linear(32, 1)
    )
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: m.out_features >= 32)
    held_out = results(400, SEED + 808)
    loader = DataLoader(results(QUERIES, SEED + 1), batch_size=32, shuffle=True)
    optimizer = torch.optim.RAdam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.65)
    print(f"first loss {one_minus_ndcg(model, held_out):.4f}")
    for epoch in range(6):
        seen = []
        for x, grade in loader:
            scores = model(x.flatten(0, 1)).view(grade.shape)
            optimizer.zero_grad()
            scores.backward(lambdas(scores.detach(), grade))
            optimizer.step()
            order = scores.detach().argsort(1, descending=True)
            found = (gains(grade).gather(1, order) * DISCOUNT).sum(1) / ideal(grade)
            seen.append(1 - found.mean())
        schedule.step()
        print(f"epoch {epoch} 1 - NDCG of training {torch.stack(seen).mean():.4f}")
    print(f"final loss {one_minus_ndcg(model, held_out):.4f}")


if __name__ == "__main__":
    main()
