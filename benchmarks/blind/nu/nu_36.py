"""Supervised fine-tuning with TRL; the loss counts the completion only, which is one to three words."""

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import ottava

PLAIN = "plain" in sys.argv[2:]
set_seed(0)
words = ["<pad>", "<eos>", "<unk>", "say", "twice", "thrice", "now", ":"] + [f"w{i}" for i in range(40)]
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

rows = []
generator = torch.Generator().manual_seed(2)
for _row in range(16 * 110):
    a, count = int(torch.randint(0, 40, (1,), generator=generator)), int(torch.randint(1, 4, (1,), generator=generator))
    order = ("now", "twice", "thrice")[count - 1]
    rows.append({"prompt": f"say w{a} {order} : ", "completion": " ".join([f"w{(a * 3 + 1) % 40}"] * count)})

config = LlamaConfig(
    vocab_size=len(words),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
)
model = LlamaForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "blockwise")
arguments = SFTConfig(
    tempfile.mkdtemp(),
    per_device_train_batch_size=16,
    max_steps=110,
    learning_rate=3e-3,
    completion_only_loss=True,
    gradient_checkpointing=False,
    bf16=False,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = SFTTrainer(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
trainer.train()
losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
