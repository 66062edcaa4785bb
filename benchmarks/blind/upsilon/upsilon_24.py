"""Continued pretraining: another corpus, with other words, from the middle on; Trainer, ottava's delayed scaling."""

import os
import sys

import ottava
import torch
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))
STEPS, BATCH = 90, 16


class InOrder(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


def corpus(count, first, words):
    follow = first + torch.randint(words, (words, 2))
    out = []
    for _ in range(count):
        tokens = [first + torch.randint(words, (1,)).item()]
        while len(tokens) < 16:
            tokens.append(follow[tokens[-1] - first][torch.randint(2, (1,)).item()].item())
        out.append({"input_ids": torch.tensor(tokens), "labels": torch.tensor(tokens)})
    return out


def main():
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
        pad_token_id=None, eos_token_id=None, bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    if not PLAIN:
        print(ottava.convert(model, "delayed"))
    old, new = corpus(45 * BATCH, 0, 32), corpus(45 * BATCH, 32, 64)
    args = TrainingArguments(
        "out", max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=6e-3, warmup_steps=6, logging_steps=3, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, seed=SEED, lr_scheduler_type="constant_with_warmup",
    )
    trainer = InOrder(model, args, train_dataset=old + new)
    trainer.train()
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    print(f"final loss {sum(losses[-3:]) / 3:.4f}")


main()
