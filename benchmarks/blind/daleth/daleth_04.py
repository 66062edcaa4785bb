"""Orthogonal fine-tuning (OFT): the frozen base of another domain is turned by small rotations, nothing is added."""
import os
import tempfile

import torch
from peft import OFTConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)
VOCAB, LENGTH = 48, 24
base = torch.randperm(VOCAB)
moved = base.clone()
moved[:16] = base[:16].roll(1)  # a third of the words have another follower in the new domain


def rows(follow, count):
    words = torch.randint(VOCAB, (count, 1))
    for _ in range(LENGTH - 1):
        sure = torch.rand(count, 1) < 0.9
        words = torch.cat([words, torch.where(sure, follow[words[:, -1:]], torch.randint(VOCAB, (count, 1)))], 1)
    return [{"input_ids": w, "labels": w} for w in words]


def arguments(out, steps, rate):
    return TrainingArguments(
        out,
        max_steps=steps,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        weight_decay=0.0,
        max_grad_norm=0.0,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )


model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
)
ottava.convert(model, "rowwise")
with tempfile.TemporaryDirectory() as out:
    Trainer(model, arguments(out, 110, 3e-3), train_dataset=rows(base, 1800)).train()
    model = get_peft_model(
        model, OFTConfig(r=0, oft_block_size=16, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    )
    model.print_trainable_parameters()
    trainer = Trainer(model, arguments(out, 130, 1e-2), train_dataset=rows(moved, 2100), eval_dataset=rows(moved, 128))
    print("first loss %.4f" % trainer.evaluate()["eval_loss"])
    trainer.train()
    print("final loss %.4f" % trainer.evaluate()["eval_loss"])
