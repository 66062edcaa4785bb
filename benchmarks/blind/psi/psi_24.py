"""A second LoRA adapter for a new task, with PEFT; the base runs under ottava."""
import os
import sys
import warnings

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel
import ottava

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
VOCAB, LENGTH, BATCH = 40, 24, 16


def chain(sharp):
    return torch.softmax(sharp * torch.randn(VOCAB, VOCAB), -1)


def batch(table):
    ids = torch.randint(0, VOCAB, (BATCH, 1))
    for _ in range(LENGTH - 1):
        ids = torch.cat([ids, torch.multinomial(table[ids[:, -1]], 1)], 1)
    return ids


def train(model, params, table, steps, lr):
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    losses = []
    for step in range(steps):
        ids = batch(table)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    return losses


base = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )
)
first, second = chain(2.0), chain(3.0)
lora = LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
train(base, base.parameters(), first, 60, 5e-3)

model = get_peft_model(base, lora, adapter_name="first")
model.add_adapter("second", lora)
if not plain:
    ottava.convert(model, "tensorwise")
if mode != "bad":
    model.set_adapter("second")
params = [p for name, p in model.named_parameters() if ".second." in name]
losses = train(model, params, second, 100, 1e-2)
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
