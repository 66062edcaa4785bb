"""DPO by TRL with a hinge: the loss begins at exactly 1, and a pair whose margin is wide enough gives no gradient at
all.

Late batches may have a loss of exactly 0. A short base training comes first, on good and bad answers alike.
"""

import copy
import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

SEED = int(os.environ.get("SEED", "0"))
NAMES = [f"n{i}" for i in range(16)]
POLITE = [f"p{i}" for i in range(6)]
RUDE = [f"r{i}" for i in range(6)]


def draw(words, number, generator):
    return [words[i] for i in torch.randint(0, len(words), (number,), generator=generator).tolist()]


def pairs(number, generator):
    """The good answer is as polite as the bad one is rude; both repeat a name of the prompt."""
    data = []
    for _ in range(number):
        asked = draw(NAMES, 4, generator)
        size = int(torch.randint(2, 6, (1,), generator=generator))
        good = [asked[0], *draw(POLITE, size, generator)]
        bad = [asked[0], *draw(RUDE, int(torch.randint(1, 3, (1,), generator=generator)), generator)]
        bad += draw(POLITE, 2, generator)
        text = {"prompt": " ".join([*asked, "?"]) + " ", "chosen": " ".join(good), "rejected": " ".join(bad)}
        data.append(text)
    return data


def words():
    vocabulary = {w: i for i, w in enumerate(["<pad>", "<end>", "<unk>", "?", *NAMES, *POLITE, *RUDE])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")


def pretrain(model, tokenizer, data):
    """Both kinds of answers, equally often."""
    texts = [d["prompt"] + d[kind] + " <end>" for d in data for kind in ("chosen", "rejected")]
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model.train()
    for step in range(60):
        chosen = [texts[i] for i in torch.randint(0, len(texts), (24,)).tolist()]
        batch = tokenizer(chosen, return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print("base", step, round(loss.item(), 4))


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(31 + SEED)
    train, held = pairs(1500, generator), pairs(200, generator)
    tokenizer = words()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )
    model = GPT2LMHeadModel(config)
    pretrain(model, tokenizer, train)
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            folder, max_steps=80, per_device_train_batch_size=12, per_device_eval_batch_size=50, learning_rate=2e-4,
            loss_type="hinge", beta=0.2, lr_scheduler_type="constant", max_length=32, logging_steps=10,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=SEED, bf16=False,
            gradient_checkpointing=False,
        )
        trainer = DPOTrainer(
            model, ref_model=copy.deepcopy(model), args=args, train_dataset=Dataset.from_list(train), eval_dataset=Dataset.from_list(held),
            processing_class=tokenizer,
        )
        print("first loss", round(trainer.evaluate()["eval_loss"], 4))
        trainer.train()
        print("final loss", round(trainer.evaluate()["eval_loss"], 4))


if __name__ == "__main__":
    main()
