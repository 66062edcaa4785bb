"""The measured models in plain torch: a GPT block, a Llama block, the demo's model, and SmolLM2-135M's architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ottava.nn import Linear, NormLinear, NormMLP, RMSNorm
from ottava.nn.mlp import Save
from ottava.nn.rope import RotaryEmbedding, RotaryTable, rotate
from ottava.train.config import ModelConfig
from ottava.train.model import VOCABULARY, ByteTransformer


class Block(nn.Module):
    """A GPT block without dropout: attention and a feed-forward of 4 d, LayerNorm before each."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        batch, length, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, d))
        return torch.add(x, self.down(F.gelu(self.up(self.norm2(x)))))


class Attention(nn.Module):
    """Causal self-attention of `LlamaBlock`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.d_model // config.heads
        self.qkv_proj = nn.Linear(config.d_model, (config.heads + 2 * config.kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2G, E)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        # torch's fused CPU attention is more than twice as slow in BF16 as in FP32 (backward, torch 2.13).
        dtype = torch.float32 if x.device.type == "cpu" else v.dtype
        qk, v = _rotated(qk.to(dtype), rotary), v.to(dtype)
        q, k = qk.transpose(1, 2).split((self.heads, self.kv_heads), dim=1)  # (B, H, T, E), (B, G, T, E)
        with torch.autocast(x.device.type, enabled=False):
            y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(-2))
        return out


def _rotated(x: Tensor, table: RotaryTable) -> Tensor:
    """x (B, T, H, E), turned by torch's operations alone."""
    first, second = x.chunk(2, -1)
    return x * table.cos + torch.cat((second, first), -1) * table.sin


class MLP(nn.Module):
    """SwiGLU of `LlamaBlock`: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.d_model, 2 * config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, F) each
        y: Tensor = self.down_proj(F.silu(gate) * up)
        return y


class LlamaBlock(nn.Module):
    """A layer of the demo's model in plain torch, with fused projections. Fusing changes no result."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        x = x + self.attention(self.attention_norm(x), rotary)
        return torch.add(x, self.mlp(self.mlp_norm(x)))


class PlainByteTransformer(ByteTransformer):
    """The demo's model in plain torch: the same initial weights, and nothing of `ottava.nn` but the angles."""

    block, norm_class = LlamaBlock, nn.RMSNorm

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__(config, sequence_length)
        head = nn.Linear(config.d_model, VOCABULARY, bias=False)
        head.weight = self.lm_head.weight
        self.lm_head = head  # type: ignore[assignment]


class SmolLM2(nn.Module):
    """The architecture of SmolLM2-135M (134,515,008 parameters). Weights are random until `load`.

    Projections are fused as in the demo's model: q, k and v in one Linear, gate and up in another. Fusing changes no
    result. The head is the weight of the embedding and stays in high precision.
    Source: the config.json of HuggingFaceTB/SmolLM2-135M.
    """

    def __init__(self, vocabulary: int = 49_152, layers: int = 30, length: int = 2048) -> None:
        super().__init__()
        config = ModelConfig(d_model=576, layers=layers, heads=9, kv_heads=3, ffn=1536, rope_theta=1e5, norm_eps=1e-5)
        self.embedding = nn.Embedding(vocabulary, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        # not a buffer: `.bfloat16()` would round it
        self.rotary = RotaryEmbedding(config.d_model // config.heads, base=config.rope_theta)(torch.arange(length))

    def forward(self, ids: Tensor) -> Tensor:
        """ids, int64 (B, T) -> the mean cross-entropy of each next token, fp32 ()."""
        x = self.embedding(ids)
        rotary = RotaryTable(self.rotary.cos[: ids.shape[1]], self.rotary.sin[: ids.shape[1]], interleaved=False)
        for layer in self.layers:
            x = layer(x, rotary)
        logits = F.linear(self.norm(x)[:, :-1], self.embedding.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def load(self, folder: Path) -> None:
        """Loads the weights of a checkpoint in Hugging Face's layout.

        Raises:
            FileNotFoundError: the folder has no model.safetensors.
            ValueError: the file holds another architecture.
        """
        from safetensors.torch import load_file

        path = folder / "model.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no model.safetensors; needs the folder of SmolLM2-135M")
        try:
            self.load_state_dict(_renamed(load_file(path), len(self.layers)))
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"{path} does not hold SmolLM2-135M: {error}") from error


def _renamed(theirs: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Turns Hugging Face's names and separate projections into ours."""
    ours = {"embedding.weight": theirs["model.embed_tokens.weight"], "norm.weight": theirs["model.norm.weight"]}
    for i in range(layers):
        old, new = f"model.layers.{i}.", f"layers.{i}."
        q, k, v = (theirs[f"{old}self_attn.{name}_proj.weight"] for name in "qkv")
        gate, up = (theirs[f"{old}mlp.{name}_proj.weight"] for name in ("gate", "up"))
        ours |= {
            f"{new}attention_norm.weight": theirs[f"{old}input_layernorm.weight"],
            f"{new}attention.qkv_proj.weight": torch.cat((q, k, v)),
            f"{new}attention.o_proj.weight": theirs[f"{old}self_attn.o_proj.weight"],
            f"{new}mlp_norm.weight": theirs[f"{old}post_attention_layernorm.weight"],
            f"{new}mlp.gate_up_proj.weight": torch.cat((gate, up)),
            f"{new}mlp.down_proj.weight": theirs[f"{old}mlp.down_proj.weight"],
        }
    return ours


# --- the bytes that a Llama block saves for its backward: plain torch's block beside ottava's ------------------------

# Llama 3 8B at a quarter of its width: F = 3.5 d, heads of 128, four query heads for each key and value head.
WIDTH, FFN, HEADS, KV_HEADS, TOKENS = 1024, 3584, 8, 2, 512
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
    for recipe in ("bf16", "tensorwise", "mxfp8"):
        for save in SAVES:
            options: Any = {"bias": False, "recipe": recipe, "dtype": torch.bfloat16}
            mlp = NormMLP(WIDTH, FFN, activation="swiglu", norm="rmsnorm", save=save, **options)
            qkv_proj = NormLinear(WIDTH, width, norm="rmsnorm", **options)
            yield f"{recipe}, save {save}", _Block(qkv_proj, Linear(WIDTH, WIDTH, **options), mlp)
