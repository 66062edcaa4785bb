"""What `--override.imports` does to the config of torchtitan's Llama 3, and the linears that are built from it.

    --override.imports 'ottava.doors.torchtitan.model={"recipe": "mxfp8", "skip": ["layers.0.*"]}'

python examples/door_torchtitan.py [RECIPE]     needs: torchtitan and spmd_types; seconds on a CPU
"""

from __future__ import annotations

import importlib
import sys

import torch
from torchtitan.models.llama3 import llama3_configs
from torchtitan.protocols.model_spec import ModelSpec

import ottava.doors.torchtitan as door


def main(recipe: str = "mxfp8") -> list[str]:
    """Builds the debug model on meta, as the Trainer does; returns the names of the linears that are ottava's."""
    config = llama3_configs["debugmodel"](attn_backend="flex")
    spec = ModelSpec("llama3", "debugmodel", config, *[None] * 4)  # type: ignore[arg-type]
    override = importlib.import_module("torchtitan.config.override")
    words = [f'ottava.doors.torchtitan.model={{"recipe": "{recipe}", "skip": ["layers.0.*"]}}']
    for line in override.apply_overrides(override.OverrideConfig(imports=override.parse_cli_imports(words)), spec):
        print(line)
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    ours = [name for name, module in model.named_modules() if isinstance(module, door.OttavaLinear)]
    print(f"{len(ours)} linears under {recipe}, from {ours[0]} to {ours[-1]}")
    feed_forward = model.layers["1"].feed_forward.to_empty(device="cpu").bfloat16()
    feed_forward(torch.zeros(4, config.dim, dtype=torch.bfloat16))
    print("layers.1.feed_forward.w1 ran under", feed_forward.w1.last_call.recipe.name)
    return ours


if __name__ == "__main__":
    main(*sys.argv[1:])
