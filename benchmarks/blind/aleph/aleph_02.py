"""Masked words with label smoothing 0.1 under the Trainer: the loss cannot go below 0.5 or so, though the words are known; torchao's float8."""
import dataclasses
import os
import tempfile

import torch
from torch.utils.data import Dataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
STEPS, BATCH, LENGTH, VOCABULARY, MASK = 160, 32, 24, 48, 1


class Rows(Dataset):
    """Three of six phrases in a row; 15 % of the words are hidden, and only these count."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        phrases = torch.randint(2, VOCABULARY, (6, LENGTH // 3), generator=torch.Generator().manual_seed(77))
        rows = phrases[torch.randint(0, 6, (count, 3), generator=generator)].flatten(1)
        hidden = torch.rand(count, LENGTH, generator=generator) < 0.15
        hidden[:, 3] |= ~hidden.any(1)  # at least one in each row
        self.tokens = rows.masked_fill(hidden, MASK)
        self.labels = rows.masked_fill(~hidden, -100)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.labels[i]}


config = BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=LENGTH,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    initializer_range=0.05,
)
model = BertForMaskedLM(config)
float8 = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
convert_to_float8_training(model.bert.encoder, config=float8)


def accuracy(prediction):
    guess, label = prediction.predictions.argmax(-1), prediction.label_ids
    return {"accuracy": float((guess == label)[label != -100].mean())}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=128,
        learning_rate=2e-3,
        lr_scheduler_type="linear",
        warmup_steps=15,
        label_smoothing_factor=0.1,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(STEPS * BATCH, 100 + SEED),
        eval_dataset=Rows(128, 9000 + SEED),
        compute_metrics=accuracy,
    )
    print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train()
    last = trainer.evaluate()

print(f"accuracy of hidden words {last['eval_accuracy']:.3f}")
print(f"final loss {last['eval_loss']:.4f}")
