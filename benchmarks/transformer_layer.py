"""What a transformer layer costs beside plain torch's: `python benchmarks/transformer_layer.py [rounds]`.

A Llama block in BF16 on a CPU, forward and backward, both in each round; CPU time, medians of the rounds' ratios.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ottava.bench.method import interleaved
from ottava.nn import RotaryEmbedding, TransformerLayer

HIDDEN, FFN, HEADS, KV_HEADS, BATCH, LENGTH = 512, 1408, 8, 2, 4, 256


class Plain(nn.Module):
    """RMSNorm, grouped-query attention with rotation, SwiGLU; torch's own modules, q, k and v in one linear as ours."""

    def __init__(self) -> None:
        super().__init__()
        dim = HIDDEN // HEADS
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * dim, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 2 * FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, H); cos and sin (S, 1, D)."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, HIDDEN // HEADS)).split((HEADS, KV_HEADS, KV_HEADS), -2)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.fc1(self.mlp_norm(x)).chunk(2, -1)
        return x + self.fc2(F.silu(gate) * up)


def main(rounds: int = 20) -> None:
    """Prints milliseconds and ratios, with quartiles."""
    torch.manual_seed(0)
    settings = {"kv_heads": KV_HEADS, "norm": "rmsnorm", "activation": "swiglu", "bias": False, "recipe": "bf16"}
    ours, plain = TransformerLayer(HIDDEN, FFN, HEADS, **settings).bfloat16(), Plain().bfloat16()
    x = torch.randn(BATCH, LENGTH, HIDDEN).bfloat16().requires_grad_()
    table = RotaryEmbedding(HIDDEN // HEADS)(torch.arange(LENGTH))
    cos = table.cos.bfloat16()
    sin = torch.cat((table.sin.chunk(2, -1)[1],) * 2, -1).bfloat16()

    def step(forward: Callable[[], Tensor]) -> Callable[[], None]:
        return lambda: forward().sum().backward()

    variants = {"plain torch": step(lambda: plain(x, cos, sin)), "ottava, bf16": step(lambda: ours(x, rotary=table))}
    for timing in interleaved(variants, rounds, clock=time.process_time):
        print(timing)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
