"""A tiny Llama under the Trainer with warm restarts: the rate jumps back to its top three times, and the loss with it."""
import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
STEPS, BATCH, LENGTH, VOCABULARY = 100, 12, 24, 64


class Chains(Dataset):
    """Every token is followed by one of four; which ones depends on the row's dialect, told by its first token."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randint(2, VOCABULARY, (2, VOCABULARY, 4), generator=torch.Generator().manual_seed(99))
        dialect = torch.randint(0, 2, (count,), generator=generator)
        rows = torch.empty(count, LENGTH, dtype=torch.long)
        rows[:, 0] = dialect
        rows[:, 1] = torch.randint(2, VOCABULARY, (count,), generator=generator)
        for i in range(2, LENGTH):
            choice = torch.randint(0, 4, (count,), generator=generator)
            rows[:, i] = table[dialect, rows[:, i - 1], choice]
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    initializer_range=0.05,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
model = LlamaForCausalLM(config)
print(ottava.convert(model, "rowwise", filter=lambda name, layer: ".mlp." in name))
train, valid = Chains(STEPS * BATCH, 100 + SEED), Chains(128, 10_000 + SEED)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64,
        learning_rate=6e-3,
        lr_scheduler_type="cosine_with_restarts",
        lr_scheduler_kwargs={"num_cycles": 4},
        warmup_steps=8,
        weight_decay=0.05,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=25,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=valid)
    print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train()
    final = trainer.evaluate()["eval_loss"]

print(f"final loss {final:.4f}")
