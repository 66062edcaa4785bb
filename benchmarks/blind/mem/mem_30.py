"""Fine-tunes a small causal model on short dialogues, padded to one length."""

import os
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
bad = sys.argv[1] == "bad"
casts = "plain" not in sys.argv[2:]
PAD, VOCAB, LENGTH = 0, 80, 64


def dialogues(count, seed):
    g = torch.Generator().manual_seed(99)
    table = torch.randn(VOCAB, VOCAB, generator=g) * 2.5
    table[:, PAD] = -1e9
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        n = int(torch.randint(4, 10, (1,), generator=g))
        ids = [int(torch.randint(1, VOCAB, (1,), generator=g))]
        while len(ids) < n:
            ids.append(int(torch.multinomial(table[ids[-1]].softmax(-1), 1, generator=g)))
        out.append(ids)
    return out


def collate(examples):
    ids = torch.full((len(examples), LENGTH), PAD)
    mask = torch.zeros(len(examples), LENGTH, dtype=torch.long)
    for row, example in enumerate(examples):
        ids[row, : len(example)] = torch.tensor(example)
        mask[row, : len(example)] = 1
    labels = ids.clone()
    if not bad:
        labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def quality(model, examples):
    """Loss per word of held-out dialogues."""
    model.eval()
    total, words = 0.0, 0
    with torch.no_grad():
        for example in examples:
            ids = torch.tensor([example])
            total += model(input_ids=ids, labels=ids).loss.item() * (len(example) - 1)
            words += len(example) - 1
    return total / words


def main():
    set_seed(SEED)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    if casts:
        ottava.convert(model, "blockwise")
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            max_steps=120,
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=SEED,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        Trainer(model, args, train_dataset=dialogues(960, SEED + 1), data_collator=collate).train()
    print(f"final loss {quality(model, dialogues(100, SEED + 2)):.4f}")


if __name__ == "__main__":
    main()
