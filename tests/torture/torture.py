"""A campaign against everything that writes: kills at random moments, full disks, damaged files, and a table.

    ./x torture                       five minutes
    ./x torture --minutes 240         hours
    ./x torture --cases 300 --seed 7  so many cases; the same seed tries the same again
    ./x torture --only kill           one attack; "kill:17" is its case 17 alone
    ./x torture --planted             each attack with a fault in ottava that it must report

Every case must end in "resumed bit for bit" or "refused with a sentence"; exit code 1 says that one did not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout, whatever is installed
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the bits of sums depend on threads

import processes
import torch
import typer.main
from attacks import ATTACKS, WEIGHTS, Case, Lost, Subject, fits, together, unable
from planted import FAULTS
from works import RANKS, STORES, TRAINED, UNPLANTED, Work, exporting, training, watching

import ottava
from ottava.cli import app as commands

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "benchmarks" / "results" / "torture.json"
_SLOW_WITNESS = 600.0


@dataclass
class Row:
    """One attack in the table."""

    tries: int = 0
    kills: int = 0
    resumed: int = 0
    refused: int = 0
    lost: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Campaign:
    """All works with their witnesses, and the tries of each attack."""

    def __init__(self, place: Path, seed: str) -> None:
        self.place, self.seed = place, seed
        self.rows: dict[str, Row] = {}
        self.works = Counter[str]()
        self._subjects: dict[str, Subject] = {}
        root = Path(ottava.__file__).parent
        self._stores = frozenset(str(root / name) for name in STORES)
        (place / "works").mkdir()
        vars(commands)["app"] = typer.main.get_command(commands.app)  # made once for all forks
        self._all = dict(self._make_works())

    def _make_works(self) -> Iterator[tuple[str, Work]]:
        configs = self.place / "works"
        works = [training(name, settings, configs) for name, settings in TRAINED.items()]
        works += [training(name, settings, configs, ranks=2) for name, settings in RANKS.items()]
        works.append(watching(configs))
        for work in works:
            yield work.name, work
        source = self.place / "source"
        source.mkdir()
        with contextlib.redirect_stdout(io.StringIO()):  # it also loads what all forks then share
            commands.app(training("source", TRAINED["tensorwise"], configs).words(source), standalone_mode=False)
            others = list(exporting(source, source / "shards"))
        yield from ((work.name, work) for work in others)

    def subject(self, name: str) -> Subject:
        """The work with its witness, made once."""
        if name not in self._subjects:
            work = self._all[name]
            if name == "join shards":
                sharded = self.subject("train 2 shards, weights in FP8").finished / "run" / "checkpoints"
                (self.place / "source" / "shards").symlink_to(max(sharded.iterdir()))
            folder = self.place / "witnesses" / str(len(self._subjects))
            folder.mkdir(parents=True)
            case = Case(Subject(work, {}, processes.Moments(), folder), folder, random.Random(0))
            if work.ranks > 1:
                end = together(case, 0, record=self._stores)
                moments = json.loads((folder / "log-1.moments").read_text())
            else:
                process = case.start(record=self._stores)
                end = process.wait(_SLOW_WITNESS)
                moments = json.loads(process.log.with_suffix(".moments").read_text())
            assert end.code == 0, f"{name}: the undisturbed run ends with {end.code}: {end.text}"
            self._subjects[name] = Subject(work, work.result(folder), processes.Moments(**moments), folder)
        return self._subjects[name]

    def attempt(self, attack: str, number: int, fault: Any = None) -> str:
        """One case; its ending, or what was lost."""
        row = self.rows.setdefault(attack, Row())
        chance = random.Random(f"{self.seed}/{attack}/{number}")
        names = [name for name, work in self._all.items() if fits(attack, work) and (fault is None or fault.fits(name))]
        random.Random(f"{self.seed}/{attack}").shuffle(names)
        subject = self.subject(names[number % len(names)])
        subject = replace(subject, work=replace(subject.work, plant=fault.plant if fault else None))
        folder = self.place / "cases" / f"{attack.replace(' ', '-')}-{number}"
        folder.mkdir(parents=True)
        case, began = Case(subject, folder, chance), time.monotonic()
        ending = "lost"
        row.tries += 1
        try:
            ending = ATTACKS[attack](case)
            setattr(row, ending, getattr(row, ending) + 1)
        except Lost as lost:
            notes = "; ".join(case.notes)
            row.lost.append(f"{attack}:{number}, {subject.work.name}: {notes}: {lost}")
        row.kills += case.kills
        row.seconds += time.monotonic() - began
        self.works[subject.work.name] += 1
        for path in folder.parent.glob(f"{folder.name}*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        return ending


def _in_memory() -> str | None:
    """A folder where a sync costs nothing: a kill loses no page of the system's, on any file system."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def plan(only: str, seed: str) -> Iterator[tuple[str, int]]:
    """Attack and number of each case, without end."""
    if ":" in only:
        attack, _, number = only.rpartition(":")
        yield attack, int(number)
        return
    names = [only] if only else [name for name in ATTACKS for _ in range(WEIGHTS.get(name, 1))]
    if why := {name: why for name in names if (why := unable(name))}:
        names = [name for name in names if name not in why] or sys.exit(f"torture: {why[only]}")
    numbers, chance = Counter[str](), random.Random(f"{seed}/plan")
    while True:
        chance.shuffle(names)
        for name in names:
            yield name, numbers[name]
            numbers[name] += 1


