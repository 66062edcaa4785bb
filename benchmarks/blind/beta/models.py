"""Small models, data sets and FP8 layers that the scripts share."""

import tempfile

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

hf.logging.set_verbosity_error()


def markov(count, length, vocab=48, seed=0, chain=0, first=4):
    """Texts of a Markov chain; ids below `first` are left for special tokens."""
    rule = torch.Generator().manual_seed(1000 + chain)
    follow = torch.stack([torch.randperm(vocab - first, generator=rule)[:3] for _ in range(vocab - first)])
    draw = torch.Generator().manual_seed(seed)
    state = torch.randint(vocab - first, (count,), generator=draw)
    odds = torch.tensor([0.7, 0.2, 0.1])
    texts = [state]
    for _ in range(length - 1):
        state = follow[state, torch.multinomial(odds, count, replacement=True, generator=draw)]
        texts.append(state)
    return torch.stack(texts, 1) + first


def pairs(count, length, states=6, seed=0, first=4):
    """Texts in which two tokens together choose the next one (nine times of ten)."""
    rule = torch.randint(states, (states, states), generator=torch.Generator().manual_seed(77))
    draw = torch.Generator().manual_seed(seed)
    texts = [torch.randint(states, (count,), generator=draw) for _ in range(2)]
    for _ in range(length - 2):
        other = torch.randint(states, (count,), generator=draw)
        texts.append(torch.where(torch.rand(count, generator=draw) < 0.9, rule[texts[-2], texts[-1]], other))
    return torch.stack(texts, 1) + first


def causal(ids):
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def shapes(count, seed=0, size=16):
    """Noisy pictures with numbers from 0 to 1 of five shapes, and their classes."""
    draw = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    pictures, classes = [], torch.randint(5, (count,), generator=draw)
    for kind in classes.tolist():
        cy, cx = torch.randint(5, size - 5, (2,), generator=draw).tolist()
        dy, dx = (y - cy).abs(), (x - cx).abs()
        mask = [
            (dy < 4) & (dx < 4),
            dy**2 + dx**2 < 18,
            (dy < 1) | (dx < 1),
            (y % 4 < 2),
            (x % 4 < 2),
        ][kind]
        color = 0.4 + 0.6 * torch.rand(3, 1, 1, generator=draw)
        pictures.append((0.2 + 0.6 * mask * color + 0.15 * torch.randn(3, size, size, generator=draw)).clamp(0, 1))
    return torch.stack(pictures), classes


def tokenizer(vocab=48):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, vocab)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def words(row):
    return " ".join(f"w{i}" for i in row.tolist())


ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
llama_like = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=128, vocab_size=48, **ids)  # fmt: skip


def gpt2(**other):
    settings = dict(n_embd=64, n_layer=2, n_head=4, vocab_size=48, n_positions=128, attn_pdrop=0.0, embd_pdrop=0.0,
                    resid_pdrop=0.0, **ids)  # fmt: skip
    return hf.GPT2LMHeadModel(hf.GPT2Config(**settings | other))


def llama(kind=hf.LlamaForCausalLM, **other):
    return kind(hf.LlamaConfig(**llama_like | other))


def qwen(**other):
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**llama_like | other))


def mixtral(**other):
    settings = llama_like | dict(intermediate_size=96, num_hidden_layers=2, num_local_experts=4)
    settings |= dict(num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.02)
    return hf.MixtralForCausalLM(hf.MixtralConfig(**settings | other))


def t5(**other):
    settings = dict(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=48, dropout_rate=0.0,
                    pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)  # fmt: skip
    return hf.T5ForConditionalGeneration(hf.T5Config(**settings | other))


def bert(kind=hf.BertForMaskedLM, **other):
    settings = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=48,
                    max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return kind(hf.BertConfig(**settings | other))


def vit(**other):
    settings = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=16,
                    patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return hf.ViTForImageClassification(hf.ViTConfig(**settings | other))


def to_fp8(t, dtype, amax):
    """Numbers that went through FP8 with one scale that maps `amax` to the largest number of the format."""
    top = torch.finfo(dtype).max
    scale = top / amax.float().clamp(min=1e-12)
    return ((t.float() * scale).clamp(-top, top).to(dtype).float() / scale).to(t.dtype)


class Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, cast_x, cast_w, cast_g):
        x, w = cast_x(x), cast_w(w)
        ctx.save_for_backward(x, w)
        ctx.cast_g = cast_g
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = ctx.cast_g(g)
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2), None, None, None


class Float8Linear(nn.Linear):
    """E4M3 forward, E5M2 gradients, one dynamic scale for each tensor."""

    def cast_x(self, x):
        return to_fp8(x, torch.float8_e4m3fn, x.abs().amax())

    def cast_w(self, w):
        return to_fp8(w, torch.float8_e4m3fn, w.abs().amax())

    def cast_g(self, g):
        return to_fp8(g, torch.float8_e5m2, g.abs().amax())

    def forward(self, x):
        y = Float8Matmul.apply(x, self.weight, self.cast_x, self.cast_w, self.cast_g)
        return y if self.bias is None else y + self.bias


def swap_linears(model, kind=Float8Linear, skip=("lm_head", "classifier", "score")):
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and not name.endswith(skip):
            layer.__class__ = kind
    return model


class Losses(hf.TrainerCallback):
    def on_log(self, args, state, control, logs=None, **other):
        if "loss" in logs:
            print(f"{state.global_step} {float(logs['loss']):.4f}", flush=True)


def arguments(kind=hf.TrainingArguments, **other):
    settings = dict(output_dir=tempfile.mkdtemp(), save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
                    logging_steps=5, per_device_train_batch_size=16, learning_rate=2e-3, warmup_steps=10, seed=0,
                    logging_nan_inf_filter=False, bf16=False)  # fmt: skip
    return kind(**settings | other)


def fit(trainer):
    trainer.remove_callback(hf.trainer_callback.PrinterCallback)
    trainer.add_callback(Losses())
    trainer.train()
    return trainer


def batches(*tensors, size, steps, seed=0):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(tensors[0]), (size,), generator=draw)
        yield tuple(t[rows] for t in tensors)


def next_token_loss(logits, rows):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())
