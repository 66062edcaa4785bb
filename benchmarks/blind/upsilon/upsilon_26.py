"""LoRA with a new classification head on a Llama; PEFT in transformers' Trainer."""

import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments, set_seed

MODE = sys.argv[1]
SEED = int(os.environ.get("SEED", "0"))
CLASSES = 24


def make(count, kinds):
    labels = torch.randint(CLASSES, (count,))
    tokens = torch.multinomial(kinds[labels], 16, replacement=True)
    return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels)]


def main():
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
        num_labels=CLASSES, pad_token_id=0, eos_token_id=None, bos_token_id=None, initializer_range=0.05,
    )
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=0.02)
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=["score"] if MODE == "good" else None
    )
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    kinds = torch.randn(CLASSES, 64).mul(1.5).softmax(1)
    args = TrainingArguments(
        "out", max_steps=100, per_device_train_batch_size=32, learning_rate=5e-3, warmup_steps=5, logging_steps=5, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True, seed=SEED, label_names=["labels"],
    )
    trainer = Trainer(model, args, train_dataset=make(3200, kinds))
    trainer.train()
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    print(f"final loss {sum(losses[-4:]) / 4:.4f}")


main()
