"""Training is bit for bit what it is unwatched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ottava.watching.collector import Collector
from ottava.watching.config import WatchConfig
from ottava.watching.modules import ModuleTap
from watch_samples import ALL, CHECKPOINTS


class Block(nn.Module):
    """Pre-norm attention by hand and a gated MLP, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + nn.functional.dropout(self.proj(mixed.transpose(1, 2).flatten(2)), 0.1)
        h = self.norm2(x)
        return x + nn.functional.dropout(self.down(nn.functional.silu(self.gate(h)) * self.up(h)), 0.1)


class Transformer(nn.Module):
    """Tied embedding and head."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.block = Block(32)
        self.run_block = forward

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.run_block(self.block, self.embed(tokens)))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant", "selective"])
def test_training_is_bit_identical(checkpointing: str, autocast: bool) -> None:
    def train(watched: bool) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(3)
        model = Transformer(CHECKPOINTS[checkpointing])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        collector = Collector(WatchConfig(recipes="nvfp4", detail="exponents", tensors=ALL))
        tap = ModuleTap(collector.simulate, tensors=ALL, wants=collector.wants)
        losses = []
        for step in range(3):
            collector.looking = step != 1
            if watched:
                tap.attach()
            for part in range(2):
                tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(2 * step + part))
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                losses.append(loss.detach())
            tap.detach()
            tallies, _ = collector.drain()
            assert len(tallies) == 48 if watched and step != 1 else not tallies
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *(p.detach() for p in model.parameters())], torch.get_rng_state()

    (with_tap, after), (without, after_without) = train(True), train(False)
    assert torch.equal(after, after_without)
    for a, b in zip(with_tap, without, strict=True):
        assert torch.equal(a, b)
