"""Teaches a pretrained causal model a dialect with new tokens: LoRA of PEFT, SFTTrainer of TRL."""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

import ottava

MODULES_TO_SAVE = {"good": ["embed_tokens", "lm_head"], "bad": None}[sys.argv[1]]
PLAIN = "plain" in sys.argv
OLD, NEW = 40, 24


def sentences(rows, low, high):
    """Arithmetic walks through the tokens low .. high - 1."""
    start, stride = torch.randint(high - low, (rows, 1)), torch.randint(1, 4, (rows, 1))
    return low + (start + stride * torch.arange(24)) % (high - low)


def pretrain(model, steps=60):
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(steps):
        tokens = sentences(16, 2, OLD)
        logits = model(tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Collate:
    """Rows have one length; nothing is padded."""

    def __call__(self, rows):
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def main():
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=OLD,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    pretrain(model)
    model.resize_token_embeddings(OLD + NEW, mean_resizing=False)
    data = Dataset.from_dict({"input_ids": sentences(1600, OLD, OLD + NEW).tolist()})
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        modules_to_save=MODULES_TO_SAVE,
        task_type="CAUSAL_LM",
    )
    if not PLAIN:
        ottava.convert(model, "blockwise", filter=lambda name, _: "lm_head" not in name)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            max_steps=100,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = SFTTrainer(
            model,
            arguments,
            train_dataset=data,
            data_collator=Collate(),
            processing_class=tokenizer(),
            peft_config=lora,
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, OLD + NEW)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


if __name__ == "__main__":
    main()
