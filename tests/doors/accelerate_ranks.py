"""Two ranks of accelerate's FSDP2 on a CPU: train, save, train on, load, and train the same steps again.

accelerate shards on accelerators only, so the script tells its state that this is FSDP2; all else is accelerate's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ottava
from hf_samples import losses_of, made
from ottava.doors.accelerate import prepare
from ottava.optim import AdamW


def main(folder: str, recipe: str, weights: str, on_meta: str) -> None:
    """Prints what rank 0 saw as JSON."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=on_meta == "meta",
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True)
    PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = made()
    if weights == "fp8":  # its optimizer keeps masters of what is there: convert first
        ottava.convert(model, recipe, weights="fp8")
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-3, master="fp32"))
    else:
        model, optimizer = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.05), recipe=recipe)

    def train(first: int) -> list[float]:
        own = (2 * step + accelerator.process_index for step in range(first, first + 3))
        return losses_of(model, optimizer, own, accelerator.backward)

    early = train(0)
    accelerator.save_state(folder)
    first = train(3)
    accelerator.load_state(folder)
    again = train(3)
    if accelerator.process_index == 0:
        print(json.dumps({"kind": type(model).__name__, "early": early, "first": first, "again": again}))
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
