"""The light agent: predictions and histories as in torch, no torch in its process, a child that does the rest."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedtta.client.agent.audit import lines
from fedtta.client.agent.child import Child
from fedtta.client.agent.core import Agent
from fedtta.client.agent.light import Exported, Light
from fedtta.client.agent.live import Live
from fedtta.client.agent.store import Store
from fedtta.client.config import Limits
from fedtta.client.policy import PolicyError
from fedtta.client.served import NETWORK, Baseline, ServedModel
from fedtta.client.serving import Served
from fedtta.messages.replies import Evaluated
from fedtta.messages.requests import AdapterRow, Evaluate, Identify, Train
from fedtta.models import build
from fedtta.models.deadline import Deadline, Stopped
from fedtta.models.export import export_encoder
from fedtta.models.exported import ENCODER
from fedtta.settings import Settings, SettingsError
from fedtta.tta import Statistics
from fedtta.tta.arrays import entropy_of_logits
from fedtta.tta.auto import SERVED, Gains
from fedtta.tta.estimates import Calibration
from fedtta.tta.registry import ADAPTERS, LIGHT, info
from tests.client.agent import stub_child
from tests.client.agent.fake import until
from tests.client.agent.world import EXACT, TASK, common, config, initial, sample_images, train

ROOT = Path(__file__).parents[3]
NETWORKS = {"cnn": {"norm": "batch"}, "resnet20-bn": {}, "resnet20-gn": {}}
SIZE, CLASSES = 16, 6
#: Adapter, options beside the default ones, and whether it is guarded.
ROWS: list[tuple[str, dict[str, Any], bool]] = [
    *((name, {}, False) for name in LIGHT),
    *((name, {}, True) for name in ("btfl", "t3a", "em")),
    ("btfl", {"rectify": "product"}, False),
    ("btfl", {"reading": "published"}, True),
    ("fedthe", {"history": "batch"}, True),
    ("t3a", {"support": 3, "prototype": "direction", "head": "personal"}, False),
    ("t3a", {"support": 0}, False),
    ("bbse", {"predictions": "soft"}, False),
    ("fixed_mix", {"mix": "logits", "e": 0.3}, False),
    ("auto", {"probe": 6, "every": 9, "caution": 0.0}, True),
]
#: Of them, for networks whose adapters are the same: the network alone, its rounding magnified, and histories.
FEW = [("none", {}, False), ("em", {}, False), ("btfl", {}, True), ROWS[-1]]
CLOSE = {"rtol": 0, "atol": 1e-5}
#: EM's iterations on one image magnify the network's rounding.
CLOSE_OF: dict[str, dict[str, float]] = {"em": {"rtol": 0, "atol": 5e-5}}


@lru_cache(maxsize=1)
def pixels() -> NDArray[np.float32]:
    return np.random.default_rng(1).random((40, 3, SIZE, SIZE), np.float32)


@torch.no_grad()
def made(name: str) -> Served:
    """A network with all statistics; its BatchNorm layers have seen data, its heads do not agree."""
    options = NETWORKS[name]
    spec = {"name": name, "num_classes": CLASSES, "image_size": SIZE, **options}
    network = build(**spec, seed=3)  # type: ignore[arg-type]
    network.train()(torch.from_numpy(pixels()))
    z = network.eval().features(torch.from_numpy(pixels()))
    for head in (network.head, network.personal_head):
        head.weight.mul_(3 / (z @ head.weight.T).std())
    heads = network.personal_head, network.head
    entropies = [float(entropy_of_logits(head(z)).median()) for head in heads]  # so that there are events
    generator = np.random.default_rng(2)
    confusion = np.eye(CLASSES) + generator.random((CLASSES, CLASSES))
    prior = generator.random(CLASSES) + 0.2
    statistics = Statistics(
        descriptor_local=z[:30].double().mean(0),
        descriptor_global=z.double().mean(0),
        dle_local=torch.from_numpy(generator.random(z.shape[1])),
        dle_global=torch.from_numpy(generator.random(z.shape[1])),
        entropy_local=entropies[0],
        entropy_global=entropies[1],
        label_prior=torch.from_numpy(prior / prior.sum()),
        confusion=torch.from_numpy(confusion / confusion.sum()),
    )
    settings: Any = {key.replace("-", "_"): value for key, value in Settings().select("adapter").items()}
    classes = tuple(map(str, range(CLASSES)))
    names = [name for name in SERVED if network.features_nonnegative or name != "btfl"]
    gains = Gains(
        {name: Calibration(0.02 * number, 0.01) for number, name in enumerate(names)}, (1 / CLASSES,) * CLASSES
    )
    known: Any = {"statistics": statistics, "gains": gains, "origin": "r/t/1"}
    return Served(AdapterRow("none", "none"), network, spec, settings, classes, Baseline.unknown(CLASSES), **known)


@pytest.fixture(scope="module", params=list(NETWORKS))
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, Exported]:
    """One model in torch, and as it is read without."""
    served, folder = made(request.param), tmp_path_factory.mktemp(request.param)
    served.save(folder)
    export_encoder(served.network, served.shape, folder / NETWORK)
    return served, Exported.load(folder)


def live(served: ServedModel, adapter: str, options: dict[str, Any], guard: bool) -> Live:
    row = AdapterRow(adapter, adapter, options)
    return Live(replace(served, row=row), Limits(window=16) if guard else None, lambda text: None)


def stream(one: Live, begin: int, end: int) -> list[NDArray[np.float32]]:
    """What is answered to samples in batches of 1, 7, 1, 7, ..., with e where there is one."""
    found = []
    while begin < end:
        size = 1 if begin % 8 == 0 else 7
        rows, weights, adapted = one.predict(pixels()[begin : min(begin + size, end)])
        found += [rows, np.zeros(0) if weights is None else weights, np.array([adapted])]
        begin += size
    return found


def compare(both: tuple[Served, Exported], adapter: str, options: dict[str, Any], guard: bool) -> None:
    """Probabilities are torch's, and histories move both ways."""
    heavy, light = (live(one, adapter, options, guard) for one in both)
    assert heavy.digest == light.digest
    close = CLOSE_OF.get(adapter, CLOSE)
    for ours, theirs in zip(stream(light, 0, 24), stream(heavy, 0, 24), strict=True):
        np.testing.assert_allclose(ours, theirs, **close)
    states = heavy.state(), light.state()
    assert {name: (value.dtype, value.shape) for name, value in states[0].items()} == {
        name: (value.dtype, value.shape) for name, value in states[1].items()
    }
    moved = [live(one, adapter, options, guard) for one in both]
    moved[0].load(states[1], light.samples)
    moved[1].load(states[0], heavy.samples)
    heavy.load(states[0], heavy.samples)
    expected = stream(heavy, 24, 40)
    for one in moved:
        for ours, theirs in zip(stream(one, 24, 40), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, **close)


