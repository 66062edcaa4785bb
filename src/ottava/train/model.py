"""A small Llama that reads bytes: RMSNorm, rotary positions, grouped-query attention, SwiGLU, an untied head.

It has plain torch modules only: the trainer converts it like any other model. It fuses projections (qkv_proj,
gate_up_proj, as in Phi-3 and vLLM), because every separate Linear would cast its input again.

Shapes: B sequences, T bytes, D = d_model, H query heads, G key/value heads, E = D / H, F = ffn.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ottava.train.config import ModelConfig

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention; heads / kv_heads query heads share each key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.d_model // config.heads
        self.qkv_proj = nn.Linear(config.d_model, (config.heads + 2 * config.kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, D); cos and sin (T, 1, E) from `rotary_table`."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2G, E)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        # torch's fused CPU attention is more than twice as slow in BF16 as in FP32 (backward, torch 2.13).
        dtype = torch.float32 if x.device.type == "cpu" else v.dtype
        qk, v = rotate(qk.float(), cos, sin).to(dtype), v.to(dtype)
        shared = self.heads // self.kv_heads
        q, k = qk.transpose(1, 2).split((self.heads, self.kv_heads), dim=1)  # (B, H, T, E), (B, G, T, E)
        k, v = k.repeat_interleave(shared, dim=1), v.transpose(1, 2).repeat_interleave(shared, dim=1)
        with torch.autocast(x.device.type, enabled=False):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, E)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(-2))
        return out


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.d_model, 2 * config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, D)"""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, F) each
        y: Tensor = self.down_proj(F.silu(gate) * up)
        return y


class Block(nn.Module):
    """One layer: attention, then the MLP. Each reads the normed stream and adds its output to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, D)"""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class ByteTransformer(nn.Module):
    """Bytes in, the next byte's logits out. Initial weights are drawn from torch's global generator.

    Example:
        >>> model = ByteTransformer(ModelConfig(), sequence_length=128)
        >>> sum(p.numel() for p in model.parameters()), model(torch.zeros(1, 128, dtype=torch.int64)).shape
        (1049984, torch.Size([1, 128, 256]))
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.d_model)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.d_model, VOCABULARY, bias=False)
        cos, sin = rotary_table(sequence_length, config.d_model // config.heads, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        # 1 / sqrt(width). The usual 0.02 is that value for a width of 2,500; a width of 128 learns slower with 0.02
        # (240 steps end at 1.99 instead of 1.78 nats per byte). GPT-2's factor keeps the variance of the stream.
        std = config.d_model**-0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=std / (2 * config.layers) ** 0.5 if residual else std)

    def forward(self, ids: Tensor) -> Tensor:
        """ids, int64 (B, T), T at most the sequence_length of construction -> logits (B, T, 256)"""
        length = ids.shape[-1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(ids)  # (B, T, D)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def rotary_table(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 (length, 1, head_dim): position t turns pair i by t * theta ** (-2i / head_dim).

    Entry i of the first half pairs with entry i of the second (GPT-NeoX layout, as Hugging Face's Llama); the sign of
    the turn is folded into sin.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)[:, None]  # (length, 1, head_dim / 2)
    sin = angle.sin()
    return torch.cat((angle.cos(), angle.cos()), -1).float(), torch.cat((-sin, sin), -1).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs of x (..., T, heads, E) by the angles of `rotary_table`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, fp32 scalar; inputs and targets int64 (B, T)."""
    logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
