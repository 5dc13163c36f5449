"""`docker/slim.py`: what is left of an environment works; of a library, all that loading and calling it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from fedtta.simulation.superlink import PROJECT

#: Loads a library of NumPy's from a folder; an error that crosses it is raised and caught.
USED = """
import sys; sys.path.insert(0, sys.argv[1])
import numpy
print(numpy.__file__, numpy.ones((3, 3)).dot(numpy.ones(3)))
try: numpy.linalg.inv(numpy.zeros((2, 2)))
except numpy.linalg.LinAlgError as error: print(error)
"""


def slim(environment: Path) -> None:
    subprocess.run([sys.executable, str(PROJECT / "docker" / "slim.py"), str(environment)], check=True)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "lib" / "python3.11" / "site-packages"
    folder.mkdir(parents=True)
    return folder


def test_a_library_without_symbol_tables_is_smaller_and_works(tmp_path: Path, packages: Path) -> None:
    here = Path(sysconfig.get_path("purelib"))
    for name in ("numpy", "numpy.libs"):
        shutil.copytree(here / name, packages / name)
    libraries = [path for path in packages.rglob("*.so*") if path.is_file()]
    before = {path: path.stat().st_size for path in libraries}
    slim(tmp_path)
    assert not [path for path in libraries if path.stat().st_size > before[path]]
    assert sum(path.stat().st_size for path in libraries) < sum(before.values())
    done = subprocess.run(
        [sys.executable, "-c", USED, str(packages)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == [str(packages / "numpy/__init__.py"), "[3.", "3.", "3.]", "Singular", "matrix"]


def test_what_goes_and_what_stays(tmp_path: Path, packages: Path) -> None:
    goes = ["../../../bin/pip3", "../../../bin/uv", "pip/__init__.py", "pip-1.dist-info/RECORD", "one/tests/data.so"]
    goes += ["one/__pycache__/a.pyc", "one/tests/__pycache__/b.pyc", "one/lib.a", "torch/test/x", "torch/bin/test_jit"]
    goes += ["onnx/backend/test/a.onnx", "onnxruntime/capi/libonnxruntime.so.1"]
    stays = ["../../../bin/uvicorn", "one/a.py", "one/text.so", "torch/tests/y", "torch/bin/torch_shm_manager"]
    stays += ["onnxruntime/capi/state.so", "onnx/backend/base.py"]
    for name in (*goes, *stays):
        (packages / name).resolve().parent.mkdir(parents=True, exist_ok=True)
        (packages / name).resolve().write_text(name)
    slim(tmp_path)
    assert not [name for name in goes if (packages / name).resolve().exists()]
    assert [(packages / name).resolve().read_text() for name in stays] == stays
