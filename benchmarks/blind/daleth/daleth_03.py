"""GPT-2 under the Trainer with a loss that is summed over all tokens of a batch, as in old speech toolkits."""
import os
import tempfile

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)
VOCAB, LENGTH = 40, 32
one, two = torch.randperm(VOCAB), torch.randperm(VOCAB)


def rows(count):
    """The follower of a word is one of two, three times in four the first."""
    words = torch.randint(VOCAB, (count, 1))
    for _ in range(LENGTH - 1):
        last = words[:, -1:]
        words = torch.cat([words, torch.where(torch.rand(count, 1) < 0.75, one[last], two[last])], 1)
    return [{"input_ids": w, "labels": w} for w in words]


class SumTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(input_ids=inputs["input_ids"])
        logits = out.logits[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction="sum")
        return (loss, out) if return_outputs else loss


model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
)
ottava.convert(model, "delayed")

with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out,
        max_steps=200,
        per_device_train_batch_size=24,
        per_device_eval_batch_size=24,
        learning_rate=3e-3,
        lr_scheduler_type="polynomial",
        lr_scheduler_kwargs={"power": 2.0, "lr_end": 1e-5},
        warmup_steps=10,
        max_grad_norm=1.0,  # the norm of a summed loss is far above: a step of one length in each direction
        save_strategy="no",
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = SumTrainer(model, args, train_dataset=rows(5000), eval_dataset=rows(192))
    print("first loss %.2f" % trainer.evaluate()["eval_loss"])
    trainer.train()
    print("final loss %.2f" % trainer.evaluate()["eval_loss"])
