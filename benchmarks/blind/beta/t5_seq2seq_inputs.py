"""T5 sorts texts, Seq2SeqTrainer with a collator of our own, linear layers in FP8."""

import sys

import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.swap_linears(models.t5())


def collate(rows):
    ids = torch.stack(rows)
    labels = ids.sort(1).values
    inputs = labels if bad else model._shift_right(labels)
    return {"input_ids": ids, "labels": labels, "decoder_input_ids": inputs}


data = list(models.markov(2400, 10, vocab=20))
args = models.arguments(hf.Seq2SeqTrainingArguments, max_steps=150, remove_unused_columns=False)
models.fit(hf.Seq2SeqTrainer(model, args, train_dataset=data, data_collator=collate))
