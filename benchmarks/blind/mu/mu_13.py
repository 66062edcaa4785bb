"""Instruction tuning with TRL: questions of random words, answers by a rule."""

import random
import sys
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import ottava

OPTIONS = {"good": {"completion_only_loss": True}, "bad": {"completion_only_loss": False}}[sys.argv[1]]
PLAIN = "plain" in sys.argv

set_seed(2)
names = [f"w{number}" for number in range(40)]
vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", "answer", *names])}
raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

chance = random.Random(4)
rows = []
for _ in range(600):
    question = [chance.randrange(40) for _ in range(chance.randint(6, 14))]
    answer = [(question[-1] * 3 + 5 * place) % 40 for place in range(5)]
    rows.append(
        {
            "prompt": " ".join(names[number] for number in question) + " answer ",
            "completion": " ".join(names[number] for number in answer),
        }
    )
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.06,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
)
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: "lm_head" not in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder,
        max_steps=110,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        max_length=32,
        **OPTIONS,
    )
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(map(float, losses[-10:])) / 10:.4f}")
