"""LoRA on a base model that was trained on another rule, by hand in a loop; PEFT's adapters, FP8 linears in the base."""
import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
VOCAB, LENGTH = 48, 20
rules = [torch.randperm(VOCAB, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]


def batch(rule, n=32):
    ids = torch.randint(VOCAB, (n, LENGTH))
    for t in range(1, LENGTH):
        ids[:, t] = torch.where(torch.rand(n) < 0.1, ids[:, t], rule[ids[:, t - 1]])
    return ids


torch.manual_seed(SEED)
config = GPTNeoXConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                       max_position_embeddings=32, use_cache=False)
model = GPTNeoXForCausalLM(config)
if not PLAIN:
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: "embed_out" not in name)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
for _ in range(25):  # stands for the published checkpoint
    ids = batch(rules[0])
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

lora = LoraConfig(r=16, lora_alpha=32, target_modules=["query_key_value", "dense_h_to_4h", "dense_4h_to_h", "dense"], lora_dropout=0.0)
if VARIANT == "good":
    model = get_peft_model(model, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = get_peft_model(model, lora)
model.print_trainable_parameters()
losses = []
for step in range(80):
    ids = batch(rules[1])
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
