"""Models for set F: small, randomly initialized ones of Hugging Face's transformers; LoRA of peft.

A batch is what a data collator makes: token ids, an attention mask, labels as long as the ids, -100 where the loss must
not look. The loss is the one that transformers itself uses for the model. Imports transformers when a model is made, so
that the other halves run without it.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from models import MODELS
from torch import Tensor, nn

WIDTH, HEADS, WORDS, LENGTH, ROWS, TOPICS, MELS = 64, 4, 96, 24, 12, 8, 16
PAD, BOS, EOS, UNKNOWN, FIRST = 0, 1, 2, 3, 4
"""Special tokens, then the first word."""
IGNORED = -100


def missing() -> str:
    """A sentence if a package is missing that set F needs, or ""."""
    absent = [name for name in ("transformers", "peft") if find_spec(name) is None]
    return f"Half F needs {' and '.join(absent)}: pip install {' '.join(absent)}. It ran nothing." if absent else ""


_DECODER = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range": 0.08,
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
_BERT = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "num_labels": TOPICS,
    "initializer_range": 0.08,
}
_GPT2 = {
    "vocab_size": WORDS,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": HEADS,
    "n_positions": 64,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range": 0.08,
}
_T5 = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "d_ff": 160,
    "d_kv": 16,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": HEADS,
    "decoder_start_token_id": PAD,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
}
_SWITCH = {"num_experts": 4, "expert_capacity": 64, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
_WHISPER = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 160,
    "decoder_ffn_dim": 160,
    "num_mel_bins": MELS,
    "max_source_positions": 24,
    "max_target_positions": 64,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "decoder_start_token_id": BOS,
    "init_std": 0.08,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_VIT = {
    "hidden_size": WIDTH,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "num_labels": TOPICS,
    "initializer_range": 0.08,
}
_MAMBA = {"vocab_size": WORDS, "hidden_size": WIDTH, "state_size": 8, "num_hidden_layers": 2, "pad_token_id": PAD}


def made(model: str, config: str, **settings: Any) -> Any:
    """A model by the names of its classes, in training mode."""
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    net: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return net.train()


def lora() -> Any:
    """A frozen Llama with adapters of rank 8; its head is trained in full."""
    peft: Any = import_module("peft")
    settings = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"], task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(made("LlamaForCausalLM", "LlamaConfig", **_DECODER), settings)


# --- batches ----------------------------------------------------------------------------------------------------------
def text(generator: torch.Generator, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Ids of documents of different lengths, and their attention mask. A word decides the next one in 9 of 10 cases."""
    follower = torch.randperm(WORDS - FIRST, generator=torch.Generator().manual_seed(5))
    words = [torch.randint(0, WORDS - FIRST, (rows,), generator=generator)]
    for _ in range(LENGTH - 1):
        surprise = torch.randint(0, WORDS - FIRST, (rows,), generator=generator)
        words.append(torch.where(torch.rand(rows, generator=generator) < 0.9, follower[words[-1]], surprise))
    ids = torch.stack(words, 1) + FIRST
    ids[:, 0] = BOS
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=generator)
    place = torch.arange(LENGTH)
    ids = torch.where(place == lengths - 1, EOS, torch.where(place < lengths, ids, PAD))
    return ids, (place < lengths).long()


def documents(generator: torch.Generator) -> list[Tensor]:
    """For a causal language model: ids, mask, labels, which are the ids; the model's loss shifts them."""
    ids, mask = text(generator)
    return [ids, mask, ids.masked_fill(mask == 0, IGNORED)]


def packed(generator: torch.Generator) -> list[Tensor]:
    """The same without a mask: full rows, as packing makes them."""
    ids, _ = text(generator, 2 * ROWS)
    ids = ids[ids != PAD][: ROWS * LENGTH].view(ROWS, LENGTH)
    return [ids, ids.clone()]


def topics(generator: torch.Generator) -> list[Tensor]:
    """For a classifier: ids, mask, the topic that most of the words are from."""
    ids, mask = text(generator, 2 * ROWS)
    labels = torch.randint(0, TOPICS, (2 * ROWS,), generator=generator)
    words = FIRST + 11 * labels[:, None] + torch.randint(0, 11, ids.shape, generator=generator)
    changed = (torch.rand(ids.shape, generator=generator) < 0.9) & (ids >= FIRST)
    return [torch.where(changed, words, ids), mask, labels]


