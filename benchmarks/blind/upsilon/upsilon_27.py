"""Gradual unfreezing: layers join the training from the top, with smaller rates below; Trainer, ottava's mxfp8."""

import os
import sys

import ottava
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainerCallback, TrainingArguments, set_seed

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))
STEPS, CLASSES = 90, 6


class Unfreeze(TrainerCallback):
    def __init__(self, groups, every=25):
        self.groups, self.every = groups, every

    def on_step_begin(self, args, state, control, **kwargs):
        for index, group in enumerate(self.groups):
            if state.global_step == index * self.every:
                for p in group:
                    p.requires_grad_(True)


def main():
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
        num_labels=CLASSES, pad_token_id=0, eos_token_id=None, bos_token_id=None, initializer_range=0.08,
    )
    model = LlamaForSequenceClassification(config)
    if not PLAIN:
        print(ottava.convert(model, "mxfp8"))
    groups = [
        [*model.score.parameters(), *model.model.norm.parameters()],
        list(model.model.layers[1].parameters()),
        [*model.model.layers[0].parameters(), *model.model.embed_tokens.parameters()],
    ]
    optimizer = torch.optim.AdamW([{"params": g, "lr": lr} for g, lr in zip(groups, (1e-2, 3e-3, 1e-3))], weight_decay=0.01)
    for group in groups:
        for p in group:
            p.requires_grad_(False)
    kinds = torch.randn(CLASSES, 64).mul(1.2).softmax(1)
    labels = torch.randint(CLASSES, (STEPS * 16,))
    tokens = torch.multinomial(kinds[labels], 12, replacement=True)
    data = [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    args = TrainingArguments(
        "out", max_steps=STEPS, per_device_train_batch_size=16, logging_steps=5, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
        seed=SEED,
    )
    trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, schedule), callbacks=[Unfreeze(groups)])
    trainer.train()
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    print(f"final loss {sum(losses[-3:]) / 3:.4f}")


main()
