"""DPO by TRL: the loss begins at ln 2 exactly, as model and reference are one, and the rewards of both answers may fall while their gap grows."""
import os
import random
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
draw = random.Random(SEED)
FIRST_STEPS, STEPS, BATCH = 80, 80, 8
DISHES = "soup bread rice fish cake tea salad pie".split()
KIND, RUDE = "lovely fresh warm splendid".split(), "awful stale cold dreadful".split()
WORDS = ["<pad>", "</s>", "<unk>", "how", "is", "the", "it", "and", "?", *DISHES, *KIND, *RUDE]


def answer(words):
    return " it is " + " and ".join(draw.sample(words, 2))


def pair():
    """Nine of ten raters like the kind answer better."""
    kind, rude = answer(KIND), answer(RUDE)
    if draw.random() < 0.1:
        kind, rude = rude, kind
    return {"prompt": f"how is the {draw.choice(DISHES)} ?", "chosen": kind, "rejected": rude}


plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
plain.add_special_tokens(["<pad>", "</s>", "<unk>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(WORDS) + (-len(WORDS)) % 8,
            n_positions=16,
            n_embd=48,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


model = gpt2()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(FIRST_STEPS):  # the model that is aligned then: kind and rude in equal parts
    texts = [f"how is the {draw.choice(DISHES)} ?" + answer(draw.choice([KIND, RUDE])) + " </s>" for _ in range(32)]
    tokens = tokenizer(texts, return_tensors="pt")["input_ids"]
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"first stage, step {step} loss {loss.item():.4f}")

reference = gpt2()
reference.load_state_dict(model.state_dict())
with tempfile.TemporaryDirectory() as folder:
    arguments = DPOConfig(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64,
        learning_rate=6e-4,
        lr_scheduler_type="linear",
        warmup_steps=10,
        beta=0.2,
        max_length=16,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=SEED,
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=Dataset.from_list([pair() for _ in range(STEPS * BATCH)]),
        eval_dataset=Dataset.from_list([pair() for _ in range(128)]),
        processing_class=tokenizer,
    )
    print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train()
    final = trainer.evaluate()["eval_loss"]

print(f"final loss {final:.4f}")
