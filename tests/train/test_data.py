"""The text: what is read, how it is split, and which bytes a step sees."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from ottava.base.settings import ConfigError
from ottava.train.config import DataConfig, load_config
from ottava.train.data import ByteCorpus, DataError, DeviceError, find_device, refuse_oversized
from ottava.train.model import ByteTransformer


def text_of(part: torch.Tensor) -> bytes:
    return part.numpy().tobytes()


@pytest.fixture(scope="module")
def library() -> ByteCorpus:
    return ByteCorpus.load(DataConfig(max_bytes=1_000_000))


def test_standard_library_is_text_that_holds_out_whole_files(library: ByteCorpus) -> None:
    total = len(library.train) + len(library.validation)
    assert total == 1_000_000
    assert 0.02 < len(library.validation) / total < 0.1
    assert "whole files held out" in library.source
    text_of(library.validation)[:1000].decode()


def test_batch_depends_on_seed_and_step_only(library: ByteCorpus) -> None:
    def batch(seed: int, step: int) -> torch.Tensor:
        return library.batch(seed=seed, step=step, batch_size=4, length=32)[0]

    first = batch(0, 1)
    torch.rand(1000)
    assert torch.equal(batch(0, 1), first)
    # 2**32: a generator that keeps 32 bits of (seed << 32) + step would repeat seed 0 here
    for seed, step in ((0, 2), (1, 1), (2**32, 1), (2**62, 1)):
        assert not torch.equal(batch(seed, step), first)


def test_every_window_of_the_text_can_be_drawn(tmp_path: Path) -> None:
    """20 bytes, 1 held out: 19 to train on, so windows of 16 + 1 start at 0, 1 and 2."""
    file = tmp_path / "text"
    file.write_bytes(bytes(range(1, 21)))
    corpus = ByteCorpus.load(DataConfig(path=file))
    inputs, _ = corpus.batch(seed=0, step=1, batch_size=100, length=16)
    assert sorted({int(row[0]) for row in inputs}) == [1, 2, 3]


def test_validation_batches_reach_from_the_first_to_the_last_byte(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(i % 251 for i in range(2000)))
    corpus = ByteCorpus.load(DataConfig(path=file, validation_fraction=0.1))
    batches = list(corpus.validation_batches(batches=3, batch_size=4, length=16))
    assert [inputs.shape for inputs, _ in batches] == [(4, 16)] * 3
    held_out = corpus.validation.long()
    assert torch.equal(batches[0][0][0], held_out[:16])
    assert torch.equal(batches[-1][1][-1], held_out[-16:])


def test_single_file_holds_out_its_tail(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"a" * 900 + b"b" * 100)
    corpus = ByteCorpus.load(DataConfig(path=file, validation_fraction=0.1))
    assert (text_of(corpus.train), text_of(corpus.validation)) == (b"a" * 900, b"b" * 100)


def test_folder_holds_out_every_nth_file_and_skips_what_is_no_text(tmp_path: Path) -> None:
    for index in range(1, 9):
        (tmp_path / f"{index}.txt").write_bytes(bytes([64 + index]) * 10)
    (tmp_path / ".hidden").write_bytes(b"hidden")
    (tmp_path / "binary").write_bytes(b"\x00\x01")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"secret")
    corpus = ByteCorpus.load(DataConfig(path=tmp_path, validation_fraction=0.25))
    assert text_of(corpus.validation) == b"D" * 10 + b"H" * 10
    assert text_of(corpus.train) == b"".join(letter * 10 for letter in (b"A", b"B", b"C", b"E", b"F", b"G"))


def test_folder_whose_held_out_files_would_be_tiny_holds_out_the_tail(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"a" * 990)
    (tmp_path / "2").write_bytes(b"b" * 10)
    corpus = ByteCorpus.load(DataConfig(path=tmp_path, validation_fraction=0.5))
    assert len(corpus.validation) == 500
    assert "last 500 bytes" in corpus.source


def test_file_asked_for_by_name_may_hold_any_bytes(tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(bytes(100))
    assert len(ByteCorpus.load(DataConfig(path=file)).train) == 95


def test_cap_is_exact_and_said(tmp_path: Path) -> None:
    for index in range(4):
        (tmp_path / str(index)).write_bytes(b"x" * 100)
    corpus = ByteCorpus.load(DataConfig(path=tmp_path, max_bytes=250, validation_fraction=0.1))
    assert len(corpus.train) + len(corpus.validation) == 250
    assert "cut at 250 bytes" in corpus.source


def test_digest_sees_a_changed_byte_and_a_changed_split(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"abcdefgh" * 10)
    digest = ByteCorpus.load(DataConfig(path=file)).digest()
    assert ByteCorpus.load(DataConfig(path=file)).digest() == digest
    assert ByteCorpus.load(DataConfig(path=file, validation_fraction=0.5)).digest() != digest
    file.write_bytes(b"abcdefgh" * 9 + b"abcdefgH")
    assert ByteCorpus.load(DataConfig(path=file)).digest() != digest


def test_missing_empty_and_short_text_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none: does not exist"):
        ByteCorpus.load(DataConfig(path=tmp_path / "none"))
    with pytest.raises(DataError, match="holds no text"):
        ByteCorpus.load(DataConfig(path=tmp_path))
    file = tmp_path / "a"
    file.write_bytes(b"x")
    corpus = ByteCorpus.load(DataConfig(path=file))
    with pytest.raises(DataError, match="training part has 0 bytes, but a sequence needs 9"):
        corpus.require(8)
    file.write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="validation part has 5 bytes"):
        ByteCorpus.load(DataConfig(path=file)).require(8)
    ByteCorpus.load(DataConfig(path=file)).require(4)


def test_folder_without_rights_is_no_empty_one() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are for their owner alone
        closed = Path(folder, "closed")
        closed.mkdir(0)
        os.chmod(folder, 0o755)
        was = os.geteuid()
        try:
            os.seteuid(was or 65534)  # root may read everything
            with pytest.raises(DataError, match=r"closed: cannot be read \(Permission denied\)"):
                ByteCorpus.load(DataConfig(path=closed))
        finally:
            os.seteuid(was)


@pytest.mark.parametrize(
    "setting",
    ["batch_size=1000000000000", "sequence_length=1000000000000", "evaluation.batches=1000000000000"]
    + ["model.layers=1000000000000", "model={d_model: 1000000000000}", "model.ffn=1000000000000"],
)
def test_what_no_machine_holds_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"need more than [\d,]+ GB of memory; cpu has"):
        refuse_oversized(load_config(None, [setting]), torch.device("cpu"))


def test_defaults_fit_anywhere_and_parameters_are_counted_as_they_are() -> None:
    for settings in ([], ["model={d_model: 96, layers: 3, heads: 6, kv_heads: 2, ffn: 40}"]):
        config = load_config(None, settings)
        refuse_oversized(config, torch.device("cpu"))
        assert config.model.parameters == sum(p.numel() for p in ByteTransformer(config.model, 8).parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the hardware whose absence is tested")
def test_device_that_is_not_here_is_refused() -> None:
    assert find_device("auto").type == "cpu"
    with pytest.raises(DeviceError, match="sees 0 CUDA GPUs; set device=cpu or device=auto"):
        find_device("cuda:1")
