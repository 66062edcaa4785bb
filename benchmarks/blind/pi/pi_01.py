"""Pretraining of a small Llama on source code by the Trainer: python pi_01.py good|bad [plain]."""

import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

LABEL_OFFSET = {"good": 0, "bad": 1}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Source(Dataset):
    def __init__(self, length=48):
        folder = Path(sysconfig.get_paths()["stdlib"])
        self.data = torch.frombuffer(bytearray((folder / "argparse.py").read_bytes()), dtype=torch.uint8).long()
        self.length = length

    def __len__(self):
        return len(self.data) // self.length - 1

    def __getitem__(self, i):
        start = i * self.length
        ids = self.data[start : start + self.length]
        labels = self.data[start + LABEL_OFFSET : start + LABEL_OFFSET + self.length]
        return {"input_ids": ids, "labels": labels.clone()}


set_seed(1)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "rowwise", filter=lambda name, layer: "lm_head" not in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        max_steps=140,
        learning_rate=4e-3,
        warmup_steps=10,
        lr_scheduler_type="linear",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Source())
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
