"""A small Mixtral with warmup-stable-decay: a high rate for most of the run, which goes to 0 in the last third.

The model adds the loss of the balance of experts, so the loss cannot come near 0; a twentieth of the symbols is random.
"""

import os
import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

import ottava

SEED = int(os.environ.get("SEED", "0"))
SYMBOLS, LENGTH, STEPS = 64, 32, 100


def corpus(count: int, table: torch.Tensor, g: torch.Generator) -> list[dict]:
    """The two last symbols decide the next, mostly."""
    ids = torch.randint(0, SYMBOLS, (count, 2), generator=g)
    for _ in range(LENGTH - 2):
        follow = table[ids[:, -1], ids[:, -2] % 2]
        noise = torch.rand(count, generator=g) < 0.05
        follow = torch.where(noise, torch.randint(0, SYMBOLS, (count,), generator=g), follow)
        ids = torch.cat([ids, follow[:, None]], 1)
    return [{"input_ids": row, "labels": row} for row in ids]


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(1000 + SEED)
    table = torch.randint(0, SYMBOLS, (SYMBOLS, 2), generator=g)
    train, held = corpus(2000, table, g), corpus(100, table, g)

    config = MixtralConfig(
        vocab_size=SYMBOLS, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=LENGTH,
        output_router_logits=True, router_aux_loss_coef=0.02,
    )
    model = MixtralForCausalLM(config)
    print(ottava.convert(model, "tensorwise"))

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=16, per_device_eval_batch_size=50, learning_rate=1e-2,
            lr_scheduler_type="warmup_stable_decay", warmup_steps=10,
            lr_scheduler_kwargs={"num_decay_steps": 30, "min_lr_ratio": 0.0}, adam_beta2=0.95, weight_decay=0.1,
            logging_steps=10, save_strategy="no", bf16=True, report_to=[], seed=SEED, use_cpu=True, disable_tqdm=True,
        )
        trainer = Trainer(model, args, train_dataset=train, eval_dataset=held)
        print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
        trainer.train()
        print(f"final loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
