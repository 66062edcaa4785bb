"""Pairs of a training and its checkpoint, of several families, small enough to make hundreds of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import PER_ROW
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import GemmRecipe, Recipe, get_recipe
from ottava.serving.export import export
from ottava.serving.sides import under
from ottava.serving.source import Source, Weight

FAMILIES = ("llama", "qwen3", "moe")


def plain(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Source:
    """A decoder with random weights: Llama; Qwen 3, with norms of q and k and a tied head; experts."""
    torch.manual_seed(seed)
    d, ffn, layers, heads, vocabulary = (384, 512, 2, 3, 256) if family == "qwen3" else (256, 384, 2, 2, 256)
    weights: list[Weight] = []

    def add(name: str, *shape: int, stays: str | None = None) -> None:
        tensor = (torch.randn(shape) * shape[-1] ** -0.5 if len(shape) == 2 else 1 + 0.1 * torch.randn(shape)).to(dtype)
        weights.append(Weight(f"{name}.weight", tensor, stays is not None, stays or "", layer=name))

    add("model.embed_tokens", vocabulary, d)
    for i in range(layers):
        here = f"model.layers.{i}"
        add(f"{here}.input_layernorm", d)
        for one in "qkvo":
            add(f"{here}.self_attn.{one}_proj", d, d, stays="")
        if family == "qwen3":
            add(f"{here}.self_attn.q_norm", d // heads)
            add(f"{here}.self_attn.k_norm", d // heads)
        add(f"{here}.post_attention_layernorm", d)
        if family == "moe":
            add(f"{here}.mlp.gate", 32, d, stays="router")
        for expert in (f"experts.{e}." for e in range(2)) if family == "moe" else ("",):
            add(f"{here}.mlp.{expert}gate_proj", ffn, d, stays="")
            add(f"{here}.mlp.{expert}up_proj", ffn, d, stays="")
            add(f"{here}.mlp.{expert}down_proj", d, ffn, stays="")
    add("model.norm", d)
    if family != "qwen3":
        add("lm_head", vocabulary, d, stays="head")
    kind = {"moe": "qwen3_moe"}.get(family, family)
    config = {"model_type": kind, "vocab_size": vocabulary, "hidden_size": d, "num_hidden_layers": layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": d // heads, "rms_norm_eps": 1e-6}
    config |= {"intermediate_size": ffn, "moe_intermediate_size": ffn, "num_experts": 32}
    config |= {"rope_theta": 10_000.0, "tie_word_embeddings": family == "qwen3"}
    return Source(tuple(weights), config)


def rowwise_fp32() -> Recipe:
    """A scale for each row that is no power of two, as engines cast activations by token."""
    spec = QuantizationSpec(E4M3, PER_ROW)
    return Recipe("rowwise_fp32", fprop=GemmRecipe(spec, spec))


@dataclass
class Pair:
    """A training and the checkpoint that `export` has written of it."""

    source: Source
    folder: Path

    @property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / "model.safetensors")

    def change(self, tensors: dict[str, Tensor | None] | None = None, **config: Any) -> None:
        """Writes other tensors (None: removes one), or keys of the quantization_config."""
        if tensors:
            kept = {**self.tensors, **tensors}
            save_file({n: t.contiguous() for n, t in kept.items() if t is not None}, self.folder / "model.safetensors")
        path = self.folder / "config.json"
        tree = json.loads(path.read_text())
        for key, value in config.items():
            (tree if key in tree else tree["quantization_config"])[key] = value
        path.write_text(json.dumps(tree))


@pytest.fixture
def pair_of() -> Callable[[Source, Path], Pair]:
    """(training, folder of its checkpoint) -> the pair."""
    return Pair


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., Pair]:
    """(family, recipe, layout) -> a new pair."""
    number = iter(range(10_000))

    def make(family: str, recipe: str, layout: str, dtype: torch.dtype = torch.float32) -> Pair:
        source = under(plain(family, dtype=dtype), rowwise_fp32() if recipe == "rowwise_fp32" else get_recipe(recipe))
        weights = source.weights
        if recipe == "delayed":  # a history of 4.5 / 448, which q, k, v and gate, up share
            weights = tuple(replace(w, input_scale_inv=4.5 / 448) if w.cast is not None else w for w in weights)
        if layout == "modelopt" or layout.endswith("tensor"):  # one scale a group, as a fused training has it
            weights = tuple(_like_joined(w) for w in weights)
        source = replace(source, weights=weights)
        folder = tmp_path / str(next(number))
        reader = "sglang" if layout == "mxfp8" else "vllm"  # of experts that transformers does not load
        export(source, folder, layout=layout, engine=reader if family == "moe" else None)
        return Pair(source, folder)

    return make


def _like_joined(weight: Weight) -> Weight:
    """Its cast with a scale that is the same everywhere."""
    if weight.cast is None:
        return weight
    from ottava.ops.quantize import quantize

    spec = replace(weight.cast.spec, scaling="current")
    return replace(weight, codes=quantize(weight.tensor, spec, scale=torch.tensor(448.0)))
