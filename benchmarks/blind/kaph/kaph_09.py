"""TRL's SFT of a model that knows the language already: only the form of answers is new, so the loss falls by little.

What counts is the share of answers, written greedily, that do not end with the mark of the wanted form.
"""

import os
import tempfile

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, END, ASK, CLOSE = 50, 1, 2, 3
LENGTH = 14


def chains(count: int, seed: int, start: torch.Tensor | None = None) -> torch.Tensor:
    """Each word has four equally likely followers."""
    table = torch.randint(4, WORDS, (WORDS, 4), generator=torch.Generator().manual_seed(12))
    g = torch.Generator().manual_seed(seed)
    words = [torch.randint(4, WORDS, (count,), generator=g) if start is None else start]
    for _ in range(LENGTH - 1):
        words.append(table[words[-1], torch.randint(4, (count,), generator=g)])
    return torch.stack(words, 1)


def dialogues(count: int, seed: int) -> Dataset:
    """A prompt of five words, then eight words that go on, the closing mark and the end."""
    text = chains(count, seed)
    prompt, answer = text[:, :5], text[:, 5:13]
    ask, close = torch.full((count, 1), ASK), torch.tensor([[CLOSE, END]]).expand(count, 2)
    ids = torch.cat([prompt, ask, answer, close], 1)
    mask = torch.cat([torch.zeros(count, 6), torch.ones(count, 10)], 1).long()
    return Dataset.from_dict({"input_ids": ids.tolist(), "completion_mask": mask.tolist()})


def pretrain(model: LlamaForCausalLM) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    for step in range(130):
        text = chains(32, SEED * 999 + step)
        model(input_ids=text, labels=text).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def bad_form(model: LlamaForCausalLM) -> float:
    """The share of answers without the mark and the end in their places."""
    training = model.training
    model.eval()
    ids = torch.cat([chains(128, SEED + 71)[:, :5], torch.full((128, 1), ASK)], 1)
    for _ in range(10):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    model.train(training)
    good = (ids[:, 14] == CLOSE) & (ids[:, 15] == END) & (ids[:, 6:14] > CLOSE).all(1)
    return 1.0 - float(good.float().mean())


def tokenizer():
    """A tokenizer of numbers, which TRL wants for its padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


def main() -> None:
    set_seed(SEED)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=0, eos_token_id=END, bos_token_id=None, **sizes))
    pretrain(model)
    ottava.convert(model, "blockwise_fp32")
    print(f"first loss {bad_form(model):.4f}")
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder,
            max_steps=120,
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            max_length=32,
            completion_only_loss=True,
            gradient_checkpointing=False,
            bf16=False,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=SEED,
        )
        trainer = SFTTrainer(
            model, args, train_dataset=dialogues(16 * 120, SEED + 1), processing_class=tokenizer()
        )
        trainer.train()
    print(f"final loss {bad_form(model):.4f}")


if __name__ == "__main__":
    main()
