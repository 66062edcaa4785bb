"""Messages of ten kinds with a long tail: classes are re-weighted only for the last third (deferred re-weighting).

A margin that is larger for rare classes is taken off the right logit (LDAM), so the loss is not a plain cross-entropy.
"""

import dataclasses
import os
import tempfile

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

SEED = int(os.environ.get("SEED", "0"))
KINDS, WORDS, LENGTH, STEPS = 10, 100, 10, 180
COUNTS = torch.tensor([round(900 * 0.7**k) for k in range(KINDS)])


def messages(counts: torch.Tensor, seed: int) -> list[dict[str, torch.Tensor]]:
    """Three words of a row tell its kind, the rest is chatter."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for kind, count in enumerate(counts.tolist()):
        for _ in range(count):
            words = torch.randint(KINDS * 5, WORDS, (LENGTH,), generator=g)
            at = torch.randperm(LENGTH, generator=g)[:3]
            words[at] = kind * 5 + torch.randint(0, 5, (3,), generator=g)
            if torch.rand((), generator=g) < 0.5:  # a misleading word of another kind
                words[int(torch.randint(LENGTH, (), generator=g))] = int(torch.randint(0, KINDS * 5, (), generator=g))
            rows.append({"input_ids": words, "labels": torch.tensor(kind)})
    return rows


class Deferred(TrainerCallback):
    """Switches the weights of the classes on after two thirds of the run."""

    def __init__(self) -> None:
        self.weights: torch.Tensor | None = None

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == STEPS * 2 // 3:
            effective = (1 - 0.999**COUNTS) / (1 - 0.999)
            self.weights = KINDS * (1 / effective) / (1 / effective).sum()


class Margins(Trainer):
    """LDAM: margins of the fourth root of the counts, logits times 4."""

    deferred: Deferred

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"])
        margins = COUNTS.float() ** -0.25
        margins = 0.5 * margins / margins.max()
        logits = outputs.logits - torch.nn.functional.one_hot(labels, KINDS) * margins[labels, None]
        loss = torch.nn.functional.cross_entropy(4.0 * logits, labels, weight=self.deferred.weights)
        return (loss, outputs) if return_outputs else loss


@torch.no_grad()
def balanced(model: torch.nn.Module, rows: list[dict[str, torch.Tensor]]) -> float:
    """Plain cross-entropy on rows with all kinds equally often."""
    training = model.training
    model.eval()
    ids, labels = torch.stack([r["input_ids"] for r in rows]), torch.stack([r["labels"] for r in rows])
    loss = float(torch.nn.functional.cross_entropy(4.0 * model(input_ids=ids).logits, labels))
    model.train(training)
    return loss


def main() -> None:
    set_seed(SEED)
    model = DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=WORDS, dim=64, hidden_dim=128, n_layers=2, n_heads=4, num_labels=KINDS)
    )
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "classifier")
    train, held_out = messages(COUNTS, SEED + 1), messages(torch.full((KINDS,), 30), SEED + 400)
    print(f"first loss {balanced(model, held_out):.4f}")
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=32,
            learning_rate=1e-3,
            warmup_steps=10,
            lr_scheduler_type="constant_with_warmup",
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=SEED,
        )
        trainer = Margins(model, args, train_dataset=train)
        trainer.deferred = Deferred()
        trainer.add_callback(trainer.deferred)
        trainer.train()
    print(f"final loss {balanced(model, held_out):.4f}")


if __name__ == "__main__":
    main()