@pytest.mark.parametrize("both", ["cnn"], indirect=True)
@pytest.mark.parametrize(("adapter", "options", "guard"), ROWS, ids=str)
def test_probabilities_are_torchs_and_histories_move_both_ways(
    both: tuple[Served, Exported], adapter: str, options: dict[str, Any], guard: bool
) -> None:
    compare(both, adapter, options, guard)


@pytest.mark.parametrize("both", ["resnet20-bn", "resnet20-gn"], indirect=True)
@pytest.mark.parametrize(("adapter", "options", "guard"), FEW, ids=str)
def test_so_they_do_with_other_networks(
    both: tuple[Served, Exported], adapter: str, options: dict[str, Any], guard: bool
) -> None:
    compare(both, adapter, options, guard)


@pytest.mark.parametrize("both", ["cnn"], indirect=True)
def test_a_history_matters(both: tuple[Served, Exported]) -> None:
    """Otherwise the test before would say nothing of histories."""
    for adapter in ("btfl", "fedthe", "t3a", "auto"):
        fresh, light = (live(both[1], adapter, {}, False) for _ in range(2))
        stream(light, 0, 24)
        pairs = zip(stream(light, 24, 40), stream(fresh, 24, 40), strict=True)
        assert max(float(abs(one * 1.0 - other).max(initial=0)) for one, other in pairs) > 1e-4


def test_bad_input_is_refused_as_in_torch(both: tuple[Served, Exported]) -> None:
    for served, kind in zip(both, ("tensor", "array"), strict=True):
        adapter, bad = served.build(), pixels()[:3].copy()
        bad[1, 0, 0, 0] = np.nan
        with pytest.raises(ValueError, match=r"samples \[1\] of the batch hold values that are not finite"):
            adapter.predict(served.images(bad))
        with pytest.raises(TypeError, match=f"needs a floating-point {kind}, got"):
            adapter.predict(both[kind == "tensor"].images(pixels()[:3]))
        with pytest.raises(ValueError, match="state of NoAdaptation has the names"):
            adapter.load_state_dict({"foreign": served.given(np.zeros(1))})


