"""Two processes under accelerate, one with short rows and one with long ones; the loss is a mean over all words."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

from ottava.doors.accelerate import prepare

SEED = int(os.environ.get("SEED", 0))
VOCAB, PAD, LONGEST, MICRO, STEPS = 48, 0, 40, 2, 75


def rows(count: int, table: Tensor, source: torch.Generator, shortest: int, longest: int) -> tuple[Tensor, Tensor]:
    """A word has one follower, or, one time in eight, any word; behind the end of a row there is padding."""
    words = torch.zeros(count, LONGEST, dtype=torch.long)
    words[:, 0] = torch.randint(1, VOCAB, (count,), generator=source)
    for place in range(1, LONGEST):
        words[:, place] = table[words[:, place - 1]]
        other = torch.rand(count, generator=source) < 0.125
        words[other, place] = torch.randint(1, VOCAB, (int(other.sum()),), generator=source)
    length = torch.randint(shortest, longest + 1, (count, 1), generator=source)
    words[torch.arange(LONGEST) >= length] = PAD
    return words, (words != PAD).long()


def summed_loss(model: torch.nn.Module, words: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over all words that are not padding, and their number."""
    logits = model(input_ids=words, attention_mask=mask).logits[:, :-1].float()
    labels = words[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    return cross_entropy(logits.transpose(1, 2), labels, reduction="sum"), (labels != -100).sum()


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, test: tuple[Tensor, Tensor]) -> float:
    model.eval()
    total, count = summed_loss(model, *test)
    model.train()
    return float(total / count)


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
    set_seed(SEED)
    source = torch.Generator().manual_seed(1200 + SEED)
    table = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(VOCAB - 1, generator=source)])
    test = rows(200, table, source, 3, LONGEST)
    rank = accelerator.process_index
    source.manual_seed(1300 + 10 * SEED + rank)
    bounds = (3, 9) if rank == 0 else (24, LONGEST)  # rows are bucketed by length

    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=LONGEST, tie_word_embeddings=True)
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, (10 / (step + 1)) ** 0.5))
    model, optimizer = prepare(accelerator, model, optimizer, recipe="guarded")
    plain = accelerator.unwrap_model(model)
    accelerator.print(f"first loss {held_out_loss(plain, test):.4f}")
    for step in range(STEPS):
        batches = [rows(8, table, source, *bounds) for _ in range(MICRO)]
        words = torch.stack([mask[:, 1:].sum() for _, mask in batches]).sum()
        everywhere = accelerator.reduce(words.float(), "sum")
        own = 0.0
        for batch in batches:
            with accelerator.accumulate(model):
                total, _ = summed_loss(model, *batch)
                # the mean over all words of both: DDP divides by the processes, backward by the micro-batches
                accelerator.backward(total / everywhere * accelerator.num_processes * MICRO)
                own += float(total.detach())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        if step % 15 == 0:
            shares = accelerator.gather(torch.tensor([own / float(everywhere), float(words)])).tolist()
            accelerator.print(f"step {step}: parts of the loss, and words: {[round(n, 3) for n in shares]}")
    accelerator.print(f"final loss {held_out_loss(plain, test):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: torchrun --nproc-per-node 2 tet_12.py good|bad")
    main()
