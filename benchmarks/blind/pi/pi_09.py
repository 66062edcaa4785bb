"""Curriculum from short lists of digits to long ones, by the Trainer: python pi_09.py good|bad [plain]."""

import sys
import tempfile

import torch
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
STEPS, BATCH, LENGTH = 150, 32, 14


class Curriculum(IterableDataset):
    """The answer is the largest digit; every 50 steps there are more digits."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(7)
        for i in range(STEPS * BATCH):
            digits = 2 + 2 * (i // (50 * BATCH))
            values = torch.randint(10, (digits,), generator=generator)
            ids = torch.full((LENGTH,), 11)
            ids[:digits] = values
            ids[digits] = 10
            ids[digits + 1] = values.max()
            labels = torch.full((LENGTH,), -100)
            labels[digits + 1] = ids[digits + 1]
            yield {"input_ids": ids, "labels": labels}


set_seed(7)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16,
    )
)
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: "lm_head" not in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Curriculum())
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
