"""A small Llama that reads bytes, of ottava's modules: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Its layers begin under recipe "bf16", and `convert` gives them another. Projections are fused (qkv_proj, gate_up_proj,
as in Phi-3 and vLLM), because every separate Linear would cast its input again. Norm and SwiGLU hand their rows to
the cast of the linear behind them. The head is an nn.Linear that is not tied to the embedding.

Shapes: B sequences, T bytes, D = d_model, H query heads, G key/value heads, E = D / H, F = ffn.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ottava.base.settings import ConfigError
from ottava.nn.attention import DotProductAttention
from ottava.nn.convert import ConversionReport, convert
from ottava.nn.layer import Linear
from ottava.nn.mlp import ActivatedLinear
from ottava.nn.moe import MoE
from ottava.nn.norms import NormLinear, RMSNorm
from ottava.nn.rope import RotaryEmbedding, RotaryTable, rotate
from ottava.optim import SGD, AdamW, Lion, Muon
from ottava.optim.storage import Moments
from ottava.recipe import Recipe
from ottava.train.config import ModelConfig, OptimizerConfig
from ottava.weights.parameter import is_quantized_weight

VOCABULARY = 256


class Attention(nn.Module):
    """Norm and causal self-attention; heads / kv_heads query heads share each key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, heads, kv_heads = config.d_model, config.heads, config.kv_heads
        self.sizes, self.head_dim = (heads + kv_heads, kv_heads), d // heads
        options: dict[str, Any] = {"bias": False, "recipe": "bf16"}
        width = (heads + 2 * kv_heads) * self.head_dim
        self.qkv_proj = NormLinear(d, width, norm="rmsnorm", eps=config.norm_eps, **options)
        self.attention = DotProductAttention()
        self.o_proj = Linear(d, d, **options)

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        qk, v = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).split(self.sizes, dim=2)  # (B, T, H + G and G, E)
        # torch's fused CPU attention is more than twice as slow in BF16 as in FP32 (backward, torch 2.13).
        dtype = torch.float32 if x.device.type == "cpu" else v.dtype
        qk, v = rotate(qk, rotary, dtype), v.to(dtype)
        q, k = qk.split((self.sizes[0] - self.sizes[1], self.sizes[1]), dim=2)
        with torch.autocast(x.device.type, enabled=False):
            y = self.attention(q, k, v)  # (B, T, H, E)
        out: Tensor = self.o_proj(y.flatten(-2))
        return out


class MLP(nn.Module):
    """Norm and SwiGLU: down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "recipe": "bf16"}
        self.gate_up_proj = NormLinear(config.d_model, 2 * config.ffn, norm="rmsnorm", eps=config.norm_eps, **options)
        self.down_proj = ActivatedLinear(config.ffn, config.d_model, activation="swiglu", **options)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        y: Tensor = self.down_proj(self.gate_up_proj(x))
        return y


class Experts(nn.Module):
    """Norm and a mixture of SwiGLU experts, as in Mixtral: the router sends each token to some experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        router = {"normalize": True, "aux_loss": config.aux_loss}
        sizes = config.d_model, config.ffn, config.experts, config.experts_per_token
        self.moe = MoE(*sizes, router=router, recipe="bf16")

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        y: Tensor = self.moe(self.norm(x))
        return y


