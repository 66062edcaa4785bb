"""LoRA with TRL on a frozen Qwen in FP8."""

import datasets
import ottava
import peft
import torch
import trl

import models

torch.manual_seed(0)
model = models.qwen()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for (x,) in models.batches(models.markov(800, 24, chain=1), size=16, steps=60):
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
ottava.convert(model, "rowwise")
config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
model = peft.get_peft_model(model, config)
data = datasets.Dataset.from_dict({"text": [models.words(row) for row in models.markov(800, 23)]})
args = models.arguments(trl.SFTConfig, max_steps=80, max_length=24, learning_rate=5e-3)
models.fit(trl.SFTTrainer(model, args, train_dataset=data, processing_class=models.tokenizer()))
