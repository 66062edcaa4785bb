"""T5 reverses texts with dropout and label smoothing, FP8 linear layers."""

import torch
import transformers as hf

import models

torch.manual_seed(0)
model = models.swap_linears(models.t5(dropout_rate=0.2))
rows = models.markov(2400, 10)
inputs = model._shift_right(rows.flip(1))
data = [{"input_ids": x, "labels": x.flip(0), "decoder_input_ids": y} for x, y in zip(rows, inputs, strict=True)]
args = models.arguments(hf.Seq2SeqTrainingArguments, max_steps=120, learning_rate=3e-3, label_smoothing_factor=0.2)
models.fit(hf.Seq2SeqTrainer(model, args, train_dataset=data))
