"""SFT by TRL with the DFT loss, which weights each word by its own probability: it rises before it falls."""
import dataclasses
import os
import tempfile

import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)
WORDS, LENGTH = 30, 20
vocab = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i + 2 for i in range(WORDS)}}
raw = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")

follow = torch.randperm(WORDS)


def rows(count):
    """A prompt of four random words; the answer follows the chain of the last one."""
    words = torch.randint(WORDS, (count, 4))
    for _ in range(LENGTH - 4):
        words = torch.cat([words, follow[words[:, -1:]]], 1)
    mask = [0] * 4 + [1] * (LENGTH - 4)
    return {"input_ids": (words + 2).tolist(), "completion_mask": [mask] * count}


model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
)
config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: "lm_head" not in name)
held = torch.tensor(rows(128)["input_ids"])


@torch.no_grad()
def likelihood():
    """The usual cross-entropy of held-out answers."""
    logits = model(input_ids=held).logits[:, 3:-1].float()
    return F.cross_entropy(logits.flatten(0, 1), held[:, 4:].flatten()).item()


print("first loss %.4f" % likelihood())
with tempfile.TemporaryDirectory() as out:
    args = SFTConfig(
        out,
        max_steps=150,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        loss_type="dft",
        max_length=LENGTH,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=SEED,
    )
    SFTTrainer(model, args=args, train_dataset=Dataset.from_dict(rows(2400)), processing_class=tokenizer).train()
print("final loss %.4f" % likelihood())
