"""A small T5 continues a row: the warm-up is half of the run, and labels are smoothed."""

import os
import tempfile

import torch
from transformers import Adafactor, T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments
from transformers import get_constant_schedule_with_warmup

import ottava

SEED = int(os.environ.get("SEED", "0"))
SYMBOLS, PAD, STEPS = 40, 0, 120
SOURCE, TARGET = 12, 16


def rows(count: int, table: torch.Tensor, g: torch.Generator) -> list[dict]:
    """The row is cut in two: the encoder reads the first part, the decoder writes the second, of any length."""
    ids = torch.randint(1, SYMBOLS, (count, 1), generator=g)
    for _ in range(SOURCE + TARGET - 1):
        choice = torch.randint(0, 2, (count,), generator=g)
        ids = torch.cat([ids, table[ids[:, -1], choice][:, None]], 1)
    source, target = ids[:, :SOURCE], ids[:, SOURCE:].clone()
    length = torch.randint(6, TARGET + 1, (count, 1), generator=g)
    target[torch.arange(TARGET)[None] >= length] = -100
    # with smoothed labels the Trainer keeps them to itself, so the decoder's input is made here
    before = torch.cat([torch.full((count, 1), PAD), target[:, :-1].clamp(min=PAD)], 1)
    return [{"input_ids": s, "decoder_input_ids": b, "labels": t} for s, b, t in zip(source, before, target)]


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    table = torch.randint(1, SYMBOLS, (SYMBOLS, 2), generator=g)
    train, held = rows(1600, table, g), rows(128, table, g)

    config = T5Config(
        vocab_size=SYMBOLS, d_model=64, d_kv=16, num_heads=4, d_ff=128, num_layers=2, num_decoder_layers=2,
        dropout_rate=0.0, decoder_start_token_id=PAD, pad_token_id=PAD, feed_forward_proj="gated-gelu",
    )
    model = T5ForConditionalGeneration(config)
    print(ottava.convert(model, "mxfp8"))

    optimizer = Adafactor(
        model.parameters(), lr=1e-2, relative_step=False, scale_parameter=False, warmup_init=False, clip_threshold=1.0
    )
    schedule = get_constant_schedule_with_warmup(optimizer, num_warmup_steps=STEPS // 2)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=16, per_device_eval_batch_size=64, logging_steps=20,
            label_smoothing_factor=0.1, save_strategy="no", report_to=[], seed=SEED, use_cpu=True, disable_tqdm=True,
        )
        trainer = Trainer(model, args, train_dataset=train, eval_dataset=held, optimizers=(optimizer, schedule))
        print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
        trainer.train()
        print(f"final loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
