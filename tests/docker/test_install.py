"""`docker/install.sh` with pip itself, on an index of small packages: nothing is installed whose hash is not known."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fedtta.simulation.superlink import PROJECT

VERSION = "1.0"


def wheel(folder: Path, name: str, version: str = VERSION, code: str = "") -> str:
    """Put a package into a simple index; return the line of a requirements file with its hash."""
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    for old in home.iterdir():
        old.unlink()
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"__version__ = {version!r}\n{code}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {file: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
               for file, text in files.items()}  # fmt: skip
    files[f"{info}/RECORD"] = (
        "".join(f"{file},sha256={digests[file]},{len(text)}\n" for file, text in files.items()) + f"{info}/RECORD,,\n"
    )
    path = home / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (home / "index.html").write_text(f'<a href="{path.name}#sha256={digest}">{path.name}</a>')
    return f"{name}=={version} \\\n    --hash=sha256:{digest}\n"


class Build:
    """The build folder of an image: a package index, another one for PyTorch, and requirements."""

    def __init__(self, root: Path) -> None:
        self.root, self.index, self.other = root, root / "simple", root / "other"
        shutil.copy(PROJECT / "docker" / "install.sh", root)
        lines = {
            name: wheel(self.index, name)
            for name in ("flwr", "onnxruntime", "torch", "torchvision", "triton", "unused")
        }
        (root / "requirements.txt").write_text("# all\n" + "".join(lines.values()))
        (root / "requirements-edge.txt").write_text(lines["flwr"] + lines["unused"])
        (root / "requirements-light.txt").write_text(lines["onnxruntime"] + lines["unused"])
        self.hashes = "".join(wheel(self.other, name, f"{VERSION}+cpu") for name in ("torch", "torchvision"))
        (root / "requirements-torch.txt").write_text(self.hashes)

    def install(self, index: str = "", requirements: str = "requirements-edge.txt") -> subprocess.CompletedProcess[str]:
        """Run the script, where `python` is this one, but makes no environment where one is: that takes pip seconds."""
        programs = self.root / "bin"
        programs.mkdir(exist_ok=True)
        made = f'[ "$*" = "-m venv {self.root}/venv" ] && [ -d "{self.root}/venv" ]'
        (programs / "python").write_text(f'#!/bin/sh\n{made} || exec {sys.executable} "$@"\n')
        (programs / "python").chmod(0o755)
        environ = {"PATH": f"{programs}:{os.defpath}", "PIP_INDEX_URL": self.index.as_uri(), "TORCH_INDEX": index}
        environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HOME": str(self.root)}
        return subprocess.run(
            ["sh", "install.sh", requirements, str(self.root / "venv")],
            cwd=self.root, env=environ, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    def installed(self) -> set[str]:
        return {path.name.split("-")[0] for path in (self.root / "venv").rglob("*.dist-info")} - {"pip", "setuptools"}


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


@pytest.mark.slow
def test_pytorch_is_left_out_or_checked_too_or_comes_with_what_it_needs(build: Build) -> None:
    """For an agent without PyTorch, from another index that has another one, and for an agent of both runtimes."""
    done = build.install(requirements="requirements-light.txt")
    assert done.returncode == 0, done.stderr
    assert build.installed() == {"onnxruntime", "unused"}
    wheel(build.other, "torchvision", f"{VERSION}+cpu", "# another one\n")
    done = build.install(build.other.as_uri())
    assert done.returncode != 0
    assert "DO NOT MATCH" in done.stderr
    assert "torchvision==1.0+cpu" in done.stderr
    assert build.installed() == {"flwr", "onnxruntime", "unused"}
    done = build.install(requirements="requirements-edge.txt requirements-light.txt")
    assert done.returncode == 0, done.stderr
    assert "torch 1.0" in done.stdout
    assert build.installed() == {"flwr", "onnxruntime", "torch", "torchvision", "triton", "unused"}


@pytest.mark.parametrize("content", [None, "", "torch==0.9 \\\n    --hash=sha256:00\n"])
def test_another_index_without_hashes_of_these_versions_is_refused_first(build: Build, content: str | None) -> None:
    path = build.root / "requirements-torch.txt"
    path.unlink()
    if content is not None:
        path.write_text(content)
    done = build.install(build.other.as_uri())
    assert done.returncode != 0
    assert "make torch-hashes" in done.stderr
    assert not (build.root / "venv").exists()


@pytest.mark.skipif(not (PROJECT / ".venv" / "bin" / "uv").exists(), reason="no uv in the environment")
def test_make_records_the_hashes_of_another_index(build: Build) -> None:
    venv = PROJECT / ".venv"
    variables = [f"VENV={venv}", f"TORCH_INDEX={build.other.as_uri()}"]
    done = subprocess.run(
        ["make", "-f", str(PROJECT / "Makefile"), "-o", f"{venv}/ready", "torch-hashes", *variables],
        cwd=build.root, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = (build.root / "requirements-torch.txt").read_text().splitlines()
    assert "".join(f"{line}\n" for line in found if not line.startswith("#")) == build.hashes
    assert build.other.as_uri() not in "".join(found)
