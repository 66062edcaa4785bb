"""Names the platform of a wheel that carries compiled libraries; hatchling runs it for every wheel.

Without libraries the wheel stays pure Python. OTTAVA_WHEEL_PLATFORM names another platform than this one's, such as
that of a manylinux image, or linux_aarch64 for libraries of a compiler for that machine.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CARRIED = Path("src/ottava/kernels/native/prebuilt")


class PlatformTag(BuildHookInterface):  # type: ignore[type-arg]  # its argument is the builder's configuration
    """Sets the tag where there are libraries."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """hatchling calls it before it packs the files."""
        if any((Path(self.root) / CARRIED).glob("*.so")):
            platform = os.environ.get("OTTAVA_WHEEL_PLATFORM") or sysconfig.get_platform()
            build_data |= {"pure_python": False, "tag": f"py3-none-{platform.replace('-', '_').replace('.', '_')}"}
