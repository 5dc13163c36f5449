"""The documentation: each command it shows is run by something, its tables hold what the code and the results say."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from click import Group, UsageError
from flwr.common.config import parse_config_args
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from PIL import Image
from rich.console import Console
from typer.main import get_command

from docs import figure, generated, markdown
from fedtta import cli
from fedtta.benchmarks.__main__ import parser as benchmarks_parser
from fedtta.benchmarks.gpu.parts import PARTS as GPU_PARTS
from fedtta.benchmarks.speed.command import PARTS
from fedtta.benchmarks.tables.protocol import select_cells
from fedtta.benchmarks.tables.protocol_file import read_protocol
from fedtta.client.config import AgentConfig
from fedtta.client.names import check_name
from fedtta.data.sources import __main__ as sources
from fedtta.data.sources.__main__ import parser as sources_parser
from fedtta.models import build, export, save_model
from fedtta.server.methods import METHODS, plan
from fedtta.server.trainings import TRAININGS
from fedtta.settings import Settings, SettingsError, from_arguments, keys_in, parse_class_map
from fedtta.settings.names import is_loopback
from fedtta.simulation import deploy_local, flower_cli, keys, superlink
from fedtta.simulation.__main__ import make_parser
from fedtta.simulation.demo import __main__ as demo
from fedtta.tta.registry import ADAPTERS
from fedtta.watch.__main__ import address
from fedtta.watch.__main__ import parser as watch_parser
from tests.client.agent import fake

ROOT = Path(__file__).parent.parent
WRITTEN = sorted((ROOT / "docs").rglob("*.md"))
VARIABLES = ("ARGS", "DATASET", "METHODS")
SHOWN = [ROOT / "README.md", ROOT / "docker" / "README.md", *WRITTEN]


def blocks(language: str) -> Iterator[str]:
    """Every fenced block of a language, those of a list without their indentation."""
    for page in SHOWN:
        for found in re.finditer(rf"^( *)```{language}\n(.*?)^\1```$", page.read_text(), re.DOTALL | re.MULTILINE):
            yield textwrap.dedent(found[2])


def commands() -> list[str]:
    """Every command of the shell blocks, continued lines joined, comments removed."""
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    words = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    return sorted({line for line in words if line and not line.startswith("export ")})


# What runs the commands


def settings_of(words: list[str], tmp_path: Path) -> Settings:
    """The settings of a simulation's command line; a placeholder's settings file is made."""
    (tmp_path / "settings.toml").write_text("seed = 1\n")
    words = [str(tmp_path / "settings.toml") if "<run>/settings.toml" in word else word for word in words]
    return from_arguments(make_parser().parse_args(words))


def of_make(command: str) -> list[str]:
    """What a make target would call, as words; variables of a `make` that runs the tests do not count."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key not in VARIABLES}
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", ".venv/ready", *shlex.split(command)[1:]],
        cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return shlex.split(done.stdout.replace("\\\n", " ").splitlines()[-1])


def simulation_plans(command: str, tmp_path: Path) -> None:
    """Every setting is allowed and every row fits the network, the clients and the aggregation."""
    words = of_make(command) if command.startswith("make") else shlex.split(command)
    plan(settings_of(words[words.index("run" if "fedtta" in words else "fedtta.simulation") + 1 :], tmp_path))


def deploys(command: str, tmp_path: Path) -> None:
    deploy_local.parse(of_make(command)[4:])


def through_flower(command: str, tmp_path: Path) -> None:
    flower_cli.parse(of_make(command)[3:])


def keys_are_made(command: str, tmp_path: Path) -> None:
    make_the_keys(of_make(command)[4:], tmp_path)


def make_the_keys(words: list[str], tmp_path: Path) -> None:
    words = [*words, "--folder", str(tmp_path / "keys")]
    if "--replace" in words:
        keys.main(["--nodes", "1", "--folder", str(tmp_path / "keys")])
    assert keys.main(words) == 0
    assert (tmp_path / "keys" / "server.crt").is_file()


