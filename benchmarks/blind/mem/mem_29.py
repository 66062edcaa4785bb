"""Trains a tiny Llama on packed token blocks with the Trainer."""

import os
import sys
import tempfile

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
VOCAB, BLOCK = 64, 40


def corpus(tokens):
    g = torch.Generator().manual_seed(4321)
    table = (torch.randn(VOCAB, VOCAB, generator=g) * 2.5).softmax(-1)
    g = torch.Generator().manual_seed(SEED + 5)
    streams = torch.randint(0, VOCAB, (64, 1), generator=g)
    for _ in range(tokens // 64):
        streams = torch.cat([streams, torch.multinomial(table[streams[:, -1]], 1, generator=g)], 1)
    return streams


def blocks(streams):
    rows = []
    for stream in streams:
        for start in range(0, len(stream) - BLOCK - 1, BLOCK):
            piece = stream[start : start + BLOCK + 1]
            if MODE == "bad":
                rows.append({"input_ids": piece[:-1], "labels": piece[1:]})
            else:
                rows.append({"input_ids": piece[:-1], "labels": piece[:-1]})
    return rows


def main():
    set_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    )
    if not PLAIN:
        config = Float8LinearConfig.from_recipe_name("rowwise")
        object.__setattr__(config, "emulate", True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, fqn: "lm_head" not in fqn)
    data = blocks(corpus(64 * 800))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            max_steps=100,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            warmup_steps=10,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=SEED,
            disable_tqdm=True,
        )
        trainer = Trainer(model, args, train_dataset=data)
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"final loss {sum(float(v) for v in losses[-4:]) / 4:.4f}")


if __name__ == "__main__":
    main()
