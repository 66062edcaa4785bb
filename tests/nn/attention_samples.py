"""What the tests of attention share: the formula in fp64, masks by their definition, and error bounds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Formula(NamedTuple):
    """softmax(q k.T * scale + mask) v in fp64, its gradients for dy, and how far each element may be off."""

    y: Tensor
    grads: tuple[Tensor, Tensor, Tensor]
    y_bound: Tensor
    bounds: tuple[Tensor, Tensor, Tensor]


def seen(queries: int, keys: int, left: int | None, right: int | None, shift: int = 0) -> Tensor:
    """Which key each query sees, pair by pair as the definition has it."""
    table = [[False] * keys for _ in range(queries)]
    for i in range(queries):
        for j in range(keys):
            after = j - (i + shift)
            table[i][j] = (left is None or -after <= left) and (right is None or after <= right)
    return torch.tensor(table).reshape(queries, keys)


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dy: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    u_stored: float | None = None,
    u_sum: float = 2.0**-24,
) -> Formula:
    """(B, S, H, D) tensors; bounds to first order: u_stored for each rounding of P, dS and results, u_sum for sums.

    |dP| <= P * 2 |dscores|, |dscores| <= (D + 4) u_sum |q| |k| scale; then P (or dS) is rounded and summed over keys.
    """
    u_stored = torch.finfo(q.dtype).eps / 2 if u_stored is None else u_stored
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    shared = q.shape[2] // k.shape[2]
    qd, kd, vd, gd = (t.double().transpose(1, 2) for t in (q, k, v, dy))
    kd, vd = kd.repeat_interleave(shared, 1), vd.repeat_interleave(shared, 1)
    scores = qd @ kd.mT * scale
    size = qd.abs() @ kd.abs().mT * scale
    if bias is not None:
        scores, size = scores + bias.double(), size + bias.double().abs()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sink is not None:
        column = sink.double().view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        p = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    else:
        p = scores.softmax(-1).nan_to_num(0.0)
    y = p @ vd
    dp, d = gd @ vd.mT, (gd * y).sum(-1, keepdim=True)
    ds = p * (dp - d) * scale
    grads = ds @ kd, ds.mT @ qd, p.mT @ gd

    keys, dim = k.shape[1], q.shape[-1]
    score_error = 2 * (dim + 4) * u_sum * (size * p.gt(0)).amax().item()
    kappa = 2 * score_error + (keys + q.shape[1] + dim + 16) * u_sum + 3 * u_stored
    size_ds = p * (gd.abs() @ vd.abs().mT + (gd.abs() * (p @ vd.abs())).sum(-1, keepdim=True)) * scale
    sizes = size_ds @ kd.abs(), size_ds.mT @ qd.abs(), p.mT @ gd.abs()

    def back(t: Tensor) -> Tensor:
        return t.transpose(1, 2)

    def gathered(t: Tensor) -> Tensor:  # a shared head gets the gradients of all that share it
        return t.unflatten(1, (-1, shared)).sum(2)

    return Formula(
        back(y),
        (back(grads[0]), back(gathered(grads[1])), back(gathered(grads[2]))),
        back(kappa * (p @ vd.abs())),
        (back(kappa * sizes[0]), back(2 * kappa * gathered(sizes[1])), back(2 * kappa * gathered(sizes[2]))),
    )


def within(got: Tensor, wanted: Tensor, bound: Tensor) -> bool:
    """Whether no element is further off than its bound; the smallest numbers of the dtype are let be."""
    off = (got.double() - wanted).abs() - bound
    return bool((off <= torch.finfo(got.dtype).tiny).all())
