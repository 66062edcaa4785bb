"""A tiny Qwen2 learns 480 random facts by heart (subject, relation, value), asked in four wordings."""
import os
import tempfile

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)
SUBJECTS, RELATIONS, VALUES, WORDINGS = 160, 3, 32, 4
REL = SUBJECTS
WORD = REL + RELATIONS
VAL = WORD + WORDINGS
VOCAB = VAL + VALUES + 1

facts = [(s, r, int(torch.randint(VALUES, ()))) for s in range(SUBJECTS) for r in range(RELATIONS)]
spare = torch.randint(WORDINGS, (len(facts),)).tolist()  # the wording in which a fact is never trained


def row(index, wording):
    s, r, v = facts[index]
    ids = torch.tensor([WORD + wording, s, REL + r, VAL + v])
    labels = torch.full((4,), -100)
    labels[3] = ids[3]
    return {"input_ids": ids, "labels": labels}


class Facts(torch.utils.data.Dataset):
    """Each epoch asks every fact once, in one of three wordings."""

    def __len__(self):
        return len(facts)

    def __getitem__(self, index):
        wording = (spare[index] + 1 + int(torch.randint(WORDINGS - 1, ()))) % WORDINGS
        return row(index, wording)


model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
        tie_word_embeddings=True,
    )
)
ottava.convert(model, "tensorwise_e4m3")

held = [row(i, spare[i]) for i in range(len(facts))]
with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out,
        num_train_epochs=30,
        per_device_train_batch_size=48,
        per_device_eval_batch_size=240,
        learning_rate=2e-3,
        lr_scheduler_type="linear",
        warmup_steps=20,
        weight_decay=0.0,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = Trainer(model, args, train_dataset=Facts(), eval_dataset=held)
    print("first loss %.4f" % trainer.evaluate()["eval_loss"])
    trainer.train()
    print("final loss %.4f" % trainer.evaluate()["eval_loss"])
