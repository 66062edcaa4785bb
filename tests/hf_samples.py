"""Tiny random models of Hugging Face, and text to train them on. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ottava.optim import AdamW
from ottava.weights.parameter import is_quantized_weight

hf = pytest.importorskip("transformers")

SIZES = MappingProxyType(
    {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
        "vocab_size": 128,
    }
)
CONFIGS: Mapping[str, Any] = MappingProxyType(
    {
        "llama": lambda: hf.LlamaConfig(**SIZES, pad_token_id=0),
        "llama, tied": lambda: hf.LlamaConfig(**SIZES, tie_word_embeddings=True),
        "gpt2": lambda: hf.GPT2Config(
            n_embd=64,
            n_head=4,
            n_layer=2,
            n_positions=64,
            vocab_size=128,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
        "qwen3 moe": lambda: hf.Qwen3MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=16, decoder_sparse_step=1
        ),
    }
)


def made(name: str = "llama") -> Any:
    """A model with random weights."""
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16)


def saved(folder: Path, name: str = "llama") -> Path:
    """A folder as it would come from the Hub."""
    made(name).save_pretrained(folder)
    return folder


def batch(number: int = 0, rows: int = 2) -> dict[str, Tensor]:
    """Random tokens as inputs and labels."""
    ids = torch.randint(1, 128, (rows, 16), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


def train(model: nn.Module, steps: int, first: int = 0) -> list[float]:
    """A plain loop; the losses."""
    coded = any(is_quantized_weight(p) for p in model.parameters())
    optimizer: Any = (
        AdamW(model.parameters(), lr=1e-3, master="fp32") if coded else torch.optim.SGD(model.parameters(), 0.05)
    )
    torch.manual_seed(first)  # some recipes round by chance
    model.train()
    return losses_of(model, optimizer, range(first, first + steps))


def losses_of(model: Any, optimizer: Any, batches: Iterable[int], backward: Any = Tensor.backward) -> list[float]:
    """Of a step on each of these batches."""
    losses = []
    for number in batches:
        loss = model(**batch(number)).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def rows(count: int = 32) -> list[dict[str, Any]]:
    """A data set of single sequences."""
    return [{name: x[0] for name, x in batch(i, 1).items()} for i in range(count)]


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict that later steps do not change."""
    return {key: value.detach().clone() for key, value in state.items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts hold the same bits."""
    return one.keys() == other.keys() and all(torch.equal(_bits(one[key]), _bits(other[key])) for key in one)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x  # torch compares no float8
