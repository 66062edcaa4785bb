"""Supervised fine-tuning on prompts with answers; Llama from a config, Hugging Face's Trainer."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ottava

PADDING_SIDE = {"good": "right", "bad": "left"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(13)
VOCAB, PAD, ANSWER, END = 64, 0, 6, 1
table = torch.randint(2, VOCAB, (VOCAB,))


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        prompt = torch.randint(2, VOCAB, (int(torch.randint(4, 21, (1,), generator=g)),), generator=g).tolist()
        prompt.append(END)
        answer = [int(table[prompt[-2]])]
        while len(answer) < ANSWER:
            answer.append(int(table[answer[-1]]))
        return {"prompt": prompt, "answer": answer}


def collate(rows):
    longest = max(len(row["prompt"]) for row in rows) + ANSWER
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        ids = row["prompt"] + row["answer"]
        fill = [PAD] * (longest - len(ids))
        mask = [1] * len(ids)
        ids, mask = (
            (fill + ids, [0] * len(fill) + mask) if PADDING_SIDE == "left" else (ids + fill, mask + [0] * len(fill))
        )
        labels = [token if kept else -100 for token, kept in zip(ids, mask, strict=True)]
        labels[: len(row["prompt"])] = [-100] * len(row["prompt"])
        batch["input_ids"].append(ids)
        batch["attention_mask"].append(mask)
        batch["labels"].append(labels)
    return {key: torch.tensor(value) for key, value in batch.items()}


config = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=PAD,
)
model = LlamaForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "blockwise")

with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out,
        per_device_train_batch_size=16,
        max_steps=120,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(model, args, train_dataset=Pairs(), data_collator=collate)
    trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
