"""Curriculum: sequences grow from 8 to 32 and the grammar gets two more rules; Llama in Hugging Face's Trainer."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(33)
VOCAB, BATCH, STEPS = 48, 16, 105
tables = torch.stack([torch.randperm(VOCAB) for _ in range(3)])
STAGES = [(8, 1), (16, 2), (32, 3)]


class Curriculum(torch.utils.data.IterableDataset):
    def __iter__(self):
        g = torch.Generator().manual_seed(330)
        for index in range(BATCH * STEPS):
            length, rules = STAGES[index * len(STAGES) // (BATCH * STEPS)]
            rule = int(torch.randint(rules, (1,), generator=g))
            tokens = [int(torch.randint(VOCAB, (1,), generator=g))]
            while len(tokens) < length:
                tokens.append(int(tables[rule, tokens[-1]]))
            ids = torch.tensor(tokens)
            yield {"input_ids": ids, "labels": ids}


config = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "blockwise")
with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=Curriculum())
    trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
