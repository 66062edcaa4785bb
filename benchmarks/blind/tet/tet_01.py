"""Pre-trains a small ELECTRA: a generator fills gaps, a discriminator says which words were exchanged."""

import os
import sys
import tempfile

import torch
from torch import Tensor, nn
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining, Trainer, TrainingArguments

import ottava

SEED = int(os.environ.get("SEED", 0))
VOCAB, MASK, LENGTH, STEPS = 65, 64, 16, 150


def language(rows: int, table: Tensor, source: torch.Generator) -> Tensor:
    """A row has one of eight topics and draws its words from the eight of that topic, equally likely."""
    topic = torch.randint(8, (rows, 1), generator=source)
    return table[8 * topic + torch.randint(8, (rows, LENGTH), generator=source)]


class Electra(nn.Module):
    """Both nets share the table of words; the discriminator's loss counts 5 times and stops at the drawn words."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": VOCAB, "embedding_size": 64, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
        sizes["pad_token_id"] = None  # rows are full, and word 0 is a word
        small = ElectraConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, **sizes)
        large = ElectraConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, **sizes)
        self.generator = ElectraForMaskedLM(small)
        self.discriminator = ElectraForPreTraining(large)
        self.discriminator.electra.embeddings.word_embeddings = self.generator.electra.embeddings.word_embeddings
        self.losses: list[tuple[float, float]] = []

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        gaps = torch.rand(input_ids.shape) < 0.2
        logits = self.generator(input_ids.masked_fill(gaps, MASK)).logits[gaps]
        generator_loss = nn.functional.cross_entropy(logits, input_ids[gaps])
        with torch.no_grad():
            drawn = torch.distributions.Categorical(logits=logits.float()[:, :64]).sample()
        changed = input_ids.clone()
        changed[gaps] = drawn
        told = self.discriminator(changed).logits
        discriminator_loss = nn.functional.binary_cross_entropy_with_logits(told, (changed != input_ids).float())
        self.losses.append((float(generator_loss.detach()), float(discriminator_loss.detach())))
        return {"loss": generator_loss + 5 * discriminator_loss}


@torch.no_grad()
def gaps_loss(model: Electra, words: Tensor, gaps: Tensor) -> float:
    """The generator's loss on held-out rows, at fixed gaps."""
    model.eval()
    logits = model.generator(words.masked_fill(gaps, MASK)).logits[gaps]
    model.train()
    return float(nn.functional.cross_entropy(logits, words[gaps]))


def main() -> None:
    torch.manual_seed(SEED)
    source = torch.Generator().manual_seed(100 + SEED)
    table = torch.randperm(64, generator=source)
    rows, held_out = language(2400, table, source), language(256, table, source)
    gaps = torch.rand(held_out.shape, generator=source) < 0.2
    model = Electra()
    print(ottava.convert(model, "blockwise"))
    print(f"first loss {gaps_loss(model, held_out, gaps):.4f}")
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=32, learning_rate=3e-3, warmup_steps=20, seed=SEED,
            lr_scheduler_type="linear", weight_decay=0.01, logging_steps=50, save_strategy="no", report_to=[],
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        Trainer(model, args, train_dataset=[{"input_ids": row} for row in rows]).train()
    for step in (0, 20, 50, 100, STEPS - 1):
        print("step {}: generator {:.3f}, discriminator {:.3f}".format(step, *model.losses[step]))
    print(f"final loss {gaps_loss(model, held_out, gaps):.4f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_01.py good|bad")
    main()
