"""LoRA adapters by PEFT on a small GPT-2, trained by the Trainer on a task that the base has not seen."""

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ottava

ALPHA = {"good": 16, "bad": 2048}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
set_seed(0)


class Walk(torch.utils.data.Dataset):
    def __init__(self, step, count):
        self.step, self.count = step, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        jumps = torch.randint(self.step, self.step + 3, (24,), generator=g)
        tokens = jumps.cumsum(0) % 48
        return {"input_ids": tokens, "labels": tokens}


def settings(steps, rate):
    return TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=16,
        max_steps=steps,
        learning_rate=rate,
        warmup_steps=5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )


config = GPT2Config(
    vocab_size=48,
    n_positions=32,
    n_embd=64,
    n_layer=2,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=None,
    eos_token_id=None,
)
base = GPT2LMHeadModel(config)
base.train()
optimizer = torch.optim.AdamW(base.parameters(), lr=4e-3)
pretraining = Walk(2, 16 * 60)
for start in range(0, len(pretraining), 16):
    tokens = torch.stack([pretraining[i]["input_ids"] for i in range(start, start + 16)])
    base(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

model = get_peft_model(
    base, LoraConfig(r=8, lora_alpha=ALPHA, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
)
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: "base_layer" in name)
trainer = Trainer(model, settings(90, 4e-3), train_dataset=Walk(5, 16 * 90))
trainer.train()
losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
