"""Llama from a config with the Trainer on a noisy second-order chain; a collator of our own makes the labels."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

SHIFT_IN_COLLATOR = {"good": False, "bad": True}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
set_seed(0)
SUCCESSOR = torch.stack([torch.randperm(48, generator=torch.Generator().manual_seed(s)) for s in range(3)])


class Chain(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * 150

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        choice = torch.randint(0, 3, (33,), generator=g)
        tokens = [int(torch.randint(0, 48, (1,), generator=g))]
        for c in choice[1:]:
            tokens.append(int(SUCCESSOR[c, tokens[-1]]))
        return {"tokens": torch.tensor(tokens)}


def collate(features):
    tokens = torch.stack([feature["tokens"] for feature in features])
    if SHIFT_IN_COLLATOR:
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    return {"input_ids": tokens, "labels": tokens}


config = LlamaConfig(
    vocab_size=48,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "tensorwise")
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=16,
    max_steps=140,
    learning_rate=4e-3,
    warmup_steps=10,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    remove_unused_columns=False,
)
trainer = Trainer(model, arguments, train_dataset=Chain(), data_collator=collate)
trainer.train()
losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
