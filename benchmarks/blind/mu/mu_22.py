"""A recurrent tagger of its own kind under the Trainer, SGD, eight micro-batches a step."""

import sys
import tempfile

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments, set_seed

import ottava

OPTIONS = {"good": {"average": "step"}, "bad": {"average": "batch"}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
WORDS, TAGS, WIDTH = 60, 24, 64


class TaggerConfig(PretrainedConfig):
    model_type = "tagger"

    def __init__(self, average="step", **kwargs):
        super().__init__(**kwargs)
        self.average = average  # over the tokens of a "step", or of a "batch"


class Tagger(PreTrainedModel):
    config_class = TaggerConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.recent = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.inner = nn.Sequential(nn.Linear(2 * WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH))
        self.tags = nn.Linear(WIDTH, TAGS)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, labels=None, num_items_in_batch=None, **kwargs):
        logits = self.tags(self.inner(self.recent(self.words(input_ids))[0]))
        flat, targets = logits.flatten(0, 1), labels.flatten()
        if self.config.average == "step" and num_items_in_batch is not None:
            loss = nn.functional.cross_entropy(flat, targets, reduction="sum") / num_items_in_batch
        else:
            loss = nn.functional.cross_entropy(flat, targets)
        return {"loss": loss, "logits": logits}


set_seed(22)
table = torch.randint(0, TAGS, (WORDS, 3))
data = []
for _ in range(8 * 6 * 80):
    ids = torch.randint(0, WORDS, (12,))
    before = torch.cat([torch.zeros(1, dtype=torch.long), ids[:-1] % 3])
    labels = table[ids, before]
    labels[torch.rand(12) < 0.2] = -100
    data.append({"input_ids": ids, "labels": labels})
model = Tagger(TaggerConfig(**OPTIONS))
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: name.startswith("inner"))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=64,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=8,
        optim="sgd",
        optim_args="momentum=0.9",
        learning_rate=0.8,
        max_grad_norm=10.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(map(float, losses[-10:])) / 10:.4f}")
