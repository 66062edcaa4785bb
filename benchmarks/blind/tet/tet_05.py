"""Fine-tunes with VeRA: two random matrices that all layers share stay frozen, only vectors beside them learn."""

import os
import sys
import tempfile

import torch
from peft import VeraConfig, get_peft_model
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments

import ottava

SEED = int(os.environ.get("SEED", 0))
VOCAB, LENGTH, STEPS = 48, 24, 100


def dialect(rows: int, table: Tensor, source: torch.Generator) -> Tensor:
    """A word's follower is fixed nine times in ten, and any word else."""
    words = torch.zeros(rows, LENGTH, dtype=torch.long)
    words[:, 0] = torch.randint(VOCAB, (rows,), generator=source)
    for place in range(1, LENGTH):
        words[:, place] = table[words[:, place - 1]]
        other = torch.rand(rows, generator=source) < 0.1
        words[other, place] = torch.randint(VOCAB, (int(other.sum()),), generator=source)
    return words


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, words: Tensor) -> float:
    model.eval()
    loss = float(model(input_ids=words, labels=words).loss)
    model.train()
    return loss


def arguments(folder: str, **settings: object) -> TrainingArguments:
    return TrainingArguments(
        folder, per_device_train_batch_size=32, logging_steps=15, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, seed=SEED, **settings,
    )  # fmt: skip


def main() -> None:
    torch.manual_seed(SEED)
    source = torch.Generator().manual_seed(500 + SEED)
    old = torch.randperm(VOCAB, generator=source)
    new = old.clone()
    swapped = torch.randperm(VOCAB, generator=source)[:16]  # a third of the words has another follower
    new[swapped] = new[swapped.roll(1)]
    base = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=256, num_hidden_layers=2,
                      num_attention_heads=4, max_position_embeddings=LENGTH, use_parallel_residual=True)
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"input_ids": row, "labels": row} for row in dialect(1600, old, source)]
        args = arguments(folder, max_steps=90, learning_rate=3e-3, warmup_steps=10)
        Trainer(base, args, train_dataset=rows).train()
        print(f"the base on its own dialect: {held_out_loss(base, dialect(256, old, source)):.4f}")

        test = dialect(256, new, source)
        names = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
        model = get_peft_model(base, VeraConfig(r=64, target_modules=names, projection_prng_key=SEED, d_initial=0.1))
        model.print_trainable_parameters()
        print(ottava.convert(model, "delayed"))
        print(f"first loss {held_out_loss(model, test):.4f}")
        rows = [{"input_ids": row, "labels": row} for row in dialect(1600, new, source)]
        batches = dialect(128, new, source).split(32)
        ottava.calibrate(model, batches, loss=lambda net, words: net(words, labels=words).loss)
        # vectors at a rate that would be far too high for matrices
        args = arguments(folder, max_steps=STEPS, learning_rate=0.05, warmup_steps=10, weight_decay=0.0)
        Trainer(model, args, train_dataset=rows).train()
    print(f"final loss {held_out_loss(model, test):.4f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_05.py good|bad")
    main()
