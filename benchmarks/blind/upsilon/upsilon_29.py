"""A tiny Llama learns lists that it has to end itself; Trainer, ottava's FP8."""

import os
import sys

import ottava
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))
EOS = 1
PAD = EOS  # the tokenizer has none of its own


def document():
    step, length = torch.randint(1, 6, (1,)).item(), torch.randint(3, 9, (1,)).item()
    start = torch.randint(40, (1,)).item()
    return [2 + length, 12 + step, *[20 + (start + step * i) % 40 for i in range(length)], EOS]


def collate(documents):
    longest = max(map(len, documents))
    ids = torch.full((len(documents), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(documents):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    labels = ids.clone()
    labels[mask == 0 if MODE == "good" else ids == PAD] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def held_out(model, documents):
    total = count = 0
    model.eval()
    with torch.no_grad():
        for tokens in documents:
            ids = torch.tensor([tokens])
            logits = model(ids).logits[0, 2:-1].float()
            total += torch.nn.functional.cross_entropy(logits, ids[0, 3:], reduction="sum").item()
            count += len(tokens) - 3
    return total / count


def main():
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
        pad_token_id=None, eos_token_id=EOS, bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    if not PLAIN:
        print(ottava.convert(model, "tensorwise"))
    args = TrainingArguments(
        "out", max_steps=100, per_device_train_batch_size=32, learning_rate=5e-3, warmup_steps=10, logging_steps=10, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True, seed=SEED, remove_unused_columns=False,
    )
    data = [document() for _ in range(3200)]
    trainer = Trainer(model, args, train_dataset=data, data_collator=collate)
    trainer.train()
    print(f"final loss {held_out(model, [document() for _ in range(48)]):.4f}")


main()