def supernode_parses(command: str, tmp_path: Path) -> None:
    """The options exist; beside an agent, whose file has the other keys, the node config holds the name only."""
    arguments, unknown = _parse_args_run_supernode().parse_known_args(shlex.split(command)[2:])
    assert unknown == []
    config = parse_config_args([arguments.node_config])
    check_name(str(config["name"]))
    parse_class_map(str(config.get("class-map", "")))
    own: set[str] = set() if "agent" in config else {"data", "class-map", "role", *keys_in("node")}
    assert set(config) - {"name", "agent"} <= own


def superlink_parses(command: str, tmp_path: Path) -> None:
    """The options are those of the SuperLinks that are started here, with a database."""
    words = shlex.split(command)
    assert _parse_args_run_superlink().parse_known_args(words[1:])[1] == []
    made = keys.Keys(Path("keys"))
    started = superlink.superlink_command("0.0.0.0", 8000, "0.0.0.0:9092", made)
    assert set(words[1:]) - set(started) == {"--database", "superlink.db"}


def benchmark_arguments(words: list[str]) -> None:
    """The verb and its options exist, and so do protocol and cells, or the parts."""
    arguments = benchmarks_parser().parse_args(words)
    parts = set(GPU_PARTS if arguments.command == "gpu" else PARTS)
    assert set(filter(None, getattr(arguments, "parts", "").split(","))) <= parts
    if name := getattr(arguments, "protocol", None):
        select_cells(read_protocol(name), [cell for cell in (arguments.cells or "").split(",") if cell])


def run_config_parses(command: str, tmp_path: Path) -> None:
    """What follows --run-config are settings."""
    words = shlex.split(command)
    pairs = re.findall(r"([\w-]+)=('[^']*'|\S+)", words[words.index("--run-config") + 1])
    assert pairs
    superlink.run_config([f"{key}={value}" for key, value in pairs], {})


def settings_are_allowed(words: list[str], tmp_path: Path) -> None:
    superlink.run_config([word for word in words if "=" in word and not word.startswith("--")], {})


def data_are_shown(words: list[str], tmp_path: Path) -> None:
    """The options exist; a folder that has the classes in its place is shown."""
    given = sources_parser().parse_args(words)
    classes = given.classes.split(",")
    for name in classes:
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8), len(name)).save(tmp_path / name / "one.png")
    assert sources.main([f"folder:{tmp_path}", *words[1:]], Console(quiet=True)) == 0


def export_is_written(words: list[str], tmp_path: Path) -> None:
    """The format exists, and a run's model becomes a file of it."""
    save_model(tmp_path / "model.safetensors", build("cnn", num_classes=2), {"name": "cnn", "num_classes": 2})
    out = tmp_path / words[words.index("--out") + 1]
    assert export.main([str(tmp_path), *words[1 : words.index("--out")], "--out", str(out)]) == 0
    assert out.exists()


def check_watch(words: list[str]) -> None:
    """The address is allowed with these options."""
    options = watch_parser().parse_args(words)
    assert is_loopback(address(options.listen)[0]) or (options.token_file and options.certificate and options.key)


#: What reads the words of the commands that hand them on to a program.
PROGRAMS: dict[str, Callable[[list[str], Path], None]] = {
    "run": lambda words, tmp_path: simulation_plans(shlex.join(["fedtta", "run", *words]), tmp_path),
    "bench": lambda words, tmp_path: benchmark_arguments(words),
    "keys": make_the_keys,
    "submit": settings_are_allowed,
    "data": data_are_shown,
    "export": export_is_written,
    "watch": lambda words, tmp_path: check_watch(words),
}


def fedtta_takes(command: str, tmp_path: Path) -> None:
    """The command exists and takes these words, and so does the program that it hands them to."""
    node: Any = get_command(cli.app)
    name, *words = shlex.split(command)[1:]
    if "--help" in words:
        fedtta_helps(command)
        return
    if name in PROGRAMS:
        PROGRAMS[name](words, tmp_path)
    node, words = node.commands[name], list(words)
    while isinstance(node, Group) and words[0] in node.commands:
        node = node.commands[words.pop(0)]
    context = node.make_context(command, words)
    if name == "settings":
        context.invoke(node.callback, **context.params)


