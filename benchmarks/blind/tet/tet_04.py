"""Trains on chosen words only: those that the net knows worse than a reference model does (as Rho-1 does)."""

import os
import sys
import tempfile

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ottava

SEED = int(os.environ.get("SEED", 0))
VOCAB, LENGTH, STEPS, SHARE = 64, 32, 110, 0.5


def clean(rows: int, table: Tensor, source: torch.Generator) -> Tensor:
    """Each word has two equally likely followers."""
    words = torch.zeros(rows, LENGTH, dtype=torch.long)
    words[:, 0] = torch.randint(VOCAB, (rows,), generator=source)
    for place in range(1, LENGTH):
        words[:, place] = table[words[:, place - 1], torch.randint(2, (rows,), generator=source)]
    return words


def crawled(rows: int, table: Tensor, source: torch.Generator) -> Tensor:
    """Clean text with a stretch of rubbish in each row, a third of it."""
    words = clean(rows, table, source)
    for row in range(rows):
        start = int(torch.randint(LENGTH - 11, (1,), generator=source))
        words[row, start : start + 11] = torch.randint(VOCAB, (11,), generator=source)
    return words


def llama(layers: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=layers,
                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH)
    )  # fmt: skip


def per_word(model: torch.nn.Module, words: Tensor) -> Tensor:
    logits = model(input_ids=words).logits[:, :-1].float()
    return cross_entropy(logits.transpose(1, 2), words[:, 1:], reduction="none")


class Selective(Trainer):
    """The words with the highest loss above that of the reference have a loss; the other half has none."""

    reference: LlamaForCausalLM

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # noqa: ANN001, ANN201
        losses = per_word(model, inputs["input_ids"])
        with torch.no_grad():
            excess = losses - per_word(self.reference, inputs["input_ids"])
            chosen = excess >= excess.flatten().quantile(1 - SHARE)
        return losses[chosen].mean()


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, words: Tensor) -> float:
    model.eval()
    loss = float(per_word(model, words).mean())
    model.train()
    return loss


def main() -> None:
    torch.manual_seed(SEED)
    source = torch.Generator().manual_seed(400 + SEED)
    table = torch.randint(VOCAB, (VOCAB, 2), generator=source)
    test = clean(256, table, source)
    reference = llama(1)  # on little, but clean text
    optimizer = torch.optim.Adam(reference.parameters(), 5e-3)
    few = clean(256, table, source)
    for step in range(60):
        optimizer.zero_grad()
        per_word(reference, few[step % 8 * 32 :][:32]).mean().backward()
        optimizer.step()
    reference.eval().requires_grad_(False)
    print(f"the reference: {held_out_loss(reference, test):.4f}")
    reference.eval()

    model = llama(2)
    print(ottava.convert(model, "rowwise"))
    print(f"first loss {held_out_loss(model, test):.4f}")
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=24, learning_rate=4e-3, warmup_steps=10, seed=SEED,
            lr_scheduler_type="cosine", optim="adafactor", activation_checkpointing=True, logging_steps=10, save_strategy="no", report_to=[],
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        data = [{"input_ids": row} for row in crawled(2640, table, source)]
        trainer = Selective(model, args, train_dataset=data)
        trainer.reference = reference
        trainer.train()
    print(f"final loss {held_out_loss(model, test):.4f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_04.py good|bad")
    main()
