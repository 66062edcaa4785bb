"""What `--override.imports` does to the config of torchtitan's Llama 3, and the linears that are built from it.

    --override.imports 'ottava.doors.torchtitan.model={"recipe": "mxfp8", "skip": ["layers.0.*"]}'

python examples/door_torchtitan.py [RECIPE]     needs: torchtitan and spmd_types; seconds on a CPU
"""

import importlib
import sys
import tempfile

import torch
from torchtitan.models.llama3 import llama3_configs
from torchtitan.protocols.model_spec import ModelSpec

import ottava
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
    mlp = model.layers["1"].feed_forward.to_empty(device="cpu").bfloat16()  # FlexAttention has no backward on a CPU
    for weight in mlp.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    optimizer, x = torch.optim.AdamW(mlp.parameters(), 1e-2), torch.randn(64, config.dim).bfloat16()
    for _ in range(5):
        loss = (mlp(x) - x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(ottava.receipt(mlp), f"loss {loss.item():.3f}", sep="\n")
    with tempfile.TemporaryFile() as file:
        torch.save(mlp.state_dict(), file)
        file.seek(0)
        print(mlp.load_state_dict(torch.load(file)))
    return ours


if __name__ == "__main__":
    main(*sys.argv[1:])