def translations(generator: torch.Generator) -> list[Tensor]:
    """For an encoder with a decoder: ids, mask, labels moved right by one, labels. The target is another alphabet."""
    ids, mask = text(generator)
    alphabet = torch.randperm(WORDS - FIRST, generator=torch.Generator().manual_seed(6)) + FIRST
    target = torch.where(ids >= FIRST, alphabet[(ids - FIRST).clamp(min=0)], ids)
    return [ids, mask, F.pad(target[:, :-1], (1, 0), value=PAD), target.masked_fill(mask == 0, IGNORED)]


def speech(generator: torch.Generator) -> list[Tensor]:
    """Log-mel features, no mask for them, labels moved right by one, labels. Two frames say a word."""
    ids, mask = text(generator)
    voice = torch.randn(WORDS, MELS, generator=torch.Generator().manual_seed(7))
    sound = voice[ids].repeat_interleave(2, 1).transpose(1, 2)
    sound = sound + 0.3 * torch.randn(sound.shape, generator=generator)
    target = ids.masked_fill(mask == 0, IGNORED)
    return [sound, torch.ones(ROWS, 2 * LENGTH), F.pad(ids[:, :-1], (1, 0), value=BOS), target]


def pictures(generator: torch.Generator) -> list[Tensor]:
    """Noisy templates and their class."""
    labels = torch.randint(0, TOPICS, (2 * ROWS,), generator=generator)
    templates = torch.randn(TOPICS, 3, 16, 16, generator=torch.Generator().manual_seed(8))
    return [templates[labels] + 0.7 * torch.randn(2 * ROWS, 3, 16, 16, generator=generator), labels]


# --- losses -----------------------------------------------------------------------------------------------------------
def shifted(y: Any, labels: Tensor) -> Tensor:
    """The loss of causal language models: token i predicts label i + 1."""
    logits: Tensor = y.logits
    loss: Tensor = import_module("transformers.loss.loss_utils").ForCausalLMLoss(logits, labels, logits.shape[-1])
    return loss


def aligned(y: Any, labels: Tensor) -> Tensor:
    """The loss of decoders whose inputs are moved already, and of classifiers."""
    return F.cross_entropy(y.logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


MODELS |= {
    "hf_llama": (partial(made, "LlamaForCausalLM", "LlamaConfig", **_DECODER), documents, shifted),
    "hf_llama_tied": (
        partial(made, "LlamaForCausalLM", "LlamaConfig", **_DECODER, tie_word_embeddings=True), documents, shifted,
    ),
    "hf_mixtral": (
        partial(made, "MixtralForCausalLM", "MixtralConfig", **_DECODER, num_local_experts=4), documents, shifted,
    ),
    "hf_qwen3moe": (
        partial(made, "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_DECODER, **_EXPERTS), documents, shifted,
    ),
    "hf_mamba": (partial(made, "MambaForCausalLM", "MambaConfig", **_MAMBA), packed, shifted),
    "hf_gpt2": (
        partial(made, "GPT2LMHeadModel", "GPT2Config", **_GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        packed, shifted,
    ),
    "hf_gpt2_dropout": (partial(made, "GPT2LMHeadModel", "GPT2Config", **_GPT2), packed, shifted),
    "hf_bert": (
        partial(made, "BertForSequenceClassification", "BertConfig", **_BERT, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0), topics, aligned,
    ),
    "hf_t5": (
        partial(made, "T5ForConditionalGeneration", "T5Config", **_T5, dropout_rate=0.0), translations, aligned,
    ),
    "hf_switch": (
        partial(made, "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", **_T5, **_SWITCH,
                dropout_rate=0.0), translations, aligned,
    ),
    "hf_whisper": (partial(made, "WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER), speech, aligned),
    "hf_vit": (partial(made, "ViTForImageClassification", "ViTConfig", **_VIT), pictures, aligned),
    "hf_lora": (lora, documents, shifted),
}  # fmt: skip
