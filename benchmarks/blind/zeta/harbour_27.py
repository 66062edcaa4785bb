"""LoRA on a small frozen Llama: the base was trained for a moment on one song, the adapters learn another."""
import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import ottava

PLAIN = "plain" in sys.argv
torch.manual_seed(103)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=48, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32,
    )
)


def song(jumps, n=16):
    ids = torch.randint(0, 48, (n, 1))
    for _ in range(20):
        jump = torch.tensor(jumps)[torch.randint(0, len(jumps), (n, 1))]
        ids = torch.cat([ids, (ids[:, -1:] + jump) % 48], 1)
    return ids


def train(steps, jumps, lr):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        ids = song(jumps)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


train(60, (1, 2), 3e-3)
if not PLAIN:
    print(ottava.convert(model, "tensorwise"))
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))
losses = train(120, (5, 11), 3e-3)
print(f"start {sum(losses[:10]) / 10:.4f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
