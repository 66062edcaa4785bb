"""LISA under the Trainer: in each period of 12 steps one block of a Llama, drawn at random, learns beside the tables.

The other blocks are frozen for that period; the moments of a block are dropped when it falls asleep.
"""

import os
import random
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, LENGTH, PERIOD = 64, 24, 12


def text(rows: int, seed: int) -> torch.Tensor:
    """The next word depends on the last two and is sometimes drawn at random."""
    table = torch.randint(WORDS, (8, WORDS), generator=torch.Generator().manual_seed(5))
    g = torch.Generator().manual_seed(seed)
    words = [torch.randint(WORDS, (rows,), generator=g) for _ in range(2)]
    while len(words) < LENGTH:
        known = table[words[-2] % 8, words[-1]]
        stray = torch.randint(WORDS, (rows,), generator=g)
        words.append(torch.where(torch.rand(rows, generator=g) < 0.9, known, stray))
    return torch.stack(words, 1)


class Lisa(TrainerCallback):
    """Wakes one block per period."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.blocks = list(model.model.layers)
        self.draw = random.Random(SEED)

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        if state.global_step % PERIOD:
            return
        awake = self.draw.randrange(len(self.blocks))
        for number, block in enumerate(self.blocks):
            for parameter in block.parameters():
                parameter.requires_grad_(number == awake)
                if number != awake:
                    parameter.grad = None
                    inner = getattr(optimizer, "optimizer", optimizer)
                    inner.state.pop(parameter, None)


@torch.no_grad()
def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> float:
    training = model.training
    model.eval()
    loss = float(model(input_ids=rows, labels=rows).loss)
    model.train(training)
    return loss


def main() -> None:
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    ottava.convert(model, "blockwise")
    held_out = text(128, SEED + 600)
    print(f"first loss {loss_of(model, held_out):.4f}")
    data = [{"input_ids": row, "labels": row} for row in text(32 * 168, SEED + 1)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=168,
            per_device_train_batch_size=32,
            learning_rate=4e-3,
            warmup_steps=12,
            lr_scheduler_type="linear",
            logging_steps=6,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=SEED,
        )
        Trainer(model, args, train_dataset=data, callbacks=[Lisa(model)]).train()
    print(f"final loss {loss_of(model, held_out):.4f}")


if __name__ == "__main__":
    main()