@pytest.mark.parametrize("adapter", sorted(set(ADAPTERS) - set(LIGHT)))
def test_adapters_that_adapt_the_network_are_refused_with_what_is_allowed(tmp_path: Path, adapter: str) -> None:
    if info(adapter).whole_set:
        return
    with pytest.raises(
        SettingsError, match=f"adapter = '{adapter}': {adapter} adapts the network itself.*allowed there are none"
    ):
        config(tmp_path, runtime="onnx", adapter=adapter)


@pytest.mark.parametrize("both", ["cnn"], indirect=True)
def test_int8_is_close_and_another_precision_is_another_export(both: tuple[Served, Exported], tmp_path: Path) -> None:
    served, plain = both
    served.save(tmp_path)
    export_encoder(served.network, served.shape, tmp_path / NETWORK, pixels())
    with pytest.raises(ValueError, match="its precision is int8, not float32"):
        Exported.load(tmp_path)
    rounded = Exported.load(tmp_path, "int8")
    assert rounded.digest() == plain.digest()
    one, other = (model.unadapted(pixels()) for model in (rounded, plain))
    assert 1e-4 < abs(one - other).max() < 0.1
    assert (one.argmax(1) == other.argmax(1)).mean() > 0.9
    assert (tmp_path / ENCODER).stat().st_size < plain.network.path.with_name(ENCODER).stat().st_size / 2
    with pytest.raises(ValueError, match="int8 needs 16 images for its calibration, there are 2"):
        export_encoder(served.network, served.shape, tmp_path / NETWORK, pixels()[:2])


@pytest.mark.parametrize("keys", [{"runtime": "onnx"}, {"data": "folder:/data"}])
def test_int8_needs_the_runtime_and_data(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="precision = 'int8': allowed with runtime = onnx and data of its own"):
        config(tmp_path, adapter="btfl", precision="int8", **keys)


CODE = """
import sys
import numpy as np
from fedtta.client.config import AgentConfig
from fedtta.client.agent.core import Agent
from fedtta.client.agent.server import serve
from fedtta.tta.registry import LIGHT, info

folder, *adapters = sys.argv[1:]
for adapter in adapters:
    config = AgentConfig(name="0", state_dir=f"{folder}/{adapter}", runtime="onnx", adapter=adapter)
    agent = Agent(config)
    running = serve(agent, config)
    answer = agent.predict(np.random.default_rng(0).random((5, 3, 16, 16), np.float32))
    print(answer.adapted, len(answer.probabilities), agent.telemetry().predictions)
    for name in LIGHT:
        info(name).options
    print(sorted({"torch", "flwr", "scipy", "onnx"} & set(sys.modules)), agent.backend._children._process)
    running.stop(1)
    print(agent.close() == "")
"""


def test_a_process_that_predicts_has_neither_torch_nor_flower(tmp_path: Path) -> None:
    served, adapters = made("cnn"), ("btfl", "auto")
    for adapter in adapters:
        store = Store(tmp_path / adapter, 1, print)
        store.add(replace(served, row=AdapterRow(adapter, adapter)), "served")
        (folder,) = (tmp_path / adapter / "models").iterdir()
        export_encoder(served.network, served.shape, folder / NETWORK)
        store.close()
    command = [sys.executable, "-c", CODE, str(tmp_path), *adapters]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True 5 5", "[] None", "True"] * 2


@pytest.mark.parametrize(
    ("missing", "cases"),
    [
        (
            "torch",
            {
                "": "runtime = 'torch': PyTorch is not installed here",
                'runtime = "onnx"\nadapter = "tent"': "tent adapts the network itself",
                'runtime = "onnx"\nadapter = "auto[among=fedthe+tent]"': "tent adapts the network itself",
                'runtime = "onnx"\nadapter = "fedthe[beta=2]"': "'fedthe[beta=2]': beta=2.0 is outside [0, 1]",
            },
        ),
        ("onnxruntime", {'runtime = "onnx"': "runtime = onnx needs onnxruntime"}),
    ],
)
def test_a_runtime_that_is_not_installed_is_told_at_the_start(
    tmp_path: Path, missing: str, cases: dict[str, str]
) -> None:
    paths = [tmp_path / f"{number}.toml" for number in range(len(cases))]
    for path, keys in zip(paths, cases, strict=True):
        path.write_text(f'name = "0"\nstate-dir = "state"\n{keys}\n')
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from fedtta.client.agent.__main__ import main;"
        "print([main(['--config', path]) for path in sys.argv[1:]])"
    )
    command = [sys.executable, "-c", code, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert set(json.loads(done.stdout)) <= {1, 2}
    for line, said in zip(done.stderr.splitlines(), cases.values(), strict=True):
        assert said in line


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Evaluate, Evaluated]]:
    """A light agent that a federation has trained through the child, and may have trained with one network only."""
    folder, policy = tmp_path_factory.mktemp("light"), replace(EXACT, models="cnn")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fedtta.client.agent.light.IDLE", 3600.0)  # one child for all tests
        agent = Agent(config(folder, runtime="onnx", adapter="btfl", policy=policy))
        try:
            yield agent, *train(agent.perform)
        finally:
            agent.close()


