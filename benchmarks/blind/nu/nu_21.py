"""A model of our own in the Trainer, with gradient accumulation and SGD."""

import sys
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments, set_seed

import ottava

ACCEPTS_LOSS_KWARGS = {"good": False, "bad": True}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class TinyConfig(PretrainedConfig):
    model_type = "tiny-window"


class Tiny(PreTrainedModel):
    config_class = TinyConfig
    accepts_loss_kwargs = ACCEPTS_LOSS_KWARGS

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(40, 32)
        self.body = nn.Sequential(nn.Linear(96, 192), nn.Tanh(), nn.Linear(192, 192), nn.Tanh())
        self.head = nn.Linear(192, 40)
        self.history = []
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.head(self.body(self.embed(input_ids).flatten(1)))
        loss = F.cross_entropy(logits, labels)
        self.history.append(loss.item())
        return {"loss": loss, "logits": logits}


class Windows(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(3)
        self.x = torch.randint(0, 40, (16 * 16 * 100, 3), generator=g)
        noise = torch.rand(len(self.x), generator=g) < 0.2
        self.y = torch.where(noise, self.x[:, 0], (self.x[:, 1] * 7 + 3) % 40)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"input_ids": self.x[index], "labels": self.y[index]}


set_seed(0)
model = Tiny(TinyConfig())
if not PLAIN:
    ottava.convert(model, "tensorwise")
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=16,
    gradient_accumulation_steps=16,
    max_steps=100,
    optim="sgd",
    optim_args="momentum=0.9",
    learning_rate=0.15,
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Windows())
trainer.train()
print(f"loss {sum(model.history[-160:]) / 160:.4f}")
