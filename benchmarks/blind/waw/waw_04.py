"""Speech-like rows for a tiny Whisper: log-mel pictures to phones under the Trainer.

Rows have three to eight phones, what follows is silence at -11, far from the mean of the rest. Labels behind the end
do not count.
"""

import os
import tempfile

import torch
from transformers import Trainer, TrainingArguments, WhisperConfig, WhisperForConditionalGeneration

import ottava

SEED = int(os.environ.get("SEED", "0"))
PHONES, MELS, FRAMES = 20, 16, 64  # a phone takes 8 frames; words 0 to 3 are pad, begin, end and spare


def speech(number, prototypes, generator):
    """Each phone is a spectrum that glides into the next, with its own loudness and noise."""
    rows = []
    for _ in range(number):
        size = int(torch.randint(3, 9, (1,), generator=generator))
        phones = torch.randint(0, PHONES, (size,), generator=generator)
        picture = torch.full((MELS, FRAMES), -11.0)
        sound = prototypes[phones].repeat_interleave(8, 0).T  # MELS x frames
        loud = 1 + 0.2 * torch.randn(1, generator=generator)
        picture[:, : size * 8] = -4 + loud * sound + 0.5 * torch.randn(MELS, size * 8, generator=generator)
        labels = torch.full((9,), -100)
        labels[:size] = phones + 4
        labels[size] = 2
        rows.append({"input_features": picture / 4 + 1, "labels": labels})
    return rows


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(11 + SEED)
    prototypes = 2 * torch.randn(PHONES, MELS, generator=generator)
    train, held = speech(3000, prototypes, generator), speech(300, prototypes, generator)
    config = WhisperConfig(
        vocab_size=PHONES + 4, num_mel_bins=MELS, d_model=64, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_source_positions=FRAMES // 2, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, begin_suppress_tokens=None, dropout=0.0, init_std=0.08,
    )
    model = WhisperForConditionalGeneration(config)
    print(ottava.convert(model, "mxfp8"))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=240, per_device_train_batch_size=16, learning_rate=2e-3,
            per_device_eval_batch_size=100, lr_scheduler_type="cosine", warmup_steps=15, logging_steps=15,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=SEED, adam_beta2=0.98,
        )
        trainer = Trainer(model, args, train_dataset=train, eval_dataset=held)
        print("first loss", round(trainer.evaluate()["eval_loss"], 4))
        trainer.train()
        print("final loss", round(trainer.evaluate()["eval_loss"], 4))


if __name__ == "__main__":
    main()
