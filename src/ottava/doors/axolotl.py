"""Axolotl: a plugin with three settings of its YAML file.

    plugins:
      - ottava.doors.axolotl.OttavaPlugin
    ottava_recipe: mxfp8
    ottava_skip: ["*.layers.0.*"]
    ottava_log: true

It converts the model after it is built and before adapters are added, so LoRA trains beside an FP8 model. What Axolotl
saves loads as that of the doors to transformers.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import BaseModel, field_validator
from torch import nn

from ottava.doors.host import need_host
from ottava.recipe import get_recipe

need_host("axolotl")

from axolotl.integrations.base import BasePlugin  # noqa: E402  # after the check

from ottava.doors.trainer import OttavaCallback  # noqa: E402
from ottava.doors.transformers import OttavaConfig  # noqa: E402

_LOG = logging.getLogger(__name__)


class OttavaArgs(BaseModel):
    """The settings, checked by Axolotl with its own.

    Example:
        >>> OttavaArgs(ottava_recipe="mxfp9")
        Traceback (most recent call last):
        pydantic_core._pydantic_core.ValidationError: 1 validation error for OttavaArgs
        ottava_recipe
          Value error, unknown recipe 'mxfp9'; did you mean 'mxfp8'? known: ...
    """

    ottava_recipe: str | None = None
    """Name of a recipe; None: the plugin converts nothing."""
    ottava_skip: list[str] | None = None
    """Shell patterns of layers that stay in BF16, beside heads, routers, adapters and tiny layers."""
    ottava_log: bool = True
    """Put ottava's numbers into the Trainer's logs, and watch the run."""

    @field_validator("ottava_recipe")
    @classmethod
    def known(cls, name: str | None) -> str | None:
        """Refuses an unknown recipe before the model is loaded."""
        return name if name is None else get_recipe(name).name


class OttavaPlugin(BasePlugin):
    """Converts the model, and logs what FP8 does to it."""

    def get_input_args(self) -> str:
        """Where Axolotl finds the settings."""
        return "ottava.doors.axolotl.OttavaArgs"

    def post_model_build(self, cfg: Any, model: nn.Module) -> None:
        """Converts the model in place, if a recipe is set.

        Raises:
            ValueError: somebody has quantized, sharded, compiled or converted the model, or a pattern matches no layer.
        """
        if cfg.ottava_recipe is None:
            return
        report = OttavaConfig(cfg.ottava_recipe, skip=cfg.ottava_skip or ()).convert(model)
        _LOG.info("ottava: %s", report)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """The callback of the Trainer's door, unless `ottava_log` is false."""
        return [OttavaCallback()] if cfg.ottava_log is not False else []
