"""LoRA adapters beside an FP8 model: `python examples/door_peft.py [RECIPE]`, seconds on one core.

It trains, saves the adapters, loads them onto a second base, and merges them into weights in FP8.
Needs: pip install 'ottava[peft]'. examples/lora_on_fp8.py trains on a published FP8 checkpoint.
"""

import sys
import tempfile
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import ottava
from ottava.doors.peft import with_fp8_weights


def base(recipe: str) -> Any:
    """What `from_pretrained` would give: here tiny and random."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **sizes)).bfloat16()
    ottava.convert(model, recipe, weights="fp8")  # frozen, so their codes never change
    return model


def main(recipe: str = "tensorwise", steps: int = 10) -> tuple[list[float], float]:
    """Returns the losses, and the loss of the second model."""
    adapters = with_fp8_weights(LoraConfig(r=8, target_modules="all-linear"))
    model = get_peft_model(base(recipe), adapters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids, losses = torch.randint(0, 256, (2, 32)), []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(ottava.receipt(model))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(base(recipe), folder, config=adapters).merge_and_unload()
    merged = again(input_ids=ids, labels=ids).loss.item()
    print(f"losses {losses[0]:.3f} to {losses[-1]:.3f}; merged {merged:.3f}")
    return losses, merged


if __name__ == "__main__":
    main(*sys.argv[1:])
