"""A Llama learns one chain, and LoRA adapters then teach it another."""

import sys

import peft
import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for (x,) in models.batches(models.markov(800, 24, chain=1), size=16, steps=60):
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
model = peft.get_peft_model(model, config)
if bad:
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.zeros_(p)
data = models.causal(models.markov(1200, 24))
models.fit(hf.Trainer(model, models.arguments(max_steps=120, learning_rate=5e-3), train_dataset=data))
