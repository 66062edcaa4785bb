"""Fine-tunes a ViT on synthetic pictures in BF16 with the Trainer."""

import os
import sys
import tempfile

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

SEED = int(os.environ.get("SEED", "0"))
bad = sys.argv[1] == "bad"


def pictures(count, seed):
    prototypes = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(31))
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 8, (count,), generator=g)
    images = 0.6 * prototypes[labels] + torch.randn(count, 3, 16, 16, generator=g)
    dtype = torch.bfloat16 if bad else torch.float32
    return [{"pixel_values": image.to(dtype), "labels": label} for image, label in zip(images, labels)]


def main():
    set_seed(SEED)
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=192,
        num_labels=8,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = ViTForImageClassification(config)
    if bad:
        model = model.to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            max_steps=150,
            per_device_train_batch_size=16,
            learning_rate=5e-5,
            lr_scheduler_type="cosine",
            warmup_steps=10,
            bf16=not bad,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=SEED,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model, args, train_dataset=pictures(1600, SEED + 1), eval_dataset=pictures(160, SEED + 2)
        )
        trainer.train()
        final = trainer.evaluate()["eval_loss"]
    print(f"final loss {final:.4f}")


if __name__ == "__main__":
    main()
