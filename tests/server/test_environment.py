"""What a run notes about the machine."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from fedtta.server import environment


def test_the_processor_is_named_as_linux_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it is what the platform says; the number of GPUs depends on the machine, so the end is left open."""
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 2: GHz\nmodel name\t: another\n")
    monkeypatch.setattr(environment, "Path", lambda path: info)
    assert environment.hardware().startswith("Fast CPU @ 2: GHz, ")
    info.unlink()
    monkeypatch.setattr("platform.processor", lambda: "risc")
    assert environment.hardware().startswith("risc, ")


HOLES = """
import sys
import numpy as np
from fedtta.server.environment import return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

if sys.argv[1] == "returned":
    return_freed_memory()
np.ones(30 << 17)  # 30 MiB: glibc's threshold rises when it is freed
before = resident()
blocks = [(np.ones(5 << 17), bytes(1 << 16)) for _ in range(30)]
small = [one for _, one in blocks]
del blocks
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator is what is set")
def test_models_that_are_freed_leave_no_holes() -> None:
    """30 blocks of 5 MiB, each followed by a small one that stays."""
    found = {}
    for name in ("returned", "kept"):
        made = subprocess.run([sys.executable, "-c", HOLES, name], capture_output=True, text=True, check=True)
        found[name] = int(made.stdout)
    assert found["returned"] < 10
    assert found["kept"] > 100, "the allocator does so by itself now: the function can go"
