"""SFT by TRL on completions alone: answers have 1 to 12 words, so the loss of a batch of 4 swings with the number of words that count."""
import os
import random
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import ottava

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
draw = random.Random(SEED)
STEPS, BATCH = 150, 4
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
ANIMALS = "cat dog bird fish horse mouse".split()
WORDS = ["<pad>", "</s>", "<unk>", "say", "times", "count", "to", "after", ":", *NUMBERS, *ANIMALS]


def example():
    task = draw.randrange(3)
    if task == 0:
        n, animal = draw.randint(1, 8), draw.choice(ANIMALS)
        return {"prompt": f"say {animal} {NUMBERS[n]} times :", "completion": " " + " ".join([animal] * n)}
    if task == 1:
        n = draw.randint(1, 11)
        return {"prompt": f"count to {NUMBERS[n]} :", "completion": " " + " ".join(NUMBERS[1 : n + 1])}
    n = draw.randrange(12)
    return {"prompt": f"after {NUMBERS[n]} :", "completion": " " + NUMBERS[n + 1]}


plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
plain.add_special_tokens(["<pad>", "</s>", "<unk>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")

config = LlamaConfig(
    vocab_size=len(WORDS) + (-len(WORDS)) % 16,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=32,
    initializer_range=0.05,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
)
model = LlamaForCausalLM(config)
print(ottava.convert(model, "rowwise_with_gw_hp", filter=lambda name, layer: ".layers." in name))

with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64,
        learning_rate=2e-3,
        lr_scheduler_type="linear",
        warmup_steps=10,
        completion_only_loss=True,
        max_length=32,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        seed=SEED,
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([example() for _ in range(STEPS * BATCH)]),
        eval_dataset=Dataset.from_list([example() for _ in range(128)]),
        processing_class=tokenizer,
    )
    print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train()
    final = trainer.evaluate()["eval_loss"]

print(f"final loss {final:.4f}")