def fedtta_helps(command: str) -> None:
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert shlex.split(command)[1] in done.stdout


def alias_works(command: str, tmp_path: Path) -> None:
    """What the alias stands for shows a setting, in the folder of the checkout."""
    words = shlex.split(shlex.split(command)[1].partition("=")[2])
    assert words[0] == ".venv/bin/python"
    done = subprocess.run(
        [sys.executable, *words[1:], "settings", "rounds"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert "rounds" in done.stdout


def extras_exist(command: str, tmp_path: Path) -> None:
    """What pip is asked for is this folder, with extras that there are."""
    where, _, extras = shlex.split(command)[2].partition("[")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert where == "."
    assert set(filter(None, extras.rstrip("]").split(","))) <= set(known)


def events_exist(command: str, tmp_path: Path) -> None:
    """The log has lines of the event that jq selects."""
    (event,) = re.findall(r'\.event=="(.+?)"', command)
    code = "".join(path.read_text() for path in (ROOT / "client" / "agent").glob("*.py"))
    assert f'log.write("{event}"' in code


def gpu_takes(command: str, tmp_path: Path) -> None:
    """The options exist."""
    words = of_make(command)
    benchmark_arguments(words[words.index("bench") + 1 :])


def demo_takes(command: str, tmp_path: Path) -> None:
    """The demo has these options: with too few rounds it refuses nothing else."""
    words = of_make(command)[4:]
    assert demo.main([*words, "--rounds", "1"]) == 2


def script_exists(command: str, tmp_path: Path) -> None:
    assert (ROOT / of_make(command)[0]).is_file()


def nothing(command: str, tmp_path: Path) -> None:
    pass


class Proof(NamedTuple):
    """A command's beginning, what this test does with it, and the words by which a file or folder runs it."""

    begins: str
    here: Callable[[str, Path], None] = nothing
    place: str = ""
    words: str = ""


PROOFS = (
    Proof("make run", simulation_plans, ".ci/run", "make run"),
    Proof("make test-faults", place=".ci/run", words="make test-faults"),
    Proof("make test", place=".ci/run", words="make test"),
    Proof("make docs", place=".ci/run", words="make docs"),
    Proof("make screenshots", place="tests/browser/test_pages.py", words="screenshots.take"),
    Proof("make sheet", place="tests/data", words="contact_sheet"),
    Proof("make deploy-local", deploys, ".ci/run", "make deploy-local"),
    Proof("make flower", through_flower, "tests/integration", "fedtta.simulation.flower_cli"),
    Proof("make keys", keys_are_made),
    Proof("make torch-hashes", place="tests/docker", words='"torch-hashes"'),
    Proof("flwr run", run_config_parses, "simulation", '"run", str(app)'),
    Proof("flower-superlink", superlink_parses, "tests/docker", "test_the_superlink_is_started_as_the_local"),
    Proof("flwr ls", place="tests/integration", words='"ls"'),
    Proof("fedtta supernode", supernode_parses, "simulation", '"-m", "fedtta", "supernode"'),
    Proof("make base-image", script_exists, "docker/README.md", "localhost/fedtta-base"),
    Proof("make images", script_exists, "tests/docker", 'container("fedtta-server"'),
    Proof("make test-images", script_exists, "tests/docker", "make test-images"),
    Proof("make edge-arm64", script_exists, "tests/docker", "make edge-arm64"),
    Proof("openssl rand -hex 32", place="tests/docker", words="keys/watch.token"),
    Proof("docker compose", place="tests/docker", words="compose.yaml"),
    Proof(".venv/bin/python -m examples.stream_images", place="tests/test_docs.py", words="examples.stream_images"),
    Proof(".venv/bin/python -m examples.predict_folder", place="tests/examples", words="predict_folder"),
    Proof("fedtta agent", fedtta_takes, "tests/client/agent", '"-m", "fedtta.client.agent"'),
    Proof("fedtta report", fedtta_takes, "tests", "fedtta.server.report.__main__ import main"),
    Proof("fedtta devices enrol", fedtta_takes, "tests/simulation", 'fedtta("enrol"'),
    Proof("fedtta devices remove", fedtta_takes, "tests/simulation", 'fedtta("remove"'),
    Proof("fedtta devices --watch", fedtta_takes, "tests/watch", '"--watch"'),
    Proof("fedtta devices --check", fedtta_takes, "tests/watch", '"--check"'),
    Proof("fedtta devices list", fedtta_takes, "tests/simulation", 'fedtta("list"'),
    Proof("fedtta submit", fedtta_takes, "tests/simulation", "submit.main("),
    Proof("fedtta serve", fedtta_takes, "tests/client/agent", "test_a_model_file_is_served_by_a_process_of_its_own"),
    Proof("fedtta rescan", fedtta_takes, "tests/client/agent", "rescan"),
    Proof("fedtta rollback", fedtta_takes, "tests/faults", "rollback("),
    Proof("fedtta ", fedtta_takes, "tests/test_cli.py", "invoke("),
    Proof("make gpu", gpu_takes, ".ci/run", "make gpu"),
    Proof("make demo", demo_takes, ".ci/run", "make demo"),
    Proof("alias ", alias_works),
    Proof("pip install", extras_exist, "tests/test_package.py", "test_the_command_runs_where_only_the_wheel_is"),
    Proof("jq ", events_exist, "tests/client/agent", "agent.log"),
    Proof(".venv/bin/python -m docs.figure", place="tests/test_docs.py", words="figure.drawn"),
)


@pytest.mark.parametrize("command", commands())
def test_every_command_is_run(command: str, tmp_path: Path) -> None:
    proofs = [proof for proof in PROOFS if command.startswith(proof.begins)]
    assert proofs, "nothing runs this command"
    proof = proofs[0]
    proof.here(command, tmp_path)
    place = ROOT / proof.place
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert not proof.place or any(proof.words in file.read_text() for file in files)


def test_a_command_that_does_not_exist_is_noticed(tmp_path: Path) -> None:
    assert len(commands()) > 20
    assert not [proof for proof in PROOFS if "make nothing".startswith(proof.begins)]
    with pytest.raises(ValueError, match="learning-rat"):
        through_flower("make flower ARGS='--set learning-rat=1'", tmp_path)
    with pytest.raises(ValueError, match="unknown method"):
        simulation_plans("make run METHODS=fedavgg", tmp_path)
    with pytest.raises(ValueError, match="cell"):
        benchmark_arguments(["run", "brfl", "--cells", "nowhere"])
    with pytest.raises(AssertionError):
        supernode_parses("fedtta supernode --insecure --node-config 'name=\"a\" partition-id=1'", tmp_path)


@pytest.mark.parametrize("text", dict.fromkeys(blocks("toml")))
def test_every_device_file_is_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "device.toml").write_text(text)
    config = AgentConfig.from_toml(tmp_path / "device.toml")
    assert config.name == "site-a"


@pytest.mark.parametrize("code", dict.fromkeys(blocks("python")))
def test_python_blocks_run(code: str, tmp_path: Path) -> None:
    options = {"name": "cnn", "num_classes": 10}
    save_model(tmp_path / "model.safetensors", build("cnn", num_classes=10), options)
    names: dict[str, Any] = {"images": torch.rand(5, 3, 32, 32)}
    exec(code.replace("results/<run>", str(tmp_path)), names)
    assert names["probabilities"].shape == (5, 10)


def test_the_example_streams_a_folder(tmp_path: Path) -> None:
    for name, value in (("b.png", 51), ("a.png", 102), ("c.txt", 0)):
        Image.fromarray(np.full((4, 4), value, np.uint8)).save(tmp_path / name, format="PNG")
    with fake.running() as (agent, sockets):
        words = [sys.executable, "-m", "examples.stream_images", str(tmp_path), sockets.listen]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == ["a.png a 102.000 e=102.00", "b.png a 51.000 e=51.00"]
    assert len(agent.seen) == 2


# What the pages say


@pytest.mark.parametrize("page", [*SHOWN, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    made = {(ROOT / "docs" / path).resolve() for path in generated.pages()}
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        target = (page.parent / link).resolve()
        assert "://" in link or target.exists() or target in made, link


def test_the_readme_is_short_and_its_images_are_small() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    for path in (ROOT / "docs" / "assets").iterdir():
        assert path.stat().st_size < 150_000
        if path.suffix != ".png":  # of which there is one for each theme
            assert "prefers-color-scheme: dark" in path.read_text()


def test_every_guarantee_names_a_test_that_holds_it() -> None:
    rows = (ROOT / "README.md").read_text().split("| guarantee |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) > 8
    for row in rows:
        proofs = re.findall(r'\]\((tests/\S+\.py) "(test_\w+)"\)', row)
        assert proofs, row
        for path, name in proofs:
            assert f"\ndef {name}(" in (ROOT / path).read_text(), (path, name)


def test_every_written_page_is_in_the_navigation() -> None:
    text = json.dumps(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    listed = {*re.findall(r"[\w/-]+\.md", text), *(path for _, path in generated.navigation("results"))}
    assert {page.relative_to(ROOT / "docs").as_posix() for page in WRITTEN} <= listed


def test_the_figure_and_the_readmes_table_are_the_kept_results() -> None:
    assert (ROOT / "docs/assets/result.svg").read_text() == figure.drawn(figure.points())
    readme = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"^\| ([\w, -]+) \| (.*\d ± \d.*) \|$", readme, re.MULTILINE))
    names = {"FedAvg": "fedavg", "FedAvg, fine-tuned": "fedavg_ft", "personal head": "personal", "BTFL": "btfl"}
    assert set(rows) == {*names, "FedTHE"}
    for label, text in rows.items():
        cells = [cell.strip(" *") for cell in text.split("|")]
        assert cells == kept_row({**names, "FedTHE": "fedthe"}[label]), label


def kept_row(method: str) -> list[str]:
    """Mean ± sd over seeds of each column, the average last."""
    paths = sorted((ROOT / "benchmarks/results/brfl").glob("full-*.json"))
    shifts = ("original", "corrupted", "out_of_client", "mixture")
    kept = [json.loads(path.read_text())["rows"][method]["shifts"] for path in paths]
    values = np.array([[one[shift]["accuracy_percent"] for shift in shifts] for one in kept])
    values = np.column_stack([values, values.mean(1)])
    return [f"{mean:.1f} ± {sd:.1f}" for mean, sd in zip(values.mean(0), values.std(0), strict=True)]


# What is generated


def paths_of(group: Any) -> list[str]:
    """The words of every command that has none below it."""
    below = {name: one for name, one in group.commands.items() if isinstance(one, Group)}
    own = [name for name in group.commands if name not in below]
    return [*own, *(f"{name} {path}" for name, one in below.items() for path in paths_of(one))]


def test_the_references_are_complete() -> None:
    for name, table in (
        ("settings", Settings().flat()), ("methods", METHODS), ("adapters", ADAPTERS), ("trainings", TRAININGS),
        ("commands", [f"fedtta {name}" for name in paths_of(get_command(cli.app))]),
    ):  # fmt: skip
        lines = [line.split(" | ")[0] for line in generated.section(name).splitlines() if line.startswith("| `")]
        assert sorted(lines) == sorted(f"| `{key}`" for key in table), name


def test_a_command_that_fedtta_does_not_take_is_seen(tmp_path: Path) -> None:
    fedtta_takes("fedtta devices list --superlink h:1 --all", tmp_path)
    fedtta_takes("fedtta run --rounds 2 --methods fedavg", tmp_path)
    for wrong in ("fedtta devices list --every", "fedtta device list", "fedtta run --rounds few"):
        with pytest.raises((UsageError, KeyError, SettingsError)):
            fedtta_takes(wrong, tmp_path)
    handed_on = ("submit round=3", "bench speed --parts none", "keys --boxes 3", "data folder:/d --labels a",
                 "export run --format pickle --out x")  # fmt: skip
    for wrong in handed_on:
        with pytest.raises((ValueError, AssertionError, SystemExit)):
            fedtta_takes(f"fedtta {wrong}", tmp_path)


def test_every_marker_has_a_generator_and_others_are_refused() -> None:
    markers = [name for page in WRITTEN for name in re.findall(r"^<!-- generated: (.+?) -->$", page.read_text(), re.M)]
    assert len(markers) > 10
    assert all(generated.section(name) for name in markers)
    with pytest.raises(KeyError, match="settings"):
        generated.section("nothing")


def test_every_kept_result_is_on_a_page() -> None:
    kept = generated.kept()
    everything = "\n".join([*kept.values(), *generated.pages().values(), *(page.read_text() for page in WRITTEN)])
    for path in sorted(generated.RESULTS.rglob("*.json")):
        content = json.loads(path.read_text())
        if "rows" in content:
            assert all(f"`{label}`" in kept[content["protocol"]] for label in content["rows"]), path
        elif path.name == "poisoning.json":
            assert all(f"| {run['case']['attack']} |" in kept["poisoning"] for run in content["measured"])
        elif path.name == "drift.json":
            assert all(f"| {row['values']} | {row['test']} |" in kept["drift"] for row in content["measured"])
        elif path.name == "estimates.json":
            assert all(
                f"| {adapter} | {row['average']} |" in kept["estimates"] for adapter, row in content["adapters"].items()
            )
        elif path.stem in ("speed", "fleet"):
            assert all(f"{row['what']} |" in kept[path.stem] for part in content.values() for row in part["ratios"])
        elif path.name == "gpu.json":
            assert all(
                f"{row['what']} |" in kept["gpu"] for part in content["parts"].values() for row in part["ratios"]
            )
        elif "modes" in content:
            assert all(f"| {row['mode']} |" in generated.section("privacy") for row in content["modes"])
        else:
            assert path.name.endswith(".safetensors.json")
            assert f"Kept arrays: {path.stem}" in everything
    assert all(
        f"generated: kept {name} -->" in everything or f"results/{name}.md" in generated.pages() for name in kept
    )


def test_any_object_is_shown_whole() -> None:
    content: dict[str, Any] = {"unit": "s", "time": "41", "versions": {"torch": "42"}, "flag": True, "none": None}
    content["one"] = {"deep": {"deeper": [11, 12]}}
    content["rows"] = [{"a": 21, "b": {"c": 22}}, {"a": 23, "d": [{"e": 24}]}]
    content["alike"] = {"x": {"n": 31}, "y": {"n": 32}}
    text = markdown.as_markdown(content)
    assert re.findall(r"\b\d\d\b", text) == ["11", "12", "21", "22", "23", "24", "31", "32", "41", "42"]
    assert "| a | b.c | d.0.e |" in text
    assert "- flag: yes" in text
    assert markdown.table(["a"], [["x|y <b> `<b>*`"]]).endswith("| x\\|y &lt;b> `<b>*` |")


def test_api_pages_name_every_public_module() -> None:
    pages = generated.pages()
    assert {f"api/{name}.md" for name in generated.PACKAGES} <= set(pages)
    assert "::: fedtta.tta.btfl\n" in pages["api/tta.md"]
    assert "::: fedtta.messages.transport\n" in pages["api/messages.md"]
    assert "_pb2" not in pages["api/messages.md"]
    assert generated._defined(ROOT / "client/algorithms/__init__.py") == ["ALGORITHMS", "find_algorithm"]
    assert generated._defined(ROOT / "strategies/__init__.py") == []  # what it only re-exports


def test_adapters_that_need_no_training_are_listed() -> None:
    text = (ROOT / "docs/deployment/models.md").read_text()
    (listed,) = re.findall(r"Adapters that need no training fit: (.*?)\.\n", text)
    assert set(re.findall(r"`(\w+)`", listed)) == {
        name for name, adapter in ADAPTERS.items() if adapter.needs <= {"gradients", "batchnorm"}
    }