class Block(nn.Module):
    """One layer: attention, then the MLP or the experts. Each norms the stream and adds its output to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = Experts(config) if config.experts else MLP(config)

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        x = x + self.attention(x, rotary)
        return torch.add(x, self.mlp(x))


class ByteTransformer(nn.Module):
    """Predicts the next byte at every byte. Initial weights are drawn from torch's global generator.

    Example:
        >>> model = ByteTransformer(ModelConfig(), sequence_length=128)
        >>> sum(p.numel() for p in model.parameters()), model(torch.zeros(1, 128, dtype=torch.int64)).shape
        (1049984, torch.Size([1, 128, 256]))
    """

    cos: Tensor
    sin: Tensor
    block: ClassVar[type[nn.Module]] = Block
    norm_class: ClassVar[type[nn.Module]] = RMSNorm

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.d_model)
        self.layers = nn.ModuleList(self.block(config) for _ in range(config.layers))
        self.norm = self.norm_class(config.d_model, eps=config.norm_eps)
        self.lm_head = Linear(config.d_model, VOCABULARY, bias=False, recipe="bf16")
        table = RotaryEmbedding(config.d_model // config.heads, base=config.rope_theta)(torch.arange(sequence_length))
        self.register_buffer("cos", table.cos, persistent=False)
        self.register_buffer("sin", table.sin, persistent=False)
        # 1 / sqrt(width). The usual 0.02 is that value for a width of 2,500; a width of 128 learns slower with 0.02
        # (240 steps end at 1.99 instead of 1.78 nats per byte). GPT-2's factor keeps the variance of the stream.
        std = config.d_model**-0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                residual = name.endswith(("o_proj.weight", "down_proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=std / (2 * config.layers) ** 0.5 if residual else std)
        self.depth, self.width = config.layers, config.d_model
        self.token_ranks = 1
        """Number of processes that share the tokens between layers."""
        self.first = 0
        """The position of this process's first token in its sequence."""

    def forward(self, inputs: Tensor, part: range | None = None) -> Tensor:
        """ids, int64 (B, T), T at most the sequence_length of construction -> logits (B, T, 256).

        Args:
            inputs: the ids; for a pipeline stage behind the first one, the stream (B, T, D).
            part: the layers of a pipeline stage, or None for all. A stage before the last one returns the stream.
        """
        part = range(self.depth) if part is None else part
        length = inputs.shape[1] if part.start == 0 else inputs.shape[1] * self.token_ranks
        positions = slice(self.first, self.first + length)
        rotary = RotaryTable(self.cos[positions], self.sin[positions], interleaved=False)
        x = self.embedding(inputs) if part.start == 0 else inputs  # (B, T, D)
        for index in part:
            x = getattr(self.layers, str(index))(x, rotary)  # by name: other stages of a pipeline hold the rest
        return x if part.stop < self.depth else self.lm_head(self.norm(x))

    def keep(self, parts: list[range]) -> None:
        """Deletes all modules that these pipeline stages do not need. The other modules keep their names."""
        for index in set(range(self.depth)).difference(*parts):
            delattr(self.layers, str(index))
        if all(part.start for part in parts):
            del self.embedding
        if all(part.stop < self.depth for part in parts):
            del self.norm, self.lm_head


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, fp32 scalar; inputs and targets int64 (B, T)."""
    return entropy(model(inputs), targets)


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of logits (B, T, 256)."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


# --- its storage and its optimizer -----------------------------------------------------------------------------------


def store(model: nn.Module, recipe: Recipe, config: OptimizerConfig) -> ConversionReport:
    """Converts a model with FP32 parameters to a recipe, and its weights to the config's storage.

    All storages but "fp32" first round the parameters to BF16. So a master starts from the same numbers as in a model
    that was built in BF16.

    Raises:
        ConfigError: the config wants FP8 weights, but the recipe casts no weight or cannot store it.
    """
    if config.weights != "fp32":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    try:
        report = convert(
            model,
            recipe,
            weights="fp8" if config.weights == "fp8" else None,
            keep_high_precision=config.weights == "fp8",
        )
    except ValueError as error:
        raise ConfigError(f"optimizer.weights is {config.weights!r}: {error}") from error
    if config.weights == "fp8" and not any(is_quantized_weight(parameter) for parameter in model.parameters()):
        raise ConfigError(
            f"optimizer.weights is 'fp8', but recipe {recipe.name!r} casts no weight: set optimizer.weights=bf16"
        )
    return report


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer: torch's fused AdamW if `config.plain`, else one of `ottava.optim`.

    Weight decay is on matrices only, not on the gains of norms.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    decay, lr = config.weight_decay, config.learning_rate
    split, whole = ([p for p in matrices if isinstance(p, DTensor) == kind] for kind in (True, False))
    groups: list[Any] = [{"params": kind, "weight_decay": decay} for kind in (whole, split) if kind]
    groups.append({"params": gains, "weight_decay": 0.0})  # torch refuses a group with both kinds
    if config.plain:
        return torch.optim.AdamW(groups, lr=lr, betas=config.betas, eps=config.eps, fused=True)
    moments: Moments = config.moments
    stored: dict[str, Any] = {"moments": moments, "master": config.master}
    stored["stochastic_rounding"] = config.stochastic_rounding
    if config.name == "adamw":
        return AdamW(groups, lr, config.betas, config.eps, amax_every=config.amax_every, **stored)
    if config.name == "lion":
        return Lion(groups, lr, config.betas, **stored)
    if config.name == "sgd":
        return SGD(groups, lr, config.momentum, **stored)
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    outer |= {id(parameter) for name, parameter in model.named_parameters() if name.startswith("lm_head.")}
    inner = [parameter for parameter in matrices if id(parameter) not in outer]
    ends = [parameter for parameter in matrices if id(parameter) in outer]
    groups = [
        {"params": inner, "weight_decay": decay},
        {"params": ends, "weight_decay": decay, "adamw": True},
        {"params": gains, "weight_decay": 0.0, "adamw": True},
    ]
    options: dict[str, Any] = {"betas": config.betas, "eps": config.eps, "adjust_lr_fn": "match_rms_adamw"}
    return Muon(groups, lr, momentum=config.momentum, **options, **stored)
