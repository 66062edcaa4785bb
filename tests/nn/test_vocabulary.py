"""Numbers of classes that ranks split, joined; how the layer runs on them is tested in tests/distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ottava.nn import vocabulary
from ottava.nn.cross_entropy import CrossEntropy
from ottava.nn.vocabulary import SharedVocabulary

RANKS = 3


def test_three_numbers_a_token_make_the_loss_of_all_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank has only logits of -inf, and where targets do not count."""
    logits = torch.randn(7, 9 * RANKS, generator=torch.Generator().manual_seed(0))
    logits[0, :9] = -torch.inf
    target = torch.tensor([26, 0, 9, 17, -100, 18, 8])
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: RANKS)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
    parts = logits.chunk(RANKS, 1)
    rank, told = 0, []

    def tell(out: Tensor, own: Tensor, group: Any) -> None:
        told.append(own)
        out.copy_(torch.cat((told * RANKS)[:RANKS] if len(told) < RANKS else told[:RANKS]))

    monkeypatch.setattr(vocabulary, "all_gather", tell)
    settings = CrossEntropy(label_smoothing=0.0, z_loss=0.1, softcap=None)
    wanted, lse = settings.of(logits.clone(), target, vocabulary.Vocabulary())
    for _ in range(2):  # first every rank tells its numbers, then each reads those of all
        for rank in range(RANKS):
            shared = SharedVocabulary(dist.group.WORLD, 9 * rank, 9 * RANKS, split=False)  # type: ignore[arg-type]
            got, own_lse = settings.of(parts[rank].clone(), target, shared)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(own_lse, lse)
    whole = settings.gradient(logits.clone(), lse, target, None, vocabulary.Vocabulary())
    torch.testing.assert_close(settings.gradient(parts[2].clone(), lse, target, None, shared), whole.chunk(RANKS, 1)[2])
