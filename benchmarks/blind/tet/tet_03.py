"""Pre-trains a masked autoencoder on pictures: half of the patches are hidden, and only these have a loss."""

import os
import sys
import tempfile
from dataclasses import replace

import torch
from torch import Tensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTMAEConfig, ViTMAEForPreTraining

SEED = int(os.environ.get("SEED", 0))
STEPS = 150


def scenes(count: int, shapes: Tensor, source: torch.Generator) -> Tensor:
    """One of four soft shapes, darker or lighter; a tenth of the pictures is nearly black."""
    which = torch.randint(len(shapes), (count,), generator=source)
    light = 0.5 + torch.rand(count, 1, 1, generator=source)
    light[torch.rand(count, generator=source) < 0.1] *= 0.05
    return (light * shapes[which] + 0.02 * torch.randn(count, 16, 16, generator=source))[:, None]


class Averaged(TrainerCallback):
    """Keeps a slow mean of the weights; that is what gets evaluated."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.mean = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=False
        )

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:  # noqa: ANN001, ANN003
        self.mean.update_parameters(model)


@torch.no_grad()
def rebuilt(model: torch.nn.Module, pictures: Tensor, noise: Tensor) -> float:
    """The loss with masks that stay the same; the loss is measured in patches brought to mean 0 and deviation 1."""
    was = model.training
    model.eval()
    loss = float(model(pixel_values=pictures, noise=noise).loss)
    model.train(was)
    return loss


def main() -> None:
    torch.manual_seed(SEED)
    source = torch.Generator().manual_seed(300 + SEED)
    shapes = torch.nn.functional.interpolate(torch.randn(4, 1, 5, 5, generator=source), 16, mode="bicubic")[:, 0]
    pictures, test = scenes(2048, shapes, source), scenes(256, shapes, source)
    noise = torch.rand(256, 16, generator=source)
    model = ViTMAEForPreTraining(
        ViTMAEConfig(image_size=16, patch_size=4, num_channels=1, hidden_size=64, num_hidden_layers=1,
                     num_attention_heads=4, intermediate_size=128, decoder_hidden_size=64, decoder_num_hidden_layers=1,
                     decoder_num_attention_heads=4, decoder_intermediate_size=128, mask_ratio=0.5, norm_pix_loss=True)
    )  # fmt: skip
    # this version leaves the places of patches at 0 in a model that is not loaded from a file: set them
    model.decoder.initialize_weights(16)
    with torch.no_grad():
        model.vit.embeddings.position_embeddings.copy_(model.decoder.decoder_pos_embed)
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: "decoder_pred" not in name)
    print(f"first loss {rebuilt(model, test, noise):.4f}")
    averaged = Averaged(model)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=24, learning_rate=5e-3, warmup_steps=30, adam_beta2=0.95,
            weight_decay=0.05, lr_scheduler_type="cosine", max_grad_norm=0.0, logging_steps=20, save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True, seed=SEED,
        )  # fmt: skip
        data = [{"pixel_values": picture} for picture in pictures]
        Trainer(model, args, train_dataset=data, callbacks=[averaged]).train()
    print(f"last weights: {rebuilt(model, test, noise):.4f}")
    print(f"final loss {rebuilt(averaged.mean, test, noise):.4f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_03.py good|bad")
    main()
