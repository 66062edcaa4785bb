"""ViT on drawn bars, by the Trainer, linears in torchao's float8: python pi_02.py good|bad [plain]."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

WEIGHT_DECAY = {"good": 0.05, "bad": 50.0}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Bars(Dataset):
    def __init__(self, count=4000):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(16, (count,), generator=generator)
        self.images = 0.5 * torch.randn(count, 1, 16, 16, generator=generator)
        rows = torch.arange(count)
        for offset in range(2):
            vertical = self.labels < 8
            place = (self.labels % 8) * 2 + offset
            self.images[rows[vertical], 0, :, place[vertical]] += 0.8
            self.images[rows[~vertical], 0, place[~vertical], :] += 0.8

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixel_values": self.images[i], "labels": self.labels[i]}


set_seed(2)
model = ViTForImageClassification(
    ViTConfig(
        image_size=16,
        patch_size=4,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=16,
    )
)
if not PLAIN:
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "classifier" not in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=32,
        max_steps=120,
        learning_rate=2e-3,
        weight_decay=WEIGHT_DECAY,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Bars())
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
