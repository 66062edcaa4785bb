"""Answers as spans: where does the answer begin, where does it end? Three questions in ten have none and point to
place 0.

DistilBERT under the Trainer, with delayed scales. The loss is a mean over the two ends; for a while the network only
knows "place 0".
"""

import os
import tempfile

import torch
from transformers import DistilBertConfig, DistilBertForQuestionAnswering, Trainer, TrainingArguments

import ottava
from ottava.doors.transformers import OttavaConfig

SEED = int(os.environ.get("SEED", "0"))
KINDS, LENGTH, WORDS = 6, 28, 64  # words 1 to 6 ask, 7 to 12 mark an answer, 13 to 15 begin answers of 1 to 3 words


def questions(number, generator):
    """[place 0] [question] then the text, in which markers of other kinds stand, too."""
    data = []
    for _ in range(number):
        row = torch.randint(16, WORDS, (LENGTH,), generator=generator)
        kinds = torch.randperm(KINDS, generator=generator)[:3].tolist()
        spots = [4, 12, 20]
        start = end = 0
        asked = kinds[0] if torch.rand(1, generator=generator) > 0.3 else (set(range(KINDS)) - set(kinds)).pop()
        shuffled = torch.randperm(3, generator=generator).tolist()
        for kind, spot in zip(kinds, [spots[i] for i in shuffled], strict=True):
            spot += int(torch.randint(0, 4, (1,), generator=generator))
            size = int(torch.randint(1, 4, (1,), generator=generator))
            row[spot], row[spot + 1] = 7 + kind, 12 + size
            if kind == asked:
                start, end = spot + 1, spot + size
        row[0], row[1] = 0, 1 + asked
        data.append({"input_ids": row, "start_positions": start, "end_positions": end})
    return data


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(40 + SEED)
    train, held = questions(4000, generator), questions(400, generator)
    config = DistilBertConfig(
        vocab_size=WORDS, dim=64, hidden_dim=128, n_layers=2, n_heads=4, max_position_embeddings=LENGTH, dropout=0.0,
        attention_dropout=0.0, qa_dropout=0.0, initializer_range=0.08,
    )
    model = DistilBertForQuestionAnswering(config)
    print(OttavaConfig("delayed").convert(model))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=300, per_device_train_batch_size=32, per_device_eval_batch_size=200, learning_rate=3e-3,
            lr_scheduler_type="linear", warmup_steps=30, logging_steps=30, save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True, seed=SEED, max_grad_norm=1.0,
        )
        trainer = Trainer(model, args, train_dataset=train, eval_dataset=held)
        trainer.label_names = ["start_positions", "end_positions"]
        print("first loss", round(trainer.evaluate()["eval_loss"], 4))
        trainer.train()
        ottava.assert_fp8(model, min_fraction=0.5)
        said = trainer.predict(held)
    right = (torch.tensor(said.predictions[0]).argmax(-1) == torch.tensor(said.label_ids[0])).float().mean().item()
    print("right starts", round(right, 3))
    print("final loss", round(said.metrics["test_loss"], 4))


if __name__ == "__main__":
    main()