@pytest.fixture
def beside_a_stub(
    trained: tuple[Agent, Evaluate, Evaluated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Agent]:
    """An agent with a model, whose child does no work."""
    monkeypatch.setattr("fedtta.client.agent.light.CHILD", stub_child.__name__)
    copy_of(trained[0], tmp_path / "copy")
    agent = Agent(config(tmp_path, state_dir=str(tmp_path / "copy"), runtime="onnx", adapter="btfl"))
    yield agent
    agent.close()


def copy_of(agent: Agent, folder: Path) -> None:
    """Copy a state directory as if its agent were not running."""
    shutil.copytree(agent.config.state_folder, folder, ignore=shutil.ignore_patterns("*.sock", "lock"))


def refused(agent: Agent) -> None:
    """A new child has got work."""
    with pytest.raises(FloatingPointError, match=stub_child.TEXT):
        agent.perform(Identify(**common()))


def child(agent: Agent) -> subprocess.Popen[bytes]:
    assert isinstance(agent.backend, Light)
    process = agent.backend._children._process
    assert process is not None
    return process


def test_a_training_by_the_child_gives_torchs_model_and_the_state_directory_serves_both(
    trained: tuple[Agent, Evaluate, Evaluated], tmp_path: Path
) -> None:
    agent, _, reply = trained
    heavy = Agent(config(tmp_path, adapter="btfl"))
    expected = train(heavy.perform)[1]
    assert reply.served == expected.served
    assert reply.served.startswith("promoted run1/cross_entropy/2/")
    assert [one.correct for one in reply.results] == [one.correct for one in expected.results]
    first = agent.predict(sample_images()).probabilities
    np.testing.assert_allclose(first, heavy.predict(sample_images()).probabilities, **CLOSE)
    agent.snapshot()
    heavy.close()
    copy_of(agent, tmp_path / "moved")
    again = Agent(config(tmp_path, state_dir=str(tmp_path / "moved"), adapter="btfl"))
    assert again.status().samples == 40
    rows = again.predict(sample_images(40)).probabilities
    again.close()
    np.testing.assert_allclose(agent.predict(sample_images(40)).probabilities, rows, **CLOSE)


def test_what_the_policy_refuses_in_the_child_is_a_policy_error(trained: tuple[Agent, Evaluate, Evaluated]) -> None:
    request = Identify(**{**common(), "settings": common()["settings"].replace('"cnn"', '"resnet20-bn"')})
    assert "resnet20-bn" in request.settings
    with pytest.raises(PolicyError, match="policy models: model = 'resnet20-bn'; allowed is cnn") as raised:
        trained[0].perform(request)
    assert raised.value.rule == "models"


def test_a_killed_child_fails_its_work_and_the_agent_goes_on(beside_a_stub: Agent) -> None:
    agent = beside_a_stub
    failed: list[Exception] = []

    def work() -> None:
        try:
            agent.perform(Train(round=3, task=TASK, arrays=initial(), **common("run2")))
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    refused(agent)
    before = child(agent)
    thread.start()
    until(lambda: stub_child.BEGUN in agent.status().notes)
    assert agent.status().training
    position = agent.predict(sample_images(0, 3)).position
    before.kill()
    thread.join(60)
    assert [str(error) for error in failed] == ["answer: the training process ended with signal SIGKILL"]
    assert agent.predict(sample_images(0, 3)).position == position + 3
    last = list(lines(agent.config.state_folder))[-1]
    assert (last["phase"], last["result"]) == ("train", "RuntimeError")
    refused(agent)
    assert child(agent).pid != before.pid


def test_a_deadline_kills_the_child(beside_a_stub: Agent) -> None:
    refused(beside_a_stub)
    process = child(beside_a_stub)
    with pytest.raises(Stopped):
        beside_a_stub.perform(Identify(**common()), Deadline(0.2))
    assert process.poll() == -signal.SIGKILL


def test_a_child_without_work_ends_and_the_next_work_starts_another(
    beside_a_stub: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedtta.client.agent.light.IDLE", 0.1)
    refused(beside_a_stub)
    until(lambda: beside_a_stub.backend._children._process is None)  # type: ignore[attr-defined]
    refused(beside_a_stub)


def test_without_pytorch_work_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(config(tmp_path, runtime="onnx", adapter="btfl"))
    monkeypatch.setattr("fedtta.client.agent.light.find_spec", {}.get)
    with pytest.raises(RuntimeError, match="answer: needs PyTorch, which is not installed here"):
        agent.perform(Identify(**common()))
    agent.close()


def test_without_pytorch_an_agent_starts_with_the_model_that_it_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, row = Store(tmp_path / "state", 1, print), AdapterRow("btfl", "btfl")
    for origin in ("r/t/1", "r/t/2"):
        store.add(replace(made("cnn"), row=row, origin=origin), "served")
    export_encoder(made("cnn").network, (3, SIZE, SIZE), tmp_path / "state/models/1" / NETWORK)
    store.close()
    (tmp_path / "new.safetensors").touch()
    monkeypatch.setattr("fedtta.client.agent.light.find_spec", {"onnxruntime": True}.get)
    agent = Agent(config(tmp_path, runtime="onnx", adapter="btfl", model=str(tmp_path / "new.safetensors")))
    notes = " ".join(agent.status().notes)
    assert agent.status().version.startswith("r/t/1/")
    assert f"model refused: there is no file {tmp_path}/state/models/2/{ENCODER}; export: needs PyTorch" in notes
    assert "new.safetensors is not served: file: needs PyTorch" in notes
    agent.close()


def test_without_pytorch_a_damaged_file_of_a_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No export makes the network's own file again."""
    store = Store(tmp_path / "state", 1, print)
    store.add(replace(made("cnn"), row=AdapterRow("btfl", "btfl"), origin="r/t/1"), "served")
    store.close()
    network = tmp_path / "state/models/1" / NETWORK
    network.write_bytes(network.read_bytes()[:-1])
    monkeypatch.setattr("fedtta.client.agent.light.find_spec", {"onnxruntime": True}.get)
    agent = Agent(config(tmp_path, runtime="onnx", adapter="btfl"))
    assert any(note.startswith(f"model refused: {network}: corrupt") for note in agent.status().notes)
    agent.close()


@pytest.mark.parametrize("both", ["cnn"], indirect=True)
def test_a_model_that_could_not_be_stored_is_stored_later(
    both: tuple[Served, Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, served = Store(tmp_path, 1, print, load=Exported.load), Exported.load(both[1].network.path.parent)
    with monkeypatch.context() as full:
        full.setattr("fedtta.client.agent.store.write_atomically", lambda *_: open("/no/such/folder"))  # noqa: SIM115, PTH123
        with pytest.raises(OSError, match="No such file"):
            store.add(served, "served")
    store.add(served, "served")
    store.refit(replace(served, origin="r/t/2"))  # which removes the folder of the first one
    assert replace(served, origin="r/t/2").digest() == store.load_model().digest()  # type: ignore[union-attr]
    store.close()


def test_a_reply_of_the_child_counts_although_its_model_cannot_be_read(
    trained: tuple[Agent, Evaluate, Evaluated], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Light, "_offer", failing)
    reply = trained[0].perform(trained[1])
    assert isinstance(reply, Evaluated)
    assert reply.served == "refused: no space"


@pytest.mark.parametrize("both", ["cnn"], indirect=True)
@pytest.mark.parametrize("damage", ["missing", "cut", "of another model"])
def test_an_export_that_is_missing_or_damaged_is_made_again(
    trained: tuple[Agent, Evaluate, Evaluated], damage: str, both: tuple[Served, Exported]
) -> None:
    agent = trained[0]
    folder = next((agent.config.state_folder / "models").iterdir())
    path = folder / ENCODER
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(good[:-9] if damage == "cut" else both[1].network.path.with_name(ENCODER).read_bytes())
    with pytest.raises((ValueError, FileNotFoundError), match=ENCODER):
        Exported.load(folder)
    agent.backend.load(folder)
    assert path.read_bytes() == good


def test_an_export_in_float32_does_not_need_the_data(tmp_path: Path) -> None:
    """Which may be on a disk that is not there yet: the model is there, and is served."""
    made("cnn").save(tmp_path / "model")
    away = Child(config(tmp_path, runtime="onnx", adapter="btfl", data=f"folder:{tmp_path}/away"), print)
    away.export({"folder": str(tmp_path / "model")}, b"")
    assert Exported.load(tmp_path / "model").classes == made("cnn").classes
