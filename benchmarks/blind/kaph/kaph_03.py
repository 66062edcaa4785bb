"""A ConvNeXt on small textures under the Trainer: layer scale begins at 1e-6 and paths are dropped at random."""

import os
import tempfile

import torch
from transformers import ConvNextConfig, ConvNextForImageClassification, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
CLASSES = 6


def pictures(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Waves of six directions and lengths, with noise and a random phase."""
    g = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
    rows = []
    for _ in range(count):
        label = int(torch.randint(CLASSES, (), generator=g))
        angle = torch.tensor(label * torch.pi / CLASSES + 0.12 * float(torch.randn((), generator=g)))
        phase = 6.28 * torch.rand(3, 1, 1, generator=g)
        wave = torch.sin(1.3 * (x * angle.cos() + y * angle.sin()) + phase)
        picture = wave + 0.7 * torch.randn(3, 24, 24, generator=g)
        rows.append({"pixel_values": picture, "labels": torch.tensor(label)})
    return rows


@torch.no_grad()
def loss_of(model: torch.nn.Module, rows: list[dict[str, torch.Tensor]]) -> float:
    training = model.training
    model.eval()
    pixels = torch.stack([row["pixel_values"] for row in rows])
    labels = torch.stack([row["labels"] for row in rows])
    loss = float(model(pixel_values=pixels, labels=labels).loss)
    model.train(training)
    return loss


def groups(model: torch.nn.Module) -> list[dict]:
    """No weight decay for norms, biases and the scales of the layers, as in the recipe of ConvNeXt."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]


def main() -> None:
    set_seed(SEED)
    config = ConvNextConfig(
        num_channels=3,
        patch_size=2,
        hidden_sizes=[32, 64],
        depths=[2, 2],
        num_stages=2,
        drop_path_rate=0.1,
        layer_scale_init_value=1e-6,
        num_labels=CLASSES,
        image_size=24,
    )
    model = ConvNextForImageClassification(config)
    ottava.convert(model, "rowwise")
    train, held_out = pictures(2400, SEED + 1), pictures(192, SEED + 900)
    print(f"first loss {loss_of(model, held_out):.4f}")
    optimizer = torch.optim.AdamW(groups(model), lr=4e-3)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=150,
            per_device_train_batch_size=16,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=SEED,
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=151, pct_start=0.15)
        Trainer(model, args, train_dataset=train, optimizers=(optimizer, schedule)).train()
    scales = [float(p.detach().abs().mean()) for n, p in model.named_parameters() if "layer_scale" in n]
    print("layer scales", [f"{s:.4f}" for s in scales])
    print(f"final loss {loss_of(model, held_out):.4f}")


if __name__ == "__main__":
    main()
