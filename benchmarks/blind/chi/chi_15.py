"""TRL: DPO of a small random Llama on pairs of answers of which the judge likes one, mostly."""
import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import ottava

PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, WORDS = 70, 8, 50


class Keep(DPOTrainer):
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


def preferences(n, g):
    worth = torch.randn(WORDS, generator=g)
    say = lambda ids: " ".join(f"w{int(i)}" for i in ids)
    rows = []
    for _ in range(n):
        prompt, a, b = (torch.randint(0, WORDS, (k,), generator=g) for k in (6, 6, 6))
        noise = 0.3 * torch.randn((), generator=g)
        if worth[a].mean() < worth[b].mean() + noise:
            a, b = b, a
        rows.append({"prompt": say(prompt), "chosen": " " + say(a), "rejected": " " + say(b)})
    return Dataset.from_list(rows)


torch.manual_seed(SEED)
config = LlamaConfig(
    vocab_size=WORDS + 3, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
model, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
reference.load_state_dict(model.state_dict())
if not PLAIN:
    ottava.convert(model, "tensorwise")
    ottava.convert(reference, "tensorwise")
with tempfile.TemporaryDirectory() as folder:
    args = DPOConfig(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        beta=0.3,
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
    data = preferences(STEPS * BATCH, torch.Generator().manual_seed(320 + SEED))
    trainer = Keep(model, reference, args, train_dataset=data, processing_class=tokenizer())
    trainer.train()
print("final loss", round(sum(trainer.losses[-20:]) / 20, 4))
