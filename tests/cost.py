"""A pytest plugin that knows what a test costs. `--under 1.2` leaves out what costs more: so `./x test` takes minutes.

What counts is CPU time, of the test and of the processes that it waited for: a busy machine makes nobody fail.
tests/prices.txt has every test of a second or more, as `./x test --all --write-prices` measured them. A test of a
minute that is not there fails. After a minute of tests the plugin prints the price of each folder and the dearest
tests; `.pytest_cache/v/ottava/cpu_seconds` keeps the price of every test.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PRICES = Path(__file__).with_name("prices.txt")
LISTED_FROM, FAIL_FROM = 1.0, 60
"""Seconds of CPU time: where a test has a line in the list, and where one without it fails. A busy or older machine
needs three times the CPU time of a quiet one."""


@cache
def listed() -> dict[str, float]:
    """Seconds by test, of the list."""
    lines = (line.split(maxsplit=1) for line in PRICES.read_text(encoding="utf-8").splitlines())
    return {test: float(seconds) for seconds, test in lines}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--under", type=float, metavar="SECONDS", help="leave out the tests that cost more CPU time")
    parser.addoption("--write-prices", action="store_true", help="write tests/prices.txt from this run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that is not in the list is cheap, or new."""
    limit = config.getoption("--under")
    dear = [] if limit is None else [item for item in items if listed().get(item.nodeid, 0.0) > limit]
    if dear:
        config.hook.pytest_deselected(items=dear)
        out = set(map(id, dear))
        items[:] = [item for item in items if id(item) not in out]


def cpu_seconds() -> float:
    """CPU time of this process, of its children that have ended, and of those that a warm interpreter forked."""
    import resource

    import warm

    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + warm.cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Compare what a test cost with what it may."""
    exempt = sys.platform == "win32" or item.nodeid in listed() or item.get_closest_marker("gpu")
    begin = 0.0 if exempt else cpu_seconds()
    result = yield
    cost = 0.0 if exempt else cpu_seconds() - begin
    if cost > FAIL_FROM:
        pytest.fail(
            f"this test cost {cost:.0f} s of CPU time. Make it smaller, or share its processes and builds with other "
            "tests; if it must cost that, `--write-prices` puts it into tests/prices.txt",
            pytrace=False,
        )
    return result


class Prices:
    """Sums the CPU time of each test. Workers of pytest-xdist measure, and their reports bring it here."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.last, self.seconds = config, 0.0, Counter[str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self.last = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Fixtures count with the test that asks for them first."""
        report: Any = yield
        report.cpu, self.last = (now := cpu_seconds()) - self.last, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += getattr(report, "cpu", 0.0)

    def pytest_sessionfinish(self) -> None:
        """`--write-prices`: tests that did not run keep their line."""
        if self.config.getoption("--write-prices") and self.seconds:
            kept = {test: s for test, s in listed().items() if test not in self.seconds}
            rows = {**kept, **{test: s for test, s in self.seconds.items() if s >= LISTED_FROM}}
            PRICES.write_text("".join(f"{rows[test]:.1f} {test}\n" for test in sorted(rows)), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Folders, and the fifteen dearest tests."""
        if self.seconds.total() < 60:
            return
        folders: Counter[str] = Counter()
        for test, seconds in self.seconds.items():
            folders["/".join(test.split("::")[0].split("/")[:2])] += seconds
        terminalreporter.section(f"{self.seconds.total():.0f} s of CPU time")
        for name, seconds in (*folders.most_common(12), *self.seconds.most_common(15)):
            terminalreporter.write_line(f"{seconds:8.1f} s  {name}")
        if getattr(self.config, "cache", None) is not None:  # -p no:cacheprovider
            self.config.cache.set("ottava/cpu_seconds", dict(self.seconds.most_common()))


def pytest_configure(config: pytest.Config) -> None:
    if sys.platform != "win32":
        config.pluginmanager.register(Prices(config))
