"""Turns the records of other tools into run folders, so that compare, diagnose and report can read them.

    te_log        statistics logs of TransformerEngine's debug features (nvdlfw_inspect), also in BioNeMo's layout
    te_dump       tensor files of TransformerEngine's DumpTensors
    tensorboard   event files of TransformerEngine, torchao and Megatron, and tags that you name

A new importer is a file with `FILE` and `read`, and an entry of `IMPORTERS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ottava.base.errors import need_known
from ottava.base.untrusted import UntrustedError, regular_size
from ottava.interop.importers import scalars, te_dump
from ottava.interop.importers.collected import Collected, ImportRunError
from ottava.record.reader import Run


class Importer(NamedTuple):
    """One kind of source."""

    looks_for: str
    """The files that it needs, in words."""
    pattern: str
    """Shell pattern of these files in a folder."""
    name: re.Pattern[str]
    """The whole name of such a file."""
    read: Callable[[list[Path], Collected], None]
    """Reads the files."""
    suffixes: tuple[str, ...] = ()
    """A file with one of these suffixes may have any name if the user gives the file itself."""

    def find(self, source: Path) -> list[Path]:
        """The files of this kind in a folder, at any depth, or the file itself; empty if there are none."""
        if source.is_file() and source.suffix in self.suffixes:
            return [source]
        paths = sorted(source.rglob(self.pattern)) if source.is_dir() else [source]
        return [path for path in paths if self.name.fullmatch(path.name)]


IMPORTERS: Mapping[str, Importer] = MappingProxyType(
    {
        "te_log": Importer(
            "*globalrank-N.log with lines of statistics", "*.log", scalars.FILE, scalars.read, (".log", ".txt")
        ),
        "te_dump": Importer("*_iter_N.pt of DumpTensors", "*.pt", te_dump.FILE, te_dump.read),
        "tensorboard": Importer("events.out.tfevents.* files", "*", scalars.EVENTS, scalars.read_events),
    }
)
"""In the order of reading: layer names in logs give the spelling of those in dumps."""


def import_run(
    source: Path | str,
    target: Path | str,
    *,
    kind: str | None = None,
    recipe: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> Run:
    """Reads the records of another tool and writes them as a run folder.

    Args:
        source: a folder, which is searched at any depth, or a file.
        target: the run folder to make.
        kind: a key of IMPORTERS; None: every kind with files.
        recipe: name of the run's recipe, if the source does not say.
        tags: names of scalars -> loss, grad_norm, lr or tokens.
    Returns:
        The run. Its manifest lists under "imported" the files, and the values that were not understood.
    Raises:
        ImportRunError: no file can be read, or the kind is unknown.  RunError: the target already has a run.
    Edge cases: no code in a file runs. Numbers may be nan or inf. Statistics of other tools are stored as they are;
        since they are no sums, ranks are merged by taking the worst.

    Example:
        >>> import tempfile
        >>> line = "2025-01-01 - INFO - layers.0.mlp.fc1_activation_underflows% \t iteration=000100 \t value=12.5000"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = Path(folder) / "nvdlfw_inspect_globalrank-0.log"
        ...     _ = log.write_text(line + "\\n")
        ...     table = import_run(log, Path(folder) / "run").table()
        >>> table["layer"][0], table["tensor"][0], float(table.metric("underflow_pct_numel")[0])
        ('layers.0.mlp.fc1', 'input', 12.5)
    """
    source, target = Path(source), Path(target)
    need_known("import", "kind", kind, (None, *IMPORTERS), ImportRunError)
    if not source.exists():
        raise ImportRunError(f"{source} does not exist; needs a folder or a file of another tool")
    collected = Collected(recipe=recipe, tags=tags or {})
    for name, importer in IMPORTERS.items():
        if kind in (None, name) and (files := _regular(importer.find(source), collected)):
            collected.kinds[name] = len(files)
            importer.read(files, collected)
    if not collected.kinds:
        if collected.notes:
            raise ImportRunError(f"{source}: none of its files can be read. {'; '.join(collected.notes[:4])}")
        importers = IMPORTERS if kind is None else {kind: IMPORTERS[kind]}
        looked = "; ".join(f"{name}: {importer.looks_for}" for name, importer in importers.items())
        raise ImportRunError(f"{source}: has nothing to import; looked for {looked}")
    collected.write(source, target)
    return Run.open(target)


def _regular(files: list[Path], collected: Collected) -> list[Path]:
    """The files that can be read to their end; notes the others."""
    regular = []
    for path in files:
        try:
            regular_size(path)
            regular.append(path)
        except (OSError, UntrustedError) as error:
            collected.note(f"{path.name}: {error}")
    return regular


__all__ = ["IMPORTERS", "Collected", "ImportRunError", "Importer", "import_run"]
