"""Supervised fine-tuning with LoRA: TRL's SFTTrainer and PEFT on a tiny Llama."""

import os
import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
WORDS = [f"w{i}" for i in range(60)]


def tokenizer():
    vocab = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def sentences(count, seed):
    table = (torch.randn(60, 60, generator=torch.Generator().manual_seed(25)) * 2.5).softmax(-1)
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 60, (count, 1), generator=g)
    for _ in range(23):
        ids = torch.cat([ids, torch.multinomial(table[ids[:, -1]], 1, generator=g)], 1)
    return Dataset.from_list([{"text": " ".join(WORDS[i] for i in row)} for row in ids.tolist()])


def main():
    set_seed(SEED)
    words = tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    lora = LoraConfig(
        r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        target_modules="all-linear",
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    with tempfile.TemporaryDirectory() as out:
        args = SFTConfig(
            output_dir=out,
            max_steps=120,
            per_device_train_batch_size=16,
            learning_rate=4e-3,
            warmup_steps=10,
            max_length=32,
            gradient_checkpointing=False,
            bf16=False,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=SEED,
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model, args=args, train_dataset=sentences(1920, SEED + 1), processing_class=words, peft_config=lora
        )
        trainer.train()
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    print(f"final loss {sum(losses[-4:]) / 4:.4f}")


if __name__ == "__main__":
    main()
