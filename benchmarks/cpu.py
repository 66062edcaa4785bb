"""`ottava bench cpu` from a checkout: `python benchmarks/cpu.py --help`."""

from __future__ import annotations

from ottava.cli.bench import bench

if __name__ == "__main__":
    bench()
