"""T5 reverses texts, Seq2SeqTrainer, delayed scaling with a margin."""

import sys

import ottava
import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.t5()
margin = -6 if bad else 1
ottava.convert(model, ottava.get_recipe("delayed", margin=margin, amax_history_len=16))
rows = models.markov(2400, 10)
data = [{"input_ids": row, "labels": row.flip(0)} for row in rows]
args = models.arguments(hf.Seq2SeqTrainingArguments, max_steps=150, learning_rate=3e-3)
models.fit(hf.Seq2SeqTrainer(model, args, train_dataset=data))
