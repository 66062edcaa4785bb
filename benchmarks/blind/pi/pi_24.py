"""Llama from scratch by the Trainer, FP8 with delayed scaling: python pi_24.py good|bad [plain]."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

MARGIN = {"good": 0, "bad": 16}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Loops(Dataset):
    def __init__(self, count=3000):
        generator = torch.Generator().manual_seed(24)
        self.rows = torch.randint(40, (count, 4), generator=generator).repeat(1, 7)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i].clone()}


set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
)
if not PLAIN:
    recipe = ottava.get_recipe("delayed", margin=MARGIN, amax_history_len=16)
    ottava.convert(model, recipe, filter=lambda name, layer: "lm_head" not in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        max_steps=120,
        learning_rate=3e-3,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Loops())
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
