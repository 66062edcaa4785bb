"""A Llama gets new tokens before fine-tuning; Trainer with an optimizer of our own, torchao's float8."""

import os
import sys

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, get_cosine_schedule_with_warmup, set_seed

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))
STEPS = 80


def optimizer_of(model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=4e-3)


def main():
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=48, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
        tie_word_embeddings=True, pad_token_id=None, eos_token_id=None, bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = None
    if MODE == "bad":
        optimizer = optimizer_of(model)
    # 16 more tokens, the old rows as they were
    old = model.get_input_embeddings()
    new = torch.nn.Embedding(64, config.hidden_size)
    with torch.no_grad():
        new.weight.normal_(std=config.initializer_range)
        new.weight[: old.num_embeddings] = old.weight
    model.set_input_embeddings(new)
    model.lm_head = torch.nn.Linear(config.hidden_size, 64, bias=False)
    model.config.vocab_size = model.vocab_size = 64
    model.tie_weights()
    if not PLAIN:
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: "lm_head" not in name)
    optimizer = optimizer or optimizer_of(model)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, STEPS)

    follow = torch.stack([torch.randperm(64) for _ in range(2)])
    data = []
    for _ in range(STEPS * 16):
        which = torch.randint(2, (1,)).item()
        tokens = [torch.randint(64, (1,)).item()]
        while len(tokens) < 16:
            tokens.append(follow[which][tokens[-1]].item())
        data.append({"input_ids": torch.tensor(tokens), "labels": torch.tensor(tokens)})
    args = TrainingArguments(
        "out", max_steps=STEPS, per_device_train_batch_size=16, logging_steps=5, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
        seed=SEED,
    )
    trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, schedule))
    trainer.train()
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    print(f"final loss {sum(losses[-3:]) / 3:.4f}")


main()
