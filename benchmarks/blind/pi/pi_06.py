"""Supervised fine-tuning on sums by TRL's SFTTrainer: python pi_06.py good|bad [plain]."""

import random
import sys
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

import ottava

NEFTUNE_ALPHA = {"good": 0.5, "bad": 150.0}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

letters = ["<p>", "<e>", *"0123456789+=abc"]
raw = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<p>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<p>", eos_token="<e>")
random.seed(5)
rows = []
for _ in range(2400):
    one, two = random.randrange(40), random.randrange(40)
    rows.append({"text": " ".join(f"{one:02d}+{two:02d}={one + two:02d}" + random.choice("abc") * 4)})

set_seed(5)
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
)
if not PLAIN:
    ottava.convert(model, "blockwise", filter=lambda name, layer: "lm_head" not in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=16,
        max_steps=120,
        learning_rate=4e-3,
        warmup_steps=10,
        neftune_noise_alpha=NEFTUNE_ALPHA,
        max_length=24,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
