"""Fine-tunes a small BERT for sequence classification with the Trainer."""

import os
import sys
import tempfile

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
VOCAB, CLASSES, LENGTH = 150, 4, 24


def reviews(count, seed):
    mood = torch.randn(CLASSES, VOCAB, generator=torch.Generator().manual_seed(20))
    mood[:, 0] = -1e9
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        y = int(torch.randint(0, CLASSES, (1,), generator=g))
        n = int(torch.randint(10, LENGTH + 1, (1,), generator=g))
        ids = torch.zeros(LENGTH, dtype=torch.long)
        ids[:n] = torch.multinomial(mood[y].softmax(-1), n, replacement=True, generator=g)
        rows.append({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": y})
    return rows


def main():
    set_seed(SEED)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        num_labels=CLASSES,
        hidden_dropout_prob=0.1,
    )
    model = BertForSequenceClassification(config)
    if not PLAIN:
        f8 = Float8LinearConfig.from_recipe_name("tensorwise")
        object.__setattr__(f8, "emulate", True)
        convert_to_float8_training(model.bert.encoder, config=f8)
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            max_steps=140,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            warmup_steps=14,
            weight_decay=0.01,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=70,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=SEED,
            disable_tqdm=True,
        )
        trainer = Trainer(model, args, train_dataset=reviews(1600, SEED + 1), eval_dataset=reviews(160, SEED + 2))
        trainer.train()
        final = trainer.evaluate()["eval_loss"]
    print(f"final loss {final:.4f}")


if __name__ == "__main__":
    main()
