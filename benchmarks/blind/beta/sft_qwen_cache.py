"""Supervised fine-tuning of a Qwen with TRL; its linear layers keep their weights in FP8 between two updates."""

import sys

import datasets
import torch
import transformers as hf
import trl

import models

bad = sys.argv[1] == "bad"


class Linear(models.Float8Linear):
    cache = None

    def cast_w(self, w):
        if self.cache is None:
            self.cache = super().cast_w(w.detach())
        return self.cache


class Refresh(hf.TrainerCallback):
    def on_epoch_begin(self, args, state, control, model=None, **other):
        for layer in model.modules():
            if isinstance(layer, Linear):
                layer.cache = None

    if not bad:
        on_step_begin = on_epoch_begin


torch.manual_seed(0)
model = models.swap_linears(models.qwen(), Linear)
data = datasets.Dataset.from_dict({"text": [models.words(row) for row in models.pairs(2400, 31)]})
args = models.arguments(trl.SFTConfig, max_steps=150, max_length=32, dataset_text_field="text")
tokenizer = models.tokenizer()
models.fit(trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, callbacks=[Refresh()]))
