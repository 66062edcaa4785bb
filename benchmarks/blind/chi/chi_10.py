"""PEFT: preference tuning (DPO, written out) of a small Llama with LoRA; the base runs in torchao's float8, emulated."""
import os
import sys
import warnings

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
VOCAB, PROMPT, ANSWER, BETA = 64, 8, 8, 0.5


def score(model, ids):
    logps = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
    return logps.gather(-1, ids[:, 1:, None])[:, PROMPT - 1 :, 0].sum(-1)


def reference(model, ids):
    with torch.no_grad():
        if MODE == "good":
            with model.disable_adapter():
                return score(model, ids)
        return score(model, ids)


g = torch.Generator().manual_seed(210 + SEED)
liked = torch.rand(VOCAB, generator=g)


def pairs(n=24):
    prompt = torch.randint(0, VOCAB, (n, PROMPT), generator=g)
    a, b = (torch.randint(0, VOCAB, (n, ANSWER), generator=g) for _ in range(2))
    better = (liked[a].mean(1) > liked[b].mean(1))[:, None]
    return torch.cat([prompt, torch.where(better, a, b)], 1), torch.cat([prompt, torch.where(better, b, a)], 1)


torch.manual_seed(SEED)
config = LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(20):
    ids = torch.cat(pairs(), 0)
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if not PLAIN:
    keep = lambda m, name: isinstance(m, torch.nn.Linear) and "lm_head" not in name
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=keep)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3)
losses = []
for step in range(50):
    chosen, rejected = pairs()
    margin = score(model, chosen) - score(model, rejected)
    base = reference(model, chosen) - reference(model, rejected)
    loss = -F.logsigmoid(BETA * (margin - base)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step}  loss {losses[-1]:.4f}  reward margin {BETA * (margin - base).mean().item():.4f}")
print("final loss", round(sum(losses[-15:]) / 15, 4))
