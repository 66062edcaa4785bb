"""Models to measure: a GPT block, and the architecture of SmolLM2-135M."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ottava.train.config import ModelConfig
from ottava.train.model import Block as LlamaBlock
from ottava.train.model import rotary_table


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


class SmolLM2(nn.Module):
    """The architecture of SmolLM2-135M (134,515,008 parameters). Weights are random until `load`.

    Projections are fused as in the demo's model, q, k and v in one Linear, gate and up in another, which changes no
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
        self.rotary = rotary_table(length, config.d_model // config.heads, config.rope_theta)

    def forward(self, ids: Tensor) -> Tensor:
        """ids, int64 (B, T) -> the mean cross-entropy of each next token, fp32 ()."""
        x = self.embedding(ids)
        cos, sin = (table[: ids.shape[1]] for table in self.rotary)
        for layer in self.layers:
            x = layer(x, cos, sin)
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
