"""The demo without its processes: what the sites' folders hold, what arrives later, and what the page says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedtta.client.sites import device_files, simulated_nodes
from fedtta.data import load
from fedtta.data.sources import own_data
from fedtta.models.preprocessing import Preprocessing
from fedtta.server.report import METRICS_FILE
from fedtta.settings import Settings
from fedtta.simulation import deployment, superlink
from fedtta.simulation.demo import __main__ as demo_program
from fedtta.simulation.demo.__main__ import LAPSE, Demo, encoded, main, settings_of
from fedtta.simulation.demo.page import Outcome, write_page
from fedtta.simulation.demo.sites import SITES, shifted, source_images, write_device, write_sites
from fedtta.simulation.superlink import FlowerError


def test_sites_have_disjoint_folders_of_which_every_image_is_used(tmp_path: Path) -> None:
    images = source_images(None)
    arrivals = write_sites(tmp_path, images)
    settings = settings_of(images, tmp_path, 5)
    seen: set[str] = set()
    for site in SITES:
        found = own_data(
            f"folder:{tmp_path}/{site.name}/images",
            classes=tuple(settings.classes.split(",")),
            preprocessing=Preprocessing(image_size=32),
        )
        assert found.used == found.samples == len(list((tmp_path / site.name / "images").rglob("*.png")))
        assert found.labelled == (site.layout != "flat")
        lacking = {site.lacks} - {None}
        assert set(range(10)) - set(found.images.labels.tolist()) == (lacking if found.labelled else set(range(10)))
        names = {Path(name).name for name in found.names}
        assert not names & seen
        seen |= names
        write_device(tmp_path, site, {"adapter": "tent"})
    assert len(arrivals.labels) == len(arrivals.images) == 390
    assert len(seen) + len(arrivals.labels) <= len(images)
    pattern = str(tmp_path / "*" / "device.toml")
    assert len(device_files(pattern)) == len(SITES)
    nodes = simulated_nodes(Settings(devices=pattern, clients=len(SITES)))
    assert [node.name for node in nodes] == sorted(site.name for site in SITES)


def test_files_that_arrive_are_the_images(tmp_path: Path) -> None:
    arrivals = write_sites(tmp_path, load("digits", image_size=32))
    prepared = Preprocessing(image_size=32)
    for site in SITES:
        changed = shifted(arrivals, site)
        assert changed.shape == arrivals.images.shape
        assert (changed != arrivals.images).mean() > 0.1
        assert (prepared.apply(prepared.decode(encoded(changed[0]))) == changed[0]).all()


def test_a_supernode_that_the_run_has_lost_is_replaced_unless_it_is_a_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as east,
        subprocess.Popen(command, stdin=subprocess.PIPE) as west,
    ):
        demo = Demo(tmp_path, settings_of(source_images(None), tmp_path, 5), tmp_path, tmp_path)
        demo.nodes = {"east": deployment.Supervised(lambda: east), "west": deployment.Supervised(lambda: west)}
        demo.nodes["east"].since -= 2 * LAPSE
        demo.tend()
        assert east.poll() is None
        lost = [json.dumps({"event": "left", "name": name}) + "\n" for name in ("east", "west")]
        (tmp_path / "run" / METRICS_FILE).write_text("".join(lost))
        demo.tend()
        assert east.wait(30) == -signal.SIGKILL
        assert west.poll() is None
        west.kill()


def test_a_site_that_has_not_joined_in_time_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    demo = Demo(tmp_path, settings_of(source_images(None), tmp_path, 5), tmp_path, tmp_path)
    told = [{"event": "clients", "names": ["east", "north", "south"]}, {"event": "joined", "name": "west"}]
    lines = [json.dumps(one) + "\n" for one in told]
    (tmp_path / "run" / METRICS_FILE).write_text(lines[0])
    with pytest.raises(FlowerError, match="west had not joined"):
        demo.require_all()
    (tmp_path / "run" / METRICS_FILE).write_text("".join(lines))
    demo.require_all()


def test_a_signal_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run would be waited for, up to a quarter of an hour, with all further signals ignored."""
    keys = SimpleNamespace(ca=tmp_path, node=lambda number: (tmp_path, tmp_path))
    node = SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(demo_program, "make_keys", lambda *_: (keys, None))
    monkeypatch.setattr(superlink, "superlink", lambda *_, **__: nullcontext("fleet"))
    monkeypatch.setattr(superlink, "register", lambda *_: None)
    monkeypatch.setattr(deployment, "start_agent", lambda *_: None)
    monkeypatch.setattr(deployment, "supernode", lambda *_: nullcontext(node))
    monkeypatch.setattr(deployment, "wait_for_agents", lambda *_: None)
    waited: list[bool] = []

    def run(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(5)
        waited.append(True)

    monkeypatch.setattr(deployment, "run", run)
    images = source_images(None)
    arrivals = write_sites(tmp_path, images)
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit):
            Demo(tmp_path, settings_of(images, tmp_path, 5), tmp_path, tmp_path).run({}, arrivals)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert not waited


@pytest.mark.parametrize(
    ("adapted", "words"),
    [(0.9, "Adaptation paid at north (+40.0 points)."), (0.51, "made no clear difference"), (0.2, "It cost at north")],
)
def test_the_page_says_where_adaptation_paid_and_where_not(tmp_path: Path, adapted: float, words: str) -> None:
    images = np.zeros((2, 3, 8, 8), np.uint8)
    outcome = Outcome(SITES[0], 10, None, 0, None, None, 0.7, 0.5, adapted, 390, images)
    page = write_page(tmp_path / "index.html", [outcome], ["about <it>"]).read_text()
    assert words in page
    assert "no labels" in page
    assert "about &lt;it&gt;" in page
    assert "http" not in page


def test_a_folder_that_exists_or_too_few_rounds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tmp_path)]) == 2
    assert main(["--folder", str(tmp_path / "new"), "--rounds", "3"]) == 2
    assert "allowed is 4 or more" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_program, "unwind_on_signals", lambda: None)
    monkeypatch.delenv("FEDTTA_DATA", raising=False)
    (tmp_path / "file").touch()
    assert main(["--folder", str(tmp_path / "file" / "new")]) == 1
    assert capsys.readouterr().err.startswith(f"demo failed: [Errno 20] Not a directory: '{tmp_path / 'file' / 'new'}")


def test_damaged_images_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_program, "unwind_on_signals", lambda: None)
    monkeypatch.setenv("FEDTTA_DATA", str(tmp_path))
    (tmp_path / "pacs64").mkdir()
    (tmp_path / "pacs64" / "photo.jpg").touch()
    assert main(["--folder", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.startswith(f"error: FEDTTA_DATA = {tmp_path}: ")
    assert not (tmp_path / "new").exists()
