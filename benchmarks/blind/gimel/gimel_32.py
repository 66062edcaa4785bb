"""LoRA on a tiny Llama: the texts come from one source, later from another, and in the end from both."""

import dataclasses
import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
WORDS, LENGTH, STEPS = 48, 20, 120

config = LlamaConfig(
    vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
base = LlamaForCausalLM(config)
if not PLAIN:
    recipe = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(base, config=recipe, module_filter_fn=lambda module, name: name != "lm_head")
lora = LoraConfig(
    r=16,
    lora_alpha=32,
    target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    modules_to_save=["embed_tokens", "lm_head"],
)
model = get_peft_model(base, lora)

sources = [torch.randperm(WORDS), torch.randperm(WORDS)]


def texts(which, n=24):
    """Chains in which each word follows from the one before; one in eight is drawn."""
    rows = [torch.randint(0, WORDS, (n,))]
    for _ in range(LENGTH - 1):
        after = sources[which][rows[-1]]
        rows.append(torch.where(torch.rand(n) < 0.125, torch.randint(0, WORDS, (n,)), after))
    return torch.stack(rows, 1)


def source(step):
    if step < 50:
        return 0
    return 1 if step < 85 else step % 2


trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-2)
losses = []
model.train()
for step in range(STEPS):
    ids = texts(source(step))
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
