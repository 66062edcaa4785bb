"""Training is bit for bit what it is unwatched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

import ottava
from ottava.record.reader import Run
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


class Noise(nn.Module):
    """A weight that is drawn anew at every call."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.01 * torch.randn_like(weight)


class Computed(nn.Module):
    """Layers whose weights torch's parametrize computes: reading one changes what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(spectral_norm(nn.Linear(16, 32)), nn.ReLU(), weight_norm(nn.Linear(32, 16)))
        self.embed = nn.Embedding(20, 16)
        for layer, name in ((self.attention, "in_proj_weight"), (self.attention.out_proj, "weight")):
            register_parametrization(layer, name, Noise())
        register_parametrization(self.embed, "weight", Noise())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.mlp(self.attention(x, x, x)[0])


def test_weights_that_are_computed_are_computed_as_often(tmp_path: Path) -> None:
    """A spectral norm moves its vectors at every call, and noise is drawn; what the watch does not see, it says."""

    def train(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Computed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        with ottava.watch(model, tmp_path / "run") if watched else nullcontext():
            for _ in range(7):
                loss = model(torch.randint(20, (4, 8))).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return [*losses, *model.state_dict().values(), torch.get_rng_state()]

    assert all(map(torch.equal, train(True), train(False)))
    run = Run.open(tmp_path / "run")
    assert {fact["kind"] for fact in run.experiments} >= {"shadow"}
    layers = {layer["name"]: layer for layer in run.manifest["layers"]}
    assert len(layers) == 4
    assert all("parametrize computes it" in one["why"] and "weight" not in one["tensors"] for one in layers.values())
