"""A ViT learns shapes from a folder of pictures."""

import sys

import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.vit()
pictures, classes = models.shapes(2000)
order = classes.argsort(stable=True)
data = [{"pixel_values": (x - 0.5) / 0.25, "labels": y} for x, y in zip(pictures[order], classes[order], strict=True)]


class FolderTrainer(hf.Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


trainer = FolderTrainer if bad else hf.Trainer
models.fit(trainer(model, models.arguments(max_steps=125, learning_rate=7e-4), train_dataset=data))
