"""ELECTRA's discriminator: which words of a row were replaced? One in twelve was."""
import dataclasses
import os
import tempfile

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import ElectraConfig, ElectraForPreTraining, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)
VOCAB, LENGTH = 24, 16
TOPICS = 3
topic_of = torch.randperm(VOCAB).view(TOPICS, VOCAB // TOPICS)


def rows(count):
    """Rows about one topic of eight words each, in which some words were replaced by any other."""
    topic = topic_of[torch.randint(TOPICS, (count,))]
    words = topic.gather(1, torch.randint(VOCAB // TOPICS, (count, LENGTH)))
    hit = torch.rand(count, LENGTH) < 0.125
    other = torch.randint(VOCAB, (count, LENGTH))
    hit &= (other[..., None] != topic[:, None]).all(-1)
    words = torch.where(hit, other, words)
    return [{"input_ids": w, "labels": h.long()} for w, h in zip(words, hit)]


model = ElectraForPreTraining(
    ElectraConfig(
        vocab_size=VOCAB,
        embedding_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        initializer_range=0.15,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
convert_to_float8_training(
    model, config=config, module_filter_fn=lambda layer, name: "encoder.layer" in name and layer.in_features % 16 == 0
)

with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out,
        max_steps=200,
        per_device_train_batch_size=24,
        per_device_eval_batch_size=64,
        learning_rate=1.5e-3,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=20,
        eval_strategy="steps",
        eval_steps=50,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = Trainer(model, args, train_dataset=rows(4000), eval_dataset=rows(192))
    print("first loss %.4f" % trainer.evaluate()["eval_loss"])
    trainer.train()
    print("final loss %.4f" % trainer.evaluate()["eval_loss"])
