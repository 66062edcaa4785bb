"""Remembering the first word of a document: a small Mistral with the Trainer."""

import sys
import tempfile

import torch
from transformers import MistralConfig, MistralForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

OPTIONS = {"good": {"sliding_window": None}, "bad": {"sliding_window": 4}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
WORDS, LENGTH, QUESTION = 40, 32, 39

set_seed(27)


def document(generator):
    ids = torch.randint(20, QUESTION, (LENGTH,), generator=generator)
    labels = torch.full((LENGTH,), -100)
    ids[0] = torch.randint(0, 20, (1,), generator=generator)
    start = 12 + int(torch.randint(0, 4, (1,), generator=generator))
    for place in range(start, LENGTH - 1, 12):
        ids[place], ids[place + 1] = QUESTION, ids[0]
        labels[place + 1] = ids[0]
    return {"input_ids": ids, "labels": labels}


generator = torch.Generator().manual_seed(2)
data = [document(generator) for _ in range(1500)]
model = MistralForCausalLM(
    MistralConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.08,
        **OPTIONS,
    )
)
if not PLAIN:
    ottava.convert(model, "blockwise", filter=lambda name, layer: "lm_head" not in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=100,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(map(float, losses[-10:])) / 10:.4f}")
