"""Masked language modelling with BERT and the Trainer of transformers; 15 % of the tokens have a label."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

import ottava

PLAIN = "plain" in sys.argv
MASK = 1


class Text(Dataset):
    """Each row talks of one of six topics, with ten words each; masked anew at every look."""

    def __init__(self, rows):
        generator = torch.Generator().manual_seed(4)
        topic = torch.randint(6, (rows, 1), generator=generator)
        self.tokens = 4 + 10 * topic + torch.randint(10, (rows, 32), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, row):
        tokens = self.tokens[row]
        masked = torch.rand(tokens.shape) < 0.15
        masked[torch.randint(len(tokens), ())] = True
        return {"input_ids": tokens.masked_fill(masked, MASK), "labels": tokens.masked_fill(~masked, -100)}


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
    )
    model = BertForMaskedLM(config)
    if not PLAIN:
        ottava.convert(model, "blockwise")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=140,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            warmup_steps=10,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=Text(2000))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
