"""Remove from an environment what running it does not need: `python slim.py /opt/venv`.

Bytecode, tests, headers, pip; uv, with which Flower would install an app's packages (off by default on a device); and
the symbol tables of libraries, a fifth of PyTorch's, as `strip` removes them, which Python's slim images do not have.
"""

from __future__ import annotations

import shutil
import struct
import sys
from pathlib import Path

ELF64 = b"\x7fELF\x02\x01"  # 64 bits, little endian
HEADER = struct.Struct("<16xHHIQQQIHHHHHH")  # of the file; the offsets used below are the manual page's, elf(5)
SEGMENT = struct.Struct("<IIQQQQQQ")
PROGRAMS = ("pip*", "uv", "uvx")
PACKAGES = (  # and parts of one
    "pip", "pip-*", "torch/bin/test_*", "torch/bin/protoc*", "torch/include", "torch/test",
    "onnx/backend/test", "onnxruntime/capi/libonnxruntime.so*",  # which Python's module has in itself
)  # fmt: skip


def strip(path: Path) -> None:
    """Cut an ELF file after its last segment, if it is one: loading it needs segments, not sections."""
    with path.open("r+b") as file:
        header = file.read(HEADER.size)
        if not header.startswith(ELF64) or len(header) < HEADER.size:
            return
        kind, machine, version, entry, table, _, flags, size, each, count, *_ = HEADER.unpack(header)
        file.seek(table)
        segments = [SEGMENT.unpack(file.read(each)[: SEGMENT.size]) for _ in range(count)]
        end = max([table + each * count, *(offset + length for _, _, offset, _, _, length, _, _ in segments)])
        file.seek(0)
        file.write(
            header[:16] + HEADER.pack(kind, machine, version, entry, table, 0, flags, size, each, count, 64, 0, 0)[16:]
        )
        file.truncate(end)


def main(environment: Path) -> None:
    """Slim a virtual environment in place."""
    (packages,) = environment.glob("lib/python3*/site-packages")
    unused = [path for pattern in PACKAGES for path in packages.glob(pattern)]
    unused += [path for pattern in PROGRAMS for path in (environment / "bin").glob(pattern)]
    unused += [path for path in packages.rglob("tests") if not path.is_relative_to(packages / "torch")]
    unused += [*environment.rglob("__pycache__"), *environment.rglob("*.a")]
    for path in unused:
        if path.is_dir():  # and not inside one that is gone
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in environment.rglob("*"):
        if path.is_file() and not path.is_symlink() and (".so" in path.name or path.parent.name == "bin"):
            strip(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
