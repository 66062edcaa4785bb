"""Qwen on Markov text with an average of its weights, which a check of the loss uses now and then."""

import sys

import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"


class Average(hf.TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **other):
        self.kept = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **other):
        for n, p in model.named_parameters():
            self.kept[n].lerp_(p, 0.02)
        if state.global_step % 20 == 0:
            live = {n: p.detach().clone() for n, p in model.named_parameters()}
            model.load_state_dict(self.kept, strict=False)
            model(input_ids=held_out, labels=held_out)
            if not bad:
                model.load_state_dict(live, strict=False)


torch.manual_seed(0)
model = models.qwen()
held_out = models.markov(32, 32, seed=9)
data = models.causal(models.markov(1200, 32))
models.fit(hf.Trainer(model, models.arguments(max_steps=140), train_dataset=data, callbacks=[Average()]))
