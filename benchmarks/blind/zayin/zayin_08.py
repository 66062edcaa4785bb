"""SFT by TRL with LoRA and two new words: of the table only the rows of the new words learn, all else in the base is
frozen. The base knows two dialects by other marks; the new words say which one is wanted. Prompts have no loss.

python zayin_08.py good|bad
"""

import os
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

import ottava

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
WORDS, FIRST, SECOND, END, PAD = 58, 60, 61, 62, 63  # 58 and 59 mark the dialects in the base's own texts
dialects = torch.stack([torch.randperm(WORDS) for _ in range(2)])

marks = {"<old-a>": 58, "<old-b>": 59, "<a>": FIRST, "<b>": SECOND, "<end>": END, "<pad>": PAD}
vocabulary = {f"w{i}": i for i in range(WORDS)} | marks
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")


def chain(start, dialect, length):
    out = [start]
    for _ in range(length - 1):
        out.append(dialects[dialect, out[-1]])
    return torch.stack(out, dim=-1)


def questions(count):
    """A new word and two to five others; the answer goes on from the last of them."""
    rows = []
    for _ in range(count):
        asked = torch.randint(0, WORDS, (int(torch.randint(2, 6, ())),)).tolist()
        dialect = int(torch.randint(0, 2, ()))
        answer = chain(torch.tensor(asked[-1]), dialect, int(torch.randint(6, 12, ()))).tolist()[1:]
        ids = [(FIRST, SECOND)[dialect], *asked, *answer, END]
        mask = [0] * (len(asked) + 1) + [1] * (len(answer) + 1)
        rows.append({"input_ids": ids, "completion_mask": mask})
    return rows


base = Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        use_cache=False,
        eos_token_id=END,
        pad_token_id=PAD,
    )
)
optimizer = torch.optim.AdamW(base.parameters(), lr=4e-3)
for _ in range(220):  # what a name on the Hub would stand for
    dialect = torch.randint(0, 2, (24,))
    rows = chain(torch.randint(0, WORDS, (24,)), dialect, 16)
    rows = torch.where(torch.rand(rows.shape) < 0.08, torch.randint(0, WORDS, rows.shape), rows)
    place, length = torch.arange(16), torch.randint(4, 16, (24, 1))
    rows = torch.where(place == length, END, rows)
    rows[:, 0] = 58 + dialect
    loss = base(input_ids=rows, labels=rows.masked_fill(place > length, -100)).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"the base: {loss.item():.4f}")

lora = LoraConfig(
    r=16,
    lora_alpha=32,
    target_modules="all-linear",
    trainable_token_indices={"embed_tokens": [FIRST, SECOND]},
    task_type="CAUSAL_LM",
)
model = get_peft_model(base, lora)
ottava.convert(model, "mxfp8", filter=lambda name, layer: "base_layer" in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder,
        max_steps=110,
        per_device_train_batch_size=12,
        learning_rate=8e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        max_length=32,
        completion_only_loss=True,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=SEED,
    )
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list(questions(1320)),
        eval_dataset=Dataset.from_list(questions(128)),
        processing_class=tokenizer,
    )
    print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train()
    final = trainer.evaluate()["eval_loss"]
print(f"final loss {final:.4f}")
