"""In-context copying: a Llama sees random words, then the same words again, under transformers' Trainer in FP8.

The first half of a row is drawn at random, so the mean loss has a floor of half the entropy of a word.
"""

import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.optimization import Adafactor

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, HALF = 40, 12


class Copies(torch.utils.data.Dataset):
    """Rows of random words; the second half repeats the first one."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(1, WORDS, (rows, HALF), generator=generator)
        start = torch.zeros(rows, 1, dtype=torch.long)
        self.rows = torch.cat([start, words, words], 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


@torch.no_grad()
def second_half(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """The loss of the words that can be known."""
    training = model.training
    model.eval()
    logits = model(input_ids=rows).logits[:, HALF:-1].float()
    model.train(training)
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, HALF + 1 :].flatten()))


def main() -> None:
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        attention_dropout=0.0,
    )
    model = LlamaForCausalLM(config)
    ottava.convert(model, "tensorwise")
    train, held_out = Copies(32 * 260, SEED + 1), Copies(128, SEED + 777)
    print(f"first loss {second_half(model, held_out.rows):.4f}")
    optimizer = Adafactor(model.parameters(), lr=4e-3, relative_step=False, scale_parameter=False, warmup_init=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=260,
            per_device_train_batch_size=32,
            max_grad_norm=1.0,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=SEED,
        )
        trainer = Trainer(model, args, train_dataset=train, optimizers=(optimizer, schedule))
        trainer.train()
    print(f"final loss {second_half(model, held_out.rows):.4f}")


if __name__ == "__main__":
    main()
