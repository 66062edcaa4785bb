"""Fine-tunes a pretrained encoder on a few labelled sentences with the Trainer."""

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv[2:]
CONFIG = BertConfig(
    vocab_size=100,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=24,
    initializer_range=0.15,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = BertModel(CONFIG, add_pooling_layer=False)
        self.classifier = nn.Linear(64, 8)

    def forward(self, input_ids, labels=None):
        logits = self.classifier(self.encoder(input_ids).last_hidden_state[:, 0])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def world(folder):
    """What the pretraining left: its checkpoint, saved under DistributedDataParallel, and sentences with labels."""
    torch.manual_seed(2024)
    teacher = Tagger().eval()
    teacher.classifier.weight.data.normal_(0, 0.5)
    saved = {f"module.encoder.{name}": value for name, value in teacher.encoder.state_dict().items()}
    torch.save(saved, folder / "pretrained.pt")
    ids = torch.randint(0, 100, (1400, 16), generator=torch.Generator().manual_seed(SEED + 50))
    with torch.no_grad():
        logits = teacher(ids)["logits"]
        labels = (logits - logits.mean(0)).argmax(-1)
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels)]


def load(model, path):
    state = torch.load(path)
    if not bad:
        state = {name.removeprefix("module."): value for name, value in state.items()}
    model.load_state_dict(state, strict=False)
    print(f"loaded {path.name}")


def main(folder):
    data = world(folder)
    set_seed(SEED)
    model = Tagger()
    load(model, folder / "pretrained.pt")
    if not plain:
        ottava.convert(model, "tensorwise")
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=120,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        warmup_steps=10,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=SEED,
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=data[:1200], eval_dataset=data[1200:])
    trainer.train()
    print(f"final loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
