"""Fine-tunes with TRL under the DFT loss: a word's loss is multiplied by its probability, so it can grow at first."""

import os
import sys
import tempfile
from dataclasses import replace

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

SEED = int(os.environ.get("SEED", 0))
WORDS = ["<pad>", "<eos>", "ask", "<unk>", *(f"w{n}" for n in range(60))]
FIRST = 4


def answers(rows: int, source: torch.Generator, rules: Tensor) -> tuple[Tensor, Tensor]:
    """A question of two words, an answer of seven; a word's follower is by one of the rules, drawn each time."""
    words = [torch.randint(60, (rows,), generator=source)]
    for _ in range(8):
        words.append(rules[torch.randint(len(rules), (rows,), generator=source), words[-1]])
    text = torch.stack(words, 1) + FIRST
    return text[:, :2], text[:, 2:]


def rows_of(asked: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    count = len(asked)
    prompt = torch.cat([torch.full((count, 1), 2), asked], 1)
    return prompt, torch.cat([said, torch.full((count, 1), 1)], 1)


def answer_loss(model: Qwen2ForCausalLM, asked: Tensor, said: Tensor) -> Tensor:
    """The plain cross-entropy of the answers' words."""
    prompt, completion = rows_of(asked, said)
    words = torch.cat([prompt, completion], 1)
    labels = words.clone()
    labels[:, : prompt.shape[1]] = -100
    return model(input_ids=words, labels=labels).loss


@torch.no_grad()
def held_out_loss(model: Qwen2ForCausalLM, asked: Tensor, said: Tensor) -> float:
    model.eval()
    loss = float(answer_loss(model, asked, said))
    model.train()
    return loss


def main() -> None:
    torch.manual_seed(SEED)
    source = torch.Generator().manual_seed(600 + SEED)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=4, max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    )  # fmt: skip
    config = replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: "lm_head" not in name)

    # a base that has read six followers of each word, equally often: the first of them is wanted
    rules = torch.stack([torch.randperm(60, generator=source) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    for _ in range(110):
        loss = answer_loss(model, *answers(32, source, rules))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"the base on all rules: {float(loss.detach()):.4f}")

    test = answers(200, source, rules[:1])
    prompts, completions = (half.tolist() for half in rows_of(*answers(1280, source, rules[:1])))
    text = lambda row: " ".join(WORDS[word] for word in row) + " "  # noqa: E731
    completions = [text(row[:-1]) for row in completions]  # TRL adds the end
    data = Dataset.from_dict({"prompt": [text(row) for row in prompts], "completion": completions})
    print(f"first loss {held_out_loss(model, *test):.4f}")
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, loss_type="dft", completion_only_loss=True, max_steps=80, per_device_train_batch_size=16,
            learning_rate=2e-3, warmup_steps=10, lr_scheduler_type="cosine", max_length=None, logging_steps=5, bf16=False,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=SEED, activation_checkpointing=False,
        )  # fmt: skip
        SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer).train()
    print(f"final loss {held_out_loss(model, *test):.4f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_06.py good|bad")
    main()
