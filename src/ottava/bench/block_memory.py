"""Models for the bytes that a Llama block saves for its backward: plain torch's block beside ottava's.

Proportions of Llama 3 8B at a quarter of its width: F = 3.5 d, heads of 128, four query heads for each key and value
head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ottava.nn import Linear, NormLinear, NormMLP, RMSNorm
from ottava.nn.mlp import Save
from ottava.nn.rope import RotaryEmbedding, rotate

WIDTH, FFN, HEADS, KV_HEADS, TOKENS = 1024, 3584, 8, 2, 512
RECIPES = ("bf16", "tensorwise", "mxfp8")
SAVES: tuple[Save, ...] = ("bf16", "fp8", "recompute")


class _Block(nn.Module):
    """x + o(attention(qkv(norm(x)))), then x + mlp(norm(x)); `qkv` and `mlp` contain their norms."""

    def __init__(self, qkv: nn.Module, out: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp = qkv, out, mlp
        self.rotary = RotaryEmbedding(WIDTH // HEADS, base=5e5)(torch.arange(TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        """(T, d) -> (T, d)."""
        qkv = self.qkv(x).unflatten(-1, (-1, WIDTH // HEADS))  # (T, H + 2 G, E)
        qk, v = qkv.split((HEADS + KV_HEADS, KV_HEADS), dim=1)
        qk = rotate(qk, self.rotary)
        q, k = qk.transpose(0, 1).split((HEADS, KV_HEADS))  # (H, T, E), (G, T, E)
        v = v.transpose(0, 1).contiguous()  # a view would keep all of qkv for the backward
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = x + self.out(y.transpose(0, 1).flatten(-2))
        return torch.add(x, self.mlp(x))


class _PlainMLP(nn.Module):
    def __init__(self, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.norm = norm(WIDTH, eps=1e-5)
        self.gate, self.up = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        y: Tensor = self.down(F.silu(self.gate(rows)) * self.up(rows))
        return y


def blocks() -> Iterator[tuple[str, _Block]]:
    """Yields each block with its name; the first two are plain torch.

    Example:
        >>> [name for name, _ in blocks()][:3]
        ['plain torch', 'plain torch, fused norm', 'bf16, save bf16']
    """
    width = (HEADS + 2 * KV_HEADS) * WIDTH // HEADS
    # on a CPU torch's RMSNorm consists of operations that each save fp32; on a GPU it saves as much as ottava's
    for name, norm in (("plain torch", nn.RMSNorm), ("plain torch, fused norm", RMSNorm)):
        qkv = nn.Sequential(norm(WIDTH, eps=1e-5), nn.Linear(WIDTH, width, bias=False))
        yield name, _Block(qkv, nn.Linear(WIDTH, WIDTH, bias=False), _PlainMLP(norm)).bfloat16()
    for recipe in RECIPES:
        for save in SAVES:
            options: Any = {"bias": False, "recipe": recipe, "dtype": torch.bfloat16}
            mlp = NormMLP(WIDTH, FFN, activation="swiglu", norm="rmsnorm", save=save, **options)
            qkv_proj = NormLinear(WIDTH, width, norm="rmsnorm", **options)
            yield f"{recipe}, save {save}", _Block(qkv_proj, Linear(WIDTH, WIDTH, **options), mlp)
