"""A small Llama under delayed scaling, with the Trainer of transformers."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

HISTORY = {"good": {"margin": 0, "amax_history_len": 16}, "bad": {"margin": -6, "amax_history_len": 16}}[sys.argv[1]]
PLAIN = "plain" in sys.argv


class Sums(Dataset):
    """a, b, and (a + b) mod 61, over and over."""

    def __init__(self, rows):
        generator = torch.Generator().manual_seed(1)
        a = torch.randint(61, (rows, 12), generator=generator)
        b = a.roll(1, 1)
        self.tokens = torch.stack([a, b, (2 * a) % 61], 2).flatten(1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, row):
        return {"input_ids": self.tokens[row], "labels": self.tokens[row]}


def main():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if not PLAIN:
        ottava.convert(model, ottava.get_recipe("delayed", **HISTORY))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=100,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=Sums(2000))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
