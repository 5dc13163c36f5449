"""Files that a program sends: decoded and prepared as the model says, and refused by number where they are bad."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from fedtta.client.agent.candidate import Samples
from fedtta.client.agent.core import Agent
from fedtta.client.agent.encoded import Encoded
from fedtta.client.agent.live import as_floats
from fedtta.client.agent.predictions import PredictQueue
from fedtta.client.agent.server import serve
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import protobuf
from fedtta.models import TwoHead, build, save_model
from fedtta.models.preprocessing import Preprocessing
from tests.client.agent import fake
from tests.client.agent.world import SETTINGS, config

#: Not trained: no test asks whether its predictions are right.
NETWORK = {"name": "cnn", "num_classes": 10, "in_channels": 3, "image_size": SETTINGS.image_size, "norm": "batch"}
SPEC = {
    "preprocessing": Preprocessing(16, 3, "crop", "bicubic", 0.9).to_dict(),
    "classes": [f"d{i}" for i in range(10)],
}


def model_file(path: Path, **changes: Any) -> Path:
    spec = {**NETWORK, **SPEC, **changes}
    save_model(path, network(), {key: value for key, value in spec.items() if value is not None})
    return path


@lru_cache(maxsize=1)
def network() -> TwoHead:
    return build(**NETWORK, seed=1)  # type: ignore[arg-type]


def image(width: int = 40, height: int = 30) -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 255, (height, width, 3), np.uint8))


def encoded(kind: str, drawn: Image.Image | None = None) -> bytes:
    file = io.BytesIO()
    (drawn or image()).save(file, kind)
    return file.getvalue()


def dicom() -> bytes:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    file = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    pixels = np.arange(40 * 30, dtype=np.uint16).reshape(30, 40)
    file.Rows, file.Columns = pixels.shape
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 12, 11, 0
    file.SOPClassUID, file.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    file.PixelData = pixels.tobytes()
    out = io.BytesIO()
    pydicom.dcmwrite(out, file, enforce_file_format=True)
    return out.getvalue()


@pytest.fixture
def agent(tmp_path: Path) -> Any:
    made = Agent(
        config(tmp_path, adapter="none", model=str(model_file(tmp_path / "m.safetensors")), max_megapixels=0.01)
    )
    yield made
    made.close()


def test_every_format_is_prepared_as_the_model_says(agent: Agent) -> None:
    files = [encoded("JPEG"), encoded("PNG"), encoded("TIFF"), dicom()]
    rule = Preprocessing.from_dict(SPEC["preprocessing"])  # type: ignore[arg-type]
    expected = np.stack([rule.apply(rule.decode(file)) for file in files])
    np.testing.assert_array_equal(agent.check(Encoded(tuple(files))), expected)
    assert not np.array_equal(expected, np.stack([Preprocessing(16).apply(rule.decode(file)) for file in files]))


def test_a_model_that_says_nothing_has_the_default_preprocessing(tmp_path: Path) -> None:
    path = model_file(tmp_path / "old.safetensors", preprocessing=None, classes=None)
    made = Agent(config(tmp_path, adapter="none", model=str(path)))
    rule = Preprocessing(SETTINGS.image_size)
    np.testing.assert_array_equal(made.check(Encoded((encoded("PNG"),)))[0], rule.apply(image()))
    assert made.status().classes == tuple("0123456789")
    made.close()


def test_files_are_prepared_for_the_model_that_predicts_them(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model of the same shape comes between the check of a request and its prediction."""
    model, rule = agent._live.served, Preprocessing(16)  # type: ignore[union-attr]
    other = replace(model, spec={**model.spec, "preprocessing": rule.to_dict()}, origin="r/t/2")
    check = agent.check

    def interrupted(pixels: Any) -> Any:
        found = check(pixels)
        agent._models.offer(other, Samples.none(other.shape), "its file")
        return found

    monkeypatch.setattr(agent, "check", interrupted)
    queue = PredictQueue(agent, 8, 8)
    answer = queue.submit(Encoded((encoded("PNG"),))).result(60)
    queue.close()
    assert answer.version == f"r/t/2/{other.digest()[:8]}"
    expected = other.unadapted(as_floats(rule.apply(image())[None]))
    np.testing.assert_allclose(answer.probabilities, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"", "file 1 of the request: damaged, or of another format"),
        (encoded("PNG")[:60], "file 1 of the request: damaged, or of another format"),
        (encoded("PNG", image(200, 100)), r"file 1 of the request: 200 x 100 pixels; allowed are 10,000"),
    ],
)
def test_a_bad_file_is_named_by_its_number(agent: Agent, bad: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        agent.check(Encoded((encoded("PNG"), bad)))


def test_over_the_socket_a_bad_file_refuses_its_request_and_the_stream_goes_on(agent: Agent) -> None:
    with fake.folder() as short:
        keys = {"listen": f"unix:{short}/a", "relay": f"unix:{short}/r", "adapter": "none"}
        sockets = serve(agent, config(short, **keys))
        good = encoded("PNG")

        def asked(*files: bytes) -> pb.PredictRequest:
            return pb.PredictRequest(images=protobuf.to_files(files))

        try:
            with fake.channel(sockets.listen) as line:
                stub = fake.predictor(line)
                one = stub.Predict(asked(good, good), timeout=fake.TIMEOUT)
                pixels = np.stack([Preprocessing.from_dict(SPEC["preprocessing"]).apply(image())] * 2)  # type: ignore[arg-type]
                same = stub.Predict(pb.PredictRequest(images=protobuf.to_images(pixels)), timeout=fake.TIMEOUT)
                rows = np.frombuffer(one.probabilities, "<f4").reshape(2, 10)
                np.testing.assert_array_equal(rows.ravel(), np.frombuffer(same.probabilities, "<f4"))
                assert (one.samples, one.classes) == (2, 10)
                stream = [asked(good), asked(b"no image"), asked(), asked(good)]
                errors = [reply.error for reply in stub.PredictStream(iter(stream), timeout=fake.TIMEOUT)]
                assert [bool(error) for error in errors] == [False, True, True, False]
                assert errors[1].startswith("file 0 of the request: damaged")
                assert errors[2] == "0 encoded files: allowed are 1 to 1024"
                both = asked(good)
                both.images.values = b"x"
                text = fake.refused(lambda: stub.Predict(both, timeout=fake.TIMEOUT), grpc.StatusCode.INVALID_ARGUMENT)
                assert text == "encoded files beside shape or values: allowed is one of them"
        finally:
            sockets.stop(fake.TIMEOUT)
    log = [json.loads(line) for line in agent.log.path.read_text().splitlines()]
    assert sum(line["event"] == "request refused" for line in log) == 3


def test_a_model_file_is_served_without_a_federation(tmp_path: Path) -> None:
    path = model_file(tmp_path / "m.safetensors")
    for _ in range(2):  # the second time the same content is no new model
        one = Agent(config(tmp_path, adapter="t3a", model=str(path)))
        assert one.status().version.startswith("file/m/0/")
        assert one.status().classes == tuple(SPEC["classes"])
        assert len(one.models()) == 1
        assert one.predict(one.check(Encoded((encoded("PNG"),)))).probabilities.shape == (1, 10)
        first = one.status().version
        one.close()
    model_file(path, classes=[f"e{i}" for i in range(10)])
    two = Agent(config(tmp_path, adapter="t3a", model=str(path)))
    assert [model.state for model, _ in two.models()] == ["kept", "served"]
    assert two.restore_model().version == first
    two.close()
    three = Agent(config(tmp_path, adapter="t3a", model=str(path)))
    assert three.status().version == first  # a rollback holds
    three.close()


@pytest.mark.parametrize("adapter", ["bn_adapt", "tent", "cotta", "rotta", "roid", "bbn", "eata", "shot", "memo"])
def test_every_adapter_that_needs_no_training_serves_a_file(tmp_path: Path, adapter: str) -> None:
    agent = Agent(config(tmp_path, adapter=adapter, model=str(model_file(tmp_path / "m.safetensors"))))
    assert np.isfinite(agent.predict(agent.check(Encoded((encoded("PNG"),) * 8))).probabilities).all()
    agent.close()


@pytest.mark.parametrize(
    ("adapter", "base", "reason"),
    [
        ("fedthe", "global", "adapter = fedthe needs descriptor, personal_head, which a federated training makes"),
        ("atp", "global", "adapter = atp needs rates, which"),
        ("knn_per", "global", "adapter = knn_per needs datastore, which"),
        ("em", "global", "adapter = em needs label_prior, which"),
        ("none", "personalised", "only a federated training personalizes a network"),
    ],
)
def test_what_needs_a_training_is_refused_with_what_it_needs(
    tmp_path: Path, adapter: str, base: str, reason: str
) -> None:
    path = model_file(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=reason):
        Agent(config(tmp_path, adapter=adapter, base=base, model=str(path)))
    Agent(config(tmp_path, adapter="none", model=str(path))).close()  # the state directory has been released


def test_a_missing_file_stops_only_a_device_that_has_no_model(tmp_path: Path) -> None:
    path = model_file(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"model = .*gone\.safetensors: .*there is no file"):
        Agent(config(tmp_path, adapter="none", model=str(tmp_path / "gone.safetensors")))
    Agent(config(tmp_path, adapter="none", model=str(path))).close()
    shutil.move(path, tmp_path / "elsewhere")
    agent = Agent(config(tmp_path, adapter="none", model=str(path)))
    assert agent.status().version
    assert "is not served: there is no file" in agent.status().notes[-1]
    agent.close()
