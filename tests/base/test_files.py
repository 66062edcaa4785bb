"""Files are whole or as they were, on a disk that takes only a part."""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ottava.base.files import append, replacing, replacing_folder

LIMITED = """
import resource, sys
from pathlib import Path
from ottava.base.files import append, replacing
folder = Path(sys.argv[1])
(folder / "old").write_text("old")
with (folder / "lines").open("ab", buffering=0) as stream:
    append(stream, b"a" * 59 + b"\\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for refused in range(2):
        try:
            append(stream, b"b" * 59 + b"\\n")
        except OSError as error:
            print(error.strerror, (folder / "lines").stat().st_size)
    append(stream, b"c" * 19 + b"\\n")
try:
    with replacing(folder / "old") as scratch:
        scratch.write_bytes(b"d" * 200)
except OSError as error:
    print(error.strerror, sorted(path.name for path in folder.iterdir()), (folder / "old").read_text())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on the size of a file")
def test_a_disk_that_takes_only_a_part_gets_nothing(tmp_path: Path) -> None:
    """40 of 60 bytes have room: they are taken back, and a record that fits still comes in."""
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["File too large 60"] * 2 + ["File too large ['lines', 'old'] old"]
    assert (tmp_path / "lines").read_bytes() == b"a" * 59 + b"\n" + b"c" * 19 + b"\n"


def test_what_ends_badly_replaces_nothing(tmp_path: Path) -> None:
    """Nor does it leave its scratch file; what ends well does, also after a killed writer left one."""
    path = tmp_path / "a.txt"
    (tmp_path / ".a.txt.part").write_text("of a killed writer")
    for text in ("one", "two"):
        with replacing(path) as scratch:
            scratch.write_text(text)

    def ends_badly() -> None:
        with replacing(path) as scratch:
            scratch.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ends_badly()
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files as Unix does")
def test_a_disk_that_is_full_for_safetensors_is_an_error_of_the_system(tmp_path: Path) -> None:
    """safetensors raises an error of its own, whose text alone names the system's."""
    import resource

    def write(place: contextlib.AbstractContextManager[Path]) -> None:
        with place as scratch:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
            save_file({"weight": torch.zeros(4096)}, scratch / "a" if scratch.is_dir() else scratch)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for place in (replacing(tmp_path / "a.safetensors"), replacing_folder(tmp_path / "folder")):
        try:
            with pytest.raises(OSError, match="too large") as caught:
                write(place)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())


def test_a_stream_that_was_read_is_appended_to(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w+b", buffering=0) as stream:
        append(stream, b"12")
        stream.seek(0)
        append(stream, b"34")
        append(stream, b"")
    assert (tmp_path / "a").read_bytes() == b"1234"
