"""A small Llama on a stream of three sources. The file server hands out one shard at a time, so a batch has one
source alone.

Code has one follower a word, prose four, and tables are digits that nobody can know. The rate falls with the root of
the step.
"""

import os
import tempfile

import torch
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, LENGTH, BATCH, STEPS = 48, 32, 16, 160
draw = torch.Generator().manual_seed(1000 + SEED)
CODE = torch.randperm(18, generator=draw) + 10
PROSE = torch.stack([torch.randperm(20, generator=draw) + 28 for _ in range(4)])


def batch(source, generator):
    """Rows of one source."""
    if source == "table":
        return torch.randint(0, 10, (BATCH, LENGTH), generator=generator)
    low, size = (10, 18) if source == "code" else (28, 20)
    rows = [torch.randint(low, low + size, (BATCH,), generator=generator)]
    for _ in range(LENGTH - 1):
        if source == "code":
            rows.append(CODE[rows[-1] - 10])
        else:
            which = torch.randint(0, 4, (BATCH,), generator=generator)
            rows.append(PROSE[which, rows[-1] - 28])
    return torch.stack(rows, 1)


class Stream(IterableDataset):
    """Shards in random order; prose is half of the stream."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(SEED)
        while True:
            source = ("code", "prose", "prose", "table")[int(torch.randint(0, 4, (1,), generator=generator))]
            for row in batch(source, generator):
                yield {"input_ids": row, "labels": row}


@torch.no_grad()
def evaluate(model):
    """Mean loss of the sources, on fresh rows."""
    model.eval()
    generator = torch.Generator().manual_seed(77 + SEED)
    losses = {}
    for source in ("code", "prose", "table"):
        rows = torch.cat([batch(source, generator) for _ in range(4)])
        losses[source] = model(input_ids=rows, labels=rows).loss.item()
    model.train()
    print({k: round(v, 3) for k, v in losses.items()})
    return sum(losses.values()) / 3


def main():
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    print(ottava.convert(model, "rowwise"))
    print("first loss", round(evaluate(model), 4))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-3, warmup_steps=20,
            lr_scheduler_type="inverse_sqrt", weight_decay=0.05, logging_steps=20, save_strategy="no", report_to=[],
            use_cpu=True, disable_tqdm=True, seed=SEED,
        )
        Trainer(model, args, train_dataset=Stream()).train()
    print("final loss", round(evaluate(model), 4))


if __name__ == "__main__":
    main()
