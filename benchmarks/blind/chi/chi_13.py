"""TRL: supervised fine-tuning of a small Llama on prompts and answers, ottava's tensorwise recipe."""
import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, WORDS = 100, 16, 60
RATE = {"good": 2e-3, "bad": 6e-2}[MODE]


class Keep(SFTTrainer):
    losses = []

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def tokenizer():
    vocab = {f"w{i}": i for i in range(WORDS)} | {"<pad>": WORDS, "<eos>": WORDS + 1, "<unk>": WORDS + 2}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def conversations(n, g):
    """The answer repeats the question's words, each replaced by its translation."""
    translate = torch.randperm(WORDS, generator=g)
    rows = []
    for question in torch.randint(0, WORDS, (n, 6), generator=g):
        say = lambda ids: " ".join(f"w{int(i)}" for i in ids)
        rows.append({"prompt": say(question), "completion": " " + say(translate[question])})
    return Dataset.from_list(rows)


torch.manual_seed(SEED)
config = LlamaConfig(
    vocab_size=WORDS + 3, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.06
)
model = LlamaForCausalLM(config)
if not PLAIN:
    print(ottava.convert(model, "tensorwise"))
with tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        max_length=32,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=20,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
    )
    data = conversations(STEPS * BATCH, torch.Generator().manual_seed(220 + SEED))
    trainer = Keep(model, args, train_dataset=data, processing_class=tokenizer())
    trainer.train()
print("final loss", round(sum(trainer.losses[-15:]) / 15, 4))