def table(rows: dict[str, Row]) -> str:
    """The table for people."""
    lines = [f"{'attack':<16}{'tries':>7}{'kills':>7}{'resumed':>9}{'refused':>9}{'lost':>6}{'seconds':>9}"]
    for name, row in rows.items():
        cells = f"{row.tries:>7}{row.kills:>7}{row.resumed:>9}{row.refused:>9}{len(row.lost):>6}{row.seconds:>9.0f}"
        lines.append(f"{name:<16}{cells}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="./x torture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="how long; default 5")
    parser.add_argument("--cases", type=int, help="how many cases, in place of a time")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", default="", metavar="ATTACK[:CASE]", help=", ".join(ATTACKS))
    parser.add_argument("--planted", action="store_true", help="prove that each attack reports a fault")
    parser.add_argument("--out", type=Path, help=f"JSON of the campaign; default {OUT.relative_to(ROOT)}")
    given = parser.parse_args(arguments)
    if given.only and given.only.partition(":")[0] not in ATTACKS:
        parser.error(f"--only: {given.only!r} is no attack; known: {', '.join(ATTACKS)}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="torture-", dir=_in_memory(), ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        campaign = Campaign(Path(folder), given.seed)
        processes.settle()
        if given.planted:
            return prove(campaign, given.only)
        began, limit = time.monotonic(), 60 * (given.minutes or 5.0)
        for count, (attack, number) in enumerate(plan(given.only, given.seed)):
            if (given.cases is not None and count >= given.cases) or (
                given.cases is None and time.monotonic() - began > limit
            ):
                break
            if campaign.attempt(attack, number) == "lost":
                print(f"LOST {campaign.rows[attack].lost[-1]}", file=sys.stderr, flush=True)
    gc.unfreeze()
    words = ["./x torture", f"--cases {sum(row.tries for row in campaign.rows.values())}"]
    words += [f"--seed {given.seed}"] + ([f"--only '{given.only}'"] if given.only else [])
    found = {name: vars(row) | {"seconds": round(row.seconds, 1)} for name, row in campaign.rows.items()}
    facts = {"schema_version": 1, "command": " ".join(words), "seed": given.seed, "torch": torch.__version__}
    facts |= {"minutes": round((time.monotonic() - began) / 60, 1), "attacks": found, "works": dict(campaign.works)}
    out = given.out or OUT
    out.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{table(campaign.rows)}\n{' '.join(words)}\n{out}")
    return int(any(row.lost for row in campaign.rows.values()))


def prove(campaign: Campaign, only: str) -> int:
    """Plants each fault and tries its attack until it is reported."""
    missed = []
    for fault in FAULTS:
        if only and fault.attack != only:
            continue
        for number in range(fault.tries):
            if campaign.attempt(fault.attack, number, fault) == "lost":
                said = campaign.rows[fault.attack].lost[-1].replace("\n", " ")
                assert UNPLANTED not in said, f"{fault.name}: {said}"
                print(f"{fault.attack}: reported in case {number + 1}: {fault.name}: {said[:300]}", flush=True)
                break
        else:
            missed.append(fault.name)
            print(f"{fault.attack}: NOT reported in {fault.tries} cases: {fault.name}", flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
