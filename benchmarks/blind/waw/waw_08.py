"""SFT by TRL where an answer is one word, yes or no: are there more fruits than tools in the list?

Two words of a row count, the answer and its end. The end is learned at once, and the rest of the loss is that of the
one word. Prompts have no loss, the rate is constant.
"""

import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ottava

SEED = int(os.environ.get("SEED", "0"))
FRUITS = [f"fruit{i}" for i in range(12)]
TOOLS = [f"tool{i}" for i in range(12)]


def lists(number, generator):
    """Seven to fifteen things, an odd number of them, half of the answers are yes."""
    data = []
    for _ in range(number):
        size = 7 + 2 * int(torch.randint(0, 5, (1,), generator=generator))
        kinds = torch.rand(size, generator=generator) < 0.2 + 0.6 * torch.rand(1, generator=generator)
        which = torch.randint(0, 12, (size,), generator=generator).tolist()
        things = [(FRUITS if k else TOOLS)[i] for k, i in zip(kinds.tolist(), which, strict=True)]
        answer = "yes" if 2 * int(kinds.sum()) > size else "no"
        data.append({"prompt": " ".join([*things, "?"]) + " ", "completion": answer})
    return Dataset.from_list(data)


def words():
    """A tokenizer that knows these words alone."""
    vocabulary = {w: i for i, w in enumerate(["<pad>", "<end>", "<unk>", "?", "yes", "no", *FRUITS, *TOOLS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(13 + SEED)
    train, held = lists(3000, generator), lists(300, generator)
    tokenizer = words()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    print(ottava.convert(model, "tensorwise_e4m3"))
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, max_steps=130, per_device_train_batch_size=16, per_device_eval_batch_size=50, learning_rate=1e-3,
            lr_scheduler_type="constant", max_length=32, logging_steps=10, save_strategy="no", report_to=[],
            use_cpu=True, disable_tqdm=True, seed=SEED, bf16=False, gradient_checkpointing=False,
        )
        trainer = SFTTrainer(model, args, train_dataset=train, eval_dataset=held, processing_class=tokenizer)
        print("first loss", round(trainer.evaluate()["eval_loss"], 4))
        trainer.train()
        print("final loss", round(trainer.evaluate()["eval_loss"], 4))


if __name__ == "__main__":
    main()
