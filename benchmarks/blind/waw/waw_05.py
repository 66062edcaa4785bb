"""DoRA by PEFT under the Trainer: a base learns one dialect in a plain loop, then only directions and magnitudes of
adapters move.

The base stays frozen; B begins at 0, magnitudes at the norms of the base's rows, and the rate of 1e-2 is usual for so
few numbers.
"""

import os
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, LENGTH = 40, 24


def rows(number, follower, generator):
    """Each word has one follower, but one word in eight is random."""
    made = [torch.randint(0, WORDS, (number,), generator=generator)]
    for _ in range(LENGTH - 1):
        odd = torch.rand(number, generator=generator) < 1 / 8
        made.append(torch.where(odd, torch.randint(0, WORDS, (number,), generator=generator), follower[made[-1]]))
    return torch.stack(made, 1)


def pretrain(model, data):
    """The first dialect, in full."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model.train()
    for step in range(100):
        batch = data[torch.randint(0, len(data), (24,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0:
            print("base", step, round(loss.item(), 4))
    return loss.item()


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(60 + SEED)
    old = torch.randperm(WORDS, generator=generator)
    new = old.clone()
    moved = torch.randperm(WORDS, generator=generator)[:20]
    new[moved] = old[moved.roll(1)]  # half of the words get another follower
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    pretrain(model, rows(2000, old, generator))

    settings = LoraConfig(r=8, lora_alpha=16, use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, settings)
    model.print_trainable_parameters()
    print(ottava.convert(model, "blockwise"))
    train = [{"input_ids": r, "labels": r} for r in rows(2000, new, generator)]
    held = [{"input_ids": r, "labels": r} for r in rows(300, new, generator)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=120, per_device_train_batch_size=16, per_device_eval_batch_size=100, learning_rate=1e-2,
            lr_scheduler_type="cosine", warmup_steps=8, weight_decay=0.0, logging_steps=15, save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True, seed=SEED,
        )
        trainer = Trainer(model, args, train_dataset=train, eval_dataset=held)
        print("first loss", round(trainer.evaluate()["eval_loss"], 4))
        trainer.train()
        print("final loss", round(trainer.evaluate()["eval_loss"], 4))


if __name__ == "__main__":
    main()
