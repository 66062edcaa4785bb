"""A run in two parts: the first stops at step 60 of 120 with a checkpoint, a second Trainer goes on; nearly every step is clipped to 0.05."""
import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", 0))
STEPS, STOP, BATCH, LENGTH, VOCABULARY = 120, 60, 16, 28, 48


class Answers(Dataset):
    """A short row, a mark, and an answer that counts up in threes from the first word; the loss is over the answer alone."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        half = (LENGTH - 2) // 2
        # every other word follows from the one before
        row = torch.randint(2, VOCABULARY, (count, half), generator=generator)
        row[:, 1::2] = (row[:, ::2][:, : half // 2] * 7) % (VOCABULARY - 2) + 2
        mark = torch.ones(count, 1, dtype=torch.long)
        follow = (torch.arange(half) * 3 + row[:, :1]) % (VOCABULARY - 2) + 2
        self.rows = torch.cat([row, mark, follow, mark], 1)
        self.labels = self.rows.clone()
        self.labels[:, : half + 1] = -100

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.labels[i]}


class StopAt(TrainerCallback):
    """The queue of a cluster takes the machine away."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STOP:
            control.should_training_stop = True


def build():
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    ottava.convert(model, "mxfp8", filter=lambda name, layer: ".mlp." in name)
    return model


def trainer(folder, callbacks):
    set_seed(SEED)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=128,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_grad_norm=0.05,
        logging_steps=5,
        save_strategy="steps",
        save_steps=STOP,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    data = Answers(STEPS * BATCH, 100 + SEED), Answers(128, 9000 + SEED)
    return Trainer(model=build(), args=arguments, train_dataset=data[0], eval_dataset=data[1], callbacks=callbacks)


with tempfile.TemporaryDirectory() as folder:
    first = trainer(folder, [StopAt()])
    print(f"first loss {first.evaluate()['eval_loss']:.4f}")
    first.train()
    print(f"stopped at step {first.state.global_step}")
    second = trainer(folder, [])
    second.train(resume_from_checkpoint=os.path.join(folder, f"checkpoint-{STOP}"))
    final = second.evaluate()["eval_loss"]

print(f"final loss {final:.4f}")
