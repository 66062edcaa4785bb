"""PEFT: adapters on ottava's layers need no door, in either order; this one merges an adapter into weights in FP8.

A weight in FP8 takes no sum in place. Here a merge adds the adapter to the decoded numbers, casts the sum to codes, and
says what the cast cost: what an adapter adds may be smaller than half a step between two codes, and is lost then.

    config = with_fp8_weights(LoraConfig(target_modules="all-linear"))
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from ottava.doors.host import need_host
from ottava.weights.parameter import is_quantized_weight

need_host("peft")

from peft import LoraConfig  # noqa: E402
from peft.tuners.lora import Linear as LoraLinear  # noqa: E402
from peft.tuners.tuners_utils import check_adapters_to_merge  # noqa: E402

_LOG = logging.getLogger(__name__)
_NOTABLE = 0.1  # a merge that loses more of its adapter warns


def with_fp8_weights(config: LoraConfig) -> LoraConfig:
    """The config, with layers that merge into weights in FP8; give it also to `PeftModel.from_pretrained(config=...)`.

    Example:
        >>> with_fp8_weights(LoraConfig(target_modules=["q_proj"])).target_modules
        {'q_proj'}
    """
    config._register_custom_module({nn.Linear: Fp8LoraLinear})  # ottava's is one, and may be made of one later
    return config


class Fp8LoraLinear(LoraLinear):
    """LoRA on a linear layer; while its weight is in high precision, PEFT's own."""

    merge_error = 0.0
    """Norm of what the last merge lost, over the norm of what the adapters would add."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight, casts it anew, and notes the error.

        Raises:
            ValueError: an adapter that is more than a sum (DoRA and its kin), one with a bias, or numbers that are not
                finite. The weight is unchanged then.
        """
        weight = self.get_base_layer().weight
        if not is_quantized_weight(weight):
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        for name in names:
            if name in self.lora_variant or self.lora_bias[name]:
                raise ValueError(
                    f"merge: adapter {name!r} is no plain sum (use_dora, lora_bias), and a weight in FP8 takes only "
                    "that. Give the weights back first: ottava.convert(model, recipe, weights='bf16')"
                )
        if names:
            self._add(weight, sum(self._delta(name) for name in names), "merged")
            self.merged_adapters += names

    def unmerge(self) -> None:
        """Subtracts merged adapters, with another cast: codes come back near to what they were, not exactly."""
        weight = self.get_base_layer().weight
        if not is_quantized_weight(weight):
            super().unmerge()
            return
        if self.merged_adapters:
            self._add(weight, -sum(self._delta(name) for name in self.merged_adapters), "unmerged")
            self.merged_adapters.clear()

    def _delta(self, name: str) -> Any:
        return self.get_delta_weight(name).float()

    @torch.no_grad()
    def _add(self, weight: Any, delta: Tensor, word: str) -> None:
        before = weight.dequantize(torch.float32)
        wanted = before + delta.to(before.device)
        if not bool(wanted.isfinite().all()):
            raise ValueError("merge: the adapter or the weight holds numbers that are not finite")
        weight.requantize_(wanted)
        lost = (weight.dequantize(torch.float32) - wanted).norm()
        self.merge_error = float(lost / delta.norm().clamp_min(torch.finfo(torch.float32).tiny))
        level = logging.WARNING if self.merge_error > _NOTABLE else logging.INFO
        share, whole = 100 * self.merge_error, 100 * float(lost / wanted.norm())
        text = (
            "ottava: %s an adapter and %s of %r: the cast lost %.1f %% of what the adapter adds, %.2f %% of the weight"
        )
        _LOG.log(level, text, word, weight.spec, self.get_base_layer().name, share, whole)
