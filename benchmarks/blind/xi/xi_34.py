"""Preferences between two endings: DPO of TRL with LoRA adapters of PEFT on a tiny model."""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

import ottava

PLAIN = "plain" in sys.argv
WORDS = 60


def tokenizer():
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1} | {f"w{i}": i + 2 for i in range(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def pairs(rows):
    def text(x):
        return " ".join(f"w{i}" for i in x)

    table = {"prompt": [], "chosen": [], "rejected": []}
    for _ in range(rows):
        prompt = torch.randint(WORDS, (8,))
        good = (prompt[:4] + 7) % WORDS
        bad = torch.randint(WORDS, (4,))
        if torch.rand(()) < 0.15:
            good, bad = bad, good
        table["prompt"].append(text(prompt.tolist()))
        table["chosen"].append(" " + text(good.tolist()))
        table["rejected"].append(" " + text(bad.tolist()))
    return Dataset.from_dict(table)


def main():
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS + 2,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    if not PLAIN:
        ottava.convert(model, "tensorwise", filter=lambda name, _: "lm_head" not in name)
    lora = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            folder,
            max_steps=60,
            per_device_train_batch_size=8,
            learning_rate=5e-3,
            beta=0.5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            gradient_checkpointing=False,
        )
        trainer = DPOTrainer(
            model, args=arguments, train_dataset=pairs(480), processing_class=tokenizer(), peft_config=lora
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
