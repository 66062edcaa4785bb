"""TRL's SFTTrainer on short records in packed rows."""

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ottava

STRATEGY = {"good": "bfd", "bad": "wrapped"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(17)
KEYS, WORDS = 6, 24
vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
for n in range(WORDS):
    vocabulary[f"w{n}"] = len(vocabulary)
for n in range(KEYS):
    vocabulary[f"k{n}"] = len(vocabulary)
engine = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
engine.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=engine, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

grammars = torch.stack([torch.randperm(WORDS) for _ in range(KEYS)])


def record(index):
    g = torch.Generator().manual_seed(index)
    key = int(torch.randint(KEYS, (1,), generator=g))
    words = torch.randint(0, WORDS, (int(torch.randint(24, 30, (1,), generator=g)),), generator=g).tolist()
    new = torch.rand(len(words), generator=g) < 0.12
    for t in range(1, len(words)):
        if not new[t]:
            words[t] = int(grammars[key, words[t - 1]])
    return " ".join([f"k{key}"] + [f"w{n}" for n in words])


data = Dataset.from_dict({"text": [record(i) for i in range(1600)]})
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=1,
)
model = LlamaForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "tensorwise")
with tempfile.TemporaryDirectory() as out:
    args = SFTConfig(
        out,
        packing=True,
        packing_strategy=STRATEGY,
        max_length=32,
        per_device_train_batch_size=12,
        max_steps=130,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
