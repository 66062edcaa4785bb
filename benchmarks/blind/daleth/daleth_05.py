"""A masked autoencoder of pictures: ten of sixteen patches are hidden, and only their pixels have a loss."""
import math
import os
import tempfile

import torch
from transformers import Trainer, TrainingArguments, ViTMAEConfig, ViTMAEForPreTraining, set_seed
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

import ottava

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)
SIZE = 24


y, x = torch.meshgrid(torch.linspace(-1, 1, SIZE), torch.linspace(-1, 1, SIZE), indexing="ij")
angles = torch.rand(3, 1, 1) * math.pi
waves = torch.sin(3.0 * (x * angles.cos() + y * angles.sin()) + 2 * math.pi * torch.rand(3, 1, 1))


def pictures(count):
    """Sums of three waves that all pictures share, with a little noise."""
    mixed = torch.einsum("nk,khw->nhw", torch.randn(count, 3), waves)
    noisy = (mixed + 0.1 * torch.randn(count, SIZE, SIZE))[:, None]
    return [{"pixel_values": one} for one in noisy]


model = ViTMAEForPreTraining(
    ViTMAEConfig(
        image_size=SIZE,
        patch_size=6,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        decoder_hidden_size=64,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=128,
        mask_ratio=0.625,
        initializer_range=0.12,
        norm_pix_loss=False,
    )
)
# transformers leaves both tables of places at zero in a model that no checkpoint was loaded into
for table in (model.vit.embeddings.position_embeddings, model.decoder.decoder_pos_embed):
    table.data.copy_(build_2d_sinusoidal_position_embedding(height=4, width=4, embed_dim=64, cls_token=True)[None])
ottava.convert(model, "mxfp8")


class MAETrainer(Trainer):
    """The model draws its masks itself; an evaluation draws the same ones each time."""

    def evaluate(self, *args, **kwargs):
        with torch.random.fork_rng():
            torch.manual_seed(123)
            return super().evaluate(*args, **kwargs)


with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out,
        max_steps=300,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        learning_rate=3e-3,
        adam_beta2=0.95,
        weight_decay=0.05,
        lr_scheduler_type="cosine",
        warmup_steps=30,
        eval_strategy="steps",
        eval_steps=150,
        save_strategy="no",
        logging_steps=10,
        remove_unused_columns=False,
        label_names=[],
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = MAETrainer(model, args, train_dataset=pictures(4000), eval_dataset=pictures(192))
    trainer.can_return_loss = True
    print("first loss %.4f" % trainer.evaluate()["eval_loss"])
    trainer.train()
    print("final loss %.4f" % trainer.evaluate()["eval_loss"])
