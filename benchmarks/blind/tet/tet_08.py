"""RLOO with TRL: eight answers to a prompt are compared with each other, and the loss lies around 0 all along."""

import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import RLOOConfig, RLOOTrainer

SEED = int(os.environ.get("SEED", 0))
WORDS = ["<pad>", "<eos>", *(f"w{n}" for n in range(30))]
LENGTH = 6


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """The share of words of the same kind (odd or even) as the prompt's last word."""
    points = []
    for prompt, completion in zip(prompts, completions, strict=True):
        kind = int(prompt.split()[-1][1:]) % 2
        words = [int(word[1:]) for word in completion.split() if word.startswith("w")]
        points.append(sum(word % 2 == kind for word in words) / LENGTH)
    return points


@torch.no_grad()
def mean_reward(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> float:
    was = model.training
    model.eval()
    words = torch.tensor([tokenizer(prompt)["input_ids"] for prompt in prompts])
    for _ in range(LENGTH):
        chances = model(input_ids=words).logits[:, -1].softmax(-1)
        words = torch.cat([words, torch.multinomial(chances, 1)], 1)
    model.train(was)
    completions = tokenizer.batch_decode(words[:, 2:], skip_special_tokens=True)
    points = reward(prompts, completions)
    return sum(points) / len(points)


def main() -> None:
    torch.manual_seed(SEED)
    source = torch.Generator().manual_seed(800 + SEED)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                    max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    )  # fmt: skip
    numbers = torch.randint(30, (400, 2), generator=source).tolist()
    prompts = [f"w{one} w{other}" for one, other in numbers]
    test, prompts = prompts[:120], prompts[120:]
    print(f"first loss {-mean_reward(model, tokenizer, test):.4f}")
    with tempfile.TemporaryDirectory() as folder:
        args = RLOOConfig(
            folder, num_generations=8, max_completion_length=LENGTH, per_device_train_batch_size=64, max_steps=110,
            learning_rate=5e-3, lr_scheduler_type="constant", beta=0.0, temperature=1.0, max_grad_norm=1.0, bf16=False,
            logging_steps=5, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=SEED,
            activation_checkpointing=False,
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": prompts})
        trainer = RLOOTrainer(model, reward, args=args, train_dataset=data, processing_class=tokenizer)
        trainer.train()
    for line in trainer.state.log_history[:-1:3]:
        print("step {}: loss {:.4f}, reward {:.3f}".format(line["step"], float(line["loss"]), float(line["reward"])))
    print(f"final loss {-mean_reward(model, tokenizer, test):.4f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_08.py good|bad")
    main()
