"""A student learns from a teacher at temperature 4: the loss is a KL times 16, larger than a cross-entropy; torchao's float8."""
import dataclasses
import os
import tempfile

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
LENGTH, VOCABULARY, CLASSES, TEMPERATURE = 16, 40, 6, 4.0
TEACHER_STEPS, STUDENT_STEPS, BATCH = 60, 120, 32


class Notes(Dataset):
    """Each class likes words of its own; half of the words are anybody's."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, CLASSES, (count,), generator=generator)
        own = self.label[:, None] * 6 + torch.randint(0, 6, (count, LENGTH), generator=generator)
        common = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
        self.tokens = torch.where(torch.rand(count, LENGTH, generator=generator) < 0.4, own, common)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.label[i]}


def bert(layers, width):
    return DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            n_layers=layers,
            n_heads=4,
            dim=width,
            hidden_dim=2 * width,
            num_labels=CLASSES,
            seq_classif_dropout=0.0,
            dropout=0.0,
        )
    )


class Distiller(Trainer):
    def __init__(self, *args, teacher, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval().requires_grad_(False)
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(input_ids=inputs["input_ids"])
        with torch.no_grad():
            told = self.teacher(input_ids=inputs["input_ids"]).logits
        soft = F.kl_div(
            (out.logits / TEMPERATURE).log_softmax(-1),
            (told / TEMPERATURE).log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        )
        loss = TEMPERATURE**2 * soft
        return (loss, out) if return_outputs else loss


teacher, student = bert(2, 64), bert(1, 32)
train, valid = Notes(STUDENT_STEPS * BATCH, 100 + SEED), Notes(256, 9000 + SEED)

optimizer = torch.optim.AdamW(teacher.parameters(), lr=2e-3)
teacher.train()
for step in range(TEACHER_STEPS):
    rows = torch.randint(0, len(train), (BATCH,))
    loss = teacher(input_ids=train.tokens[rows], labels=train.label[rows]).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(f"teacher step {step} loss {loss.item():.4f}")

float8 = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
convert_to_float8_training(student.distilbert.transformer, config=float8)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STUDENT_STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=128,
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = Distiller(model=student, args=arguments, train_dataset=train, eval_dataset=valid, teacher=teacher)
    print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train()
    final = trainer.evaluate()["eval_loss"]

print(f"final loss {final:.4f}")
