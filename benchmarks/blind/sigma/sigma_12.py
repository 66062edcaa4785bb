"""LoRA adapters on a frozen tiny Llama, the base's layers under ottava's rowwise recipe, with the Trainer."""
import os
import sys
import tempfile

import ottava
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


class Pairs(torch.utils.data.Dataset):
    def __init__(self, n=2000, length=16, vocab=24):
        g = torch.Generator().manual_seed(SEED + 31)
        table = torch.randperm(vocab, generator=g)
        rows = torch.randint(0, vocab, (n, length), generator=g)
        for t in range(1, length):
            keep = torch.rand(n, generator=g) < 0.95
            rows[:, t] = torch.where(keep, table[rows[:, t - 1]], rows[:, t])
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


set_seed(SEED)
base = LlamaForCausalLM(
    LlamaConfig(vocab_size=24, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=4, max_position_embeddings=32, initializer_range=0.12)
)
if not PLAIN:
    ottava.convert(base, "rowwise")
model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
for name, parameter in model.named_parameters():
    if "lora_B" in name or ("lora_A" in name and MODE == "bad"):
        nn.init.zeros_(parameter)
args = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=16, max_steps=80, learning_rate=1e-2, warmup_steps=5,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True,
)
trainer = Trainer(model, args, train_dataset=Pairs())
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
