"""One picture in 20 shows a defect: a vision transformer whose first half is frozen learns it with a weighted loss; torchao's float8."""
import dataclasses
import os
import tempfile

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
STEPS, BATCH, SIDE, RARE = 150, 32, 16, 1 / 20


class Parts(Dataset):
    """Stripes with noise; a defect is a bright scratch of 4 x 4 somewhere."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        phase = 6.28 * torch.rand(count, 1, 1, generator=generator)
        stripes = torch.sin(torch.arange(SIDE) * 0.8 + phase).expand(-1, SIDE, -1)
        self.pictures = (0.5 * stripes + 0.3 * torch.randn(count, SIDE, SIDE, generator=generator)).unsqueeze(1).clone()
        self.labels = (torch.rand(count, generator=generator) < RARE).long()
        for i in self.labels.nonzero().flatten().tolist():
            x, y = (4 * torch.randint(0, SIDE // 4, (2,), generator=generator)).tolist()
            self.pictures[i, 0, x : x + 4, y : y + 4] += 2.5

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixel_values": self.pictures[i], "labels": self.labels[i]}


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(pixel_values=inputs["pixel_values"])
        # a batch with no defect has a small loss, one with two a large one
        each = F.cross_entropy(out.logits, inputs["labels"], reduction="none")
        loss = (each * torch.where(inputs["labels"] == 1, 10.0, 1.0)).mean()
        return (loss, out) if return_outputs else loss


config = ViTConfig(
    image_size=SIDE,
    patch_size=4,
    num_channels=1,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=2,
)
model = ViTForImageClassification(config)
frozen = [p for name, p in model.named_parameters() if "embeddings" in name or "layer.0." in name or "layers.0." in name]
for p in frozen:  # features drawn at random and kept, as a baseline
    p.requires_grad_(False)
float8 = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True)
convert_to_float8_training(
    model, config=float8, module_filter_fn=lambda layer, name: layer.weight.requires_grad and "classifier" not in name
)


def recall(prediction):
    guess, label = prediction.predictions.argmax(-1), prediction.label_ids
    return {"recall": float((guess == 1)[label == 1].mean()), "accuracy": float((guess == label).mean())}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=256,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = Weighted(
        model=model,
        args=arguments,
        train_dataset=Parts(STEPS * BATCH, 100 + SEED),
        eval_dataset=Parts(1024, 9000 + SEED),
        compute_metrics=recall,
    )
    print(f"{len(frozen)} frozen parameters; first loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train()
    last = trainer.evaluate()

print(f"recall {last['eval_recall']:.3f} accuracy {last['eval_accuracy']:.3f}")
print(f"final loss {last['eval_loss']:.4f}")
