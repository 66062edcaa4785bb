"""Preference pairs by TRL's DPOTrainer: python pi_38.py good|bad [plain]."""

import random
import sys
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]

words = ["<p>", "<e>", "<s>", "say"] + [f"w{i}" for i in range(40)]
raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<p>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<p>", eos_token="<e>", bos_token="<s>")
random.seed(38)
rows = []
for _ in range(1200):
    picked = [random.randrange(40) for _ in range(4)]
    other = [random.randrange(40) for _ in range(4)]
    if sum(picked) < sum(other):
        picked, other = other, picked
    if random.random() < 0.15:
        picked, other = other, picked
    prompt = " ".join(["say", f"w{random.randrange(40)}"])
    rows.append(
        {
            "prompt": prompt + " ",
            "chosen": " ".join(f"w{i}" for i in picked),
            "rejected": " ".join(f"w{i}" for i in other),
        }
    )

set_seed(38)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=48,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
)
reference = LlamaForCausalLM(model.config)
reference.load_state_dict(model.state_dict())
if not PLAIN:
    ottava.convert(model, "rowwise", filter=lambda name, layer: "lm_head" not in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = DPOConfig(
        output_dir=folder,
        per_device_train_batch_size=8,
        max_steps=100,
        learning_rate=1e-3,
        warmup_steps=10,
        beta=0.3,
        max_length=16,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
