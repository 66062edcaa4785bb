"""The optimizer of a training run, and the storage of its weights, as `OptimizerConfig` sets them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ottava.base.settings import ConfigError
from ottava.nn.convert import ConversionReport, convert
from ottava.optim import SGD, AdamW, Lion, Muon
from ottava.optim.storage import Moments
from ottava.recipe import Recipe
from ottava.train.config import OptimizerConfig
from ottava.weights.parameter import is_quantized_weight


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
