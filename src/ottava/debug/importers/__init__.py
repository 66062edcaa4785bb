"""Runs that other tools watched, as run folders of ours, so that compare, diagnose and report read them.

    te_log        statistics logs of TransformerEngine's debug features (nvdlfw_inspect), also as BioNeMo arranges them
    te_dump       tensors that TransformerEngine's DumpTensors wrote
    tensorboard   event files: TransformerEngine's, torchao's, Megatron's, and tags that you name

Adding one is a file with a `find` and a `read`, and an entry of `IMPORTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ottava.debug.importers import te_dump, te_log, tensorboard
from ottava.debug.importers.collected import Collected, ImportRunError
from ottava.debug.run.reader import Run
from ottava.errors import unknown_name
from ottava.untrusted import UntrustedError, regular_size


class Importer(NamedTuple):
    """One kind of source."""

    looks_for: str
    """What it needs to be there, in words."""
    find: Callable[[Path], list[Path]]
    """The files of this kind in a folder, or the file itself; empty if there are none."""
    read: Callable[[list[Path], Collected], None]
    """Takes them in."""


IMPORTERS: Mapping[str, Importer] = MappingProxyType(
    {
        "te_log": Importer("*globalrank-N.log with lines of statistics", te_log.find, te_log.read),
        "te_dump": Importer("*_iter_N.pt of DumpTensors", te_dump.find, te_dump.read),
        "tensorboard": Importer("events.out.tfevents.* files", tensorboard.find, tensorboard.read),
    }
)
"""In the order of reading: layer names in logs tell how those of dumps were spelt."""


def import_run(
    source: Path | str,
    target: Path | str,
    *,
    kind: str | None = None,
    recipe: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> Run:
    """Reads what another tool recorded and writes it as a run folder.

    Args:
        source: a folder, searched to the bottom, or a file.
        target: the run folder to make.
        kind: a key of IMPORTERS; None: all of which something is there.
        recipe: name of the recipe that the run trained with, where the source does not say.
        tags: names of scalars -> what they are: loss, grad_norm, lr, tokens.
    Returns:
        The run. Its manifest says under "imported" what was read, and what was not understood.
    Raises:
        ImportRunError: nothing there that can be read; unknown kind.  RunError: the target holds a run already.
    Edge cases: nothing in a file is executed. Numbers that are nan or inf are kept. Statistics that other tools
        finished are stored as such: they are not sums, so ranks are merged by taking the worst.

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
    if kind is not None and kind not in IMPORTERS:
        raise ImportRunError(f"import: {unknown_name('kind', kind, IMPORTERS)}")
    if not source.exists():
        raise ImportRunError(f"{source} is not there; needs a folder or a file that another tool wrote")
    collected = Collected(recipe=recipe, tags=tags or {})
    for name, importer in IMPORTERS.items():
        if kind in (None, name) and (files := _regular(importer.find(source), collected)):
            collected.kinds[name] = len(files)
            importer.read(files, collected)
    if not collected.kinds:
        if collected.notes:
            raise ImportRunError(f"{source}: nothing in it can be read. {'; '.join(collected.notes[:4])}")
        wanted = IMPORTERS if kind is None else {kind: IMPORTERS[kind]}
        looked = "; ".join(f"{name}: {importer.looks_for}" for name, importer in wanted.items())
        raise ImportRunError(f"{source}: nothing to import is in it; looked for {looked}")
    collected.write(source, target)
    return Run.open(target)


def _regular(files: list[Path], collected: Collected) -> list[Path]:
    """Those that can be read to their end; of the others it is noted what they are."""
    kept = []
    for path in files:
        try:
            regular_size(path)
            kept.append(path)
        except (OSError, UntrustedError) as error:
            collected.note(f"{path.name}: {error}")
    return kept


__all__ = ["IMPORTERS", "Collected", "ImportRunError", "Importer", "import_run"]
