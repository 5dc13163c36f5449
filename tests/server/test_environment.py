"""What a run notes about the machine."""

from __future__ import annotations

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
