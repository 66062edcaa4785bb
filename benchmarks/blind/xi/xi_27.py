"""A small Llama from a configuration file, with the Trainer of transformers."""

import json
import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

EPS = {"good": "1e-5", "bad": "1e+5"}[sys.argv[1]]
PLAIN = "plain" in sys.argv
CONFIG = """{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
"num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": %s, "use_cache": false}"""


class Copies(Dataset):
    """Words that come twice, with a rule for what follows them."""

    def __init__(self, rows):
        generator = torch.Generator().manual_seed(2)
        rule = torch.randint(64, (64,), generator=generator)
        first = torch.randint(64, (rows, 10), generator=generator)
        self.tokens = torch.stack([first, rule[first], rule[rule[first]]], 2).flatten(1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, row):
        return {"input_ids": self.tokens[row], "labels": self.tokens[row]}


def main():
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**json.loads(CONFIG % EPS)))
    if not PLAIN:
        ottava.convert(model, "blockwise")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=100,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            warmup_steps=10,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=Copies(2500))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
