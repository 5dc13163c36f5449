"""Images, compose file and units: commands exist and take their flags, and rules that keep images safe and small."""

from __future__ import annotations

import ast
import configparser
import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.common.config import parse_config_args
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from fedtta.client.agent import __main__ as agent
from fedtta.client.config import AgentConfig
from fedtta.settings import SettingsError
from fedtta.simulation import deployment, devices, submit, superlink
from fedtta.simulation.keys import Keys, make_keys
from fedtta.simulation.superlink import PROJECT

DOCKER = PROJECT / "docker"
IMAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCKER.glob("Dockerfile.*"))}
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
NODES = range(3)
KEYS = Keys(Path("/keys"))
TOKEN = "watch.token"  # which a command of docker/README.md makes
PACKAGES = {
    "server": {
        "settings",
        "messages",
        "privacy",
        "data",
        "models",
        "tta",
        "strategies",
        "client",
        "server",
        "simulation",
        "watch",
    },
    "client": {"settings", "messages", "privacy", "data", "models", "tta", "client"},
    "edge": {"settings", "messages", "privacy", "data", "models", "tta", "client"},
}
#: Not needed to run: a download, a device's `hf:` data (flwr-datasets brings both), a module for exported models.
AT_WILL = {
    "flwr_datasets": "data/datasets/cifar.py",
    "datasets": "data/sources/huggingface.py",
    "transformers": "models/modeling_fedtta.py",
    "onnxruntime": "models/exported.py",
}
EXTRAS: dict[str, list[str]] = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
#: Distributions of the extras for users, which a function may import and say what is missing.
OPTIONAL = {re.split(r"[^\w-]", one)[0] for extra in EXTRAS.keys() - {"dev", "docs"} for one in EXTRAS[extra]}
DISTRIBUTIONS = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
}


class Unit(configparser.RawConfigParser):
    """A systemd unit: keys keep their case, and a line may go on."""

    def __init__(self, name: str) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",), interpolation=None)
        self.optionxform = str  # type: ignore[assignment, method-assign]
        text = (DOCKER / "systemd" / name).read_text(encoding="utf-8")
        self.read_string(re.sub(r"\\\n\s*", " ", text))


def flags(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if word.startswith("--")}


def instructions(text: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of a Dockerfile."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def check_flwr(words: list[str]) -> Any:
    """Parse a command of Flower's as Flower does; an unknown flag ends the process, and with it the test."""
    if words[1:4] == ["-m", "fedtta", "supernode"]:  # which takes what `flower-supernode` takes
        words = words[3:]
    parsers = {
        "flower-superlink": _parse_args_run_superlink,
        "flower-supernode": _parse_args_run_supernode,
        "supernode": _parse_args_run_supernode,
    }
    parsed, unknown = parsers[Path(words[0]).name]().parse_known_args(words[1:])
    assert unknown == []
    return parsed


# --- compose ---


def test_compose_names_only_what_it_declares() -> None:
    for name, service in SERVICES.items():
        for secret in service.get("secrets", []):
            assert secret in COMPOSE["secrets"], name
        for config in service.get("configs", []):
            assert config["source"] in COMPOSE["configs"], name
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in COMPOSE["volumes"], name
        for network in service.get("networks", []):
            assert network in COMPOSE["networks"], name
        for other, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], (name, other)
            assert other in SERVICES, name
        if "build" in service:
            assert (PROJECT / service["build"]["dockerfile"].split(":-")[-1].rstrip("}")).is_file(), name
        else:  # by a tag that is no moving one, or by what the variable names, which may have a digest
            assert re.fullmatch(r"\$\{[A-Z]+:-\w+/\w+:v?\d+\.\d+\.\d+\}", service["image"]), name
    assert DOCKER / COMPOSE["x-server"]["build"]["context"] == DOCKER / ".."


def test_secrets_are_the_files_that_make_keys_makes(tmp_path: Path) -> None:
    keys, _ = make_keys(tmp_path, len(NODES))
    for name, secret in COMPOSE["secrets"].items():
        folder, file = secret["file"].rsplit("/", 1)
        assert folder == "../keys"
        assert file == name
        assert (keys.folder / file).is_file() or file == TOKEN


def test_every_file_that_a_command_names_is_mounted_there() -> None:
    for name, service in SERVICES.items():
        files = [COMPOSE["configs"][one["source"]].get("file") for one in service.get("configs", [])]
        words = [*service.get("command", []), *((DOCKER / file).read_text() for file in files if file)]
        named = {found for word in words for found in re.findall(r"/run/secrets/[\w.-]+", word)}
        assert named == {f"/run/secrets/{secret}" for secret in service.get("secrets", [])}, name


def test_the_superlink_is_started_as_the_local_deployment_starts_it() -> None:
    words = SERVICES["superlink"]["command"]
    local = superlink.superlink_command("0.0.0.0", 8000, "0.0.0.0:9092", KEYS)
    assert flags(words) == flags(local) | {"--database", "--health-server-address"}
    parsed = check_flwr(words)
    assert parsed.enable_supernode_auth
    assert not parsed.insecure
    assert (parsed.host, parsed.port, parsed.fleet_api_address) == ("0.0.0.0", 8000, "0.0.0.0:9092")
    # nodes may come from elsewhere; what may run anything on them may not
    assert SERVICES["superlink"]["ports"] == ["9092:9092"]
    published = [port for name, service in SERVICES.items() if name != "superlink" for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("i", NODES)
def test_a_supernode_is_started_as_the_local_deployment_starts_it(i: int) -> None:
    words = SERVICES[f"supernode-{i}"]["command"]
    local = deployment.supernode_command("superlink:9092", 9094, {}, (KEYS.ca, KEYS.node(i)[0]))
    assert flags(words) == flags(local) | {"--health-server-address"}
    parsed = check_flwr(words)
    assert not parsed.insecure
    assert parsed.superlink == "superlink:9092"
    config = parse_config_args([parsed.node_config])
    assert config == {"name": str(i), "agent": "unix:/run/fedtta/relay.sock"}
    assert SERVICES[f"supernode-{i}"]["restart"] == "always"


@pytest.mark.parametrize("i", NODES)
def test_an_agent_has_a_config_that_it_takes_and_shares_only_its_relay(i: int) -> None:
    service = SERVICES[f"agent-{i}"]
    (config,) = service["configs"]
    found = AgentConfig.from_mapping(
        tomllib.loads(COMPOSE["configs"][config["source"]]["content"]), Path("/etc/fedtta")
    )
    assert found.name == str(i)
    words = service["command"]
    assert words[:3] == ["python", "-m", "fedtta.client.agent"]
    assert words[3:] == ["--config", config["target"]]
    assert found.listen_address in service["healthcheck"]["test"]
    assert service["network_mode"] == "none"
    mounts = dict(volume.split(":") for volume in service["volumes"])
    assert found.state_dir == mounts[f"agent-{i}"]
    assert found.listen_address.startswith(f"unix:{mounts[f'predict-{i}']}/")
    shared = set(service["volumes"]) & set(SERVICES[f"supernode-{i}"]["volumes"])
    assert shared == {f"relay-{i}:/run/fedtta"}
    assert found.relay_address == "unix:/run/fedtta/relay.sock"


def test_a_volume_is_one_nodes_own() -> None:
    for name in COMPOSE["volumes"]:
        users = {
            user
            for user, service in SERVICES.items()
            if any(v.startswith(f"{name}:") and not v.endswith(":ro") for v in service.get("volumes", []))
        }
        own = "prometheus" if name == "prometheus" else "superlink"
        allowed = {f"agent-{name[-1]}", f"supernode-{name[-1]}"} if name[-1].isdigit() else {own}
        assert users
        assert users <= allowed


@pytest.mark.parametrize(("service", "command"), [("register", "register"), ("run", "run")])
def test_the_operators_commands_parse(
    service: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Any] = []

    def register(home: Path, keys: list[Path], names: list[str]) -> int:
        done.append((names, keys))
        return len(keys)

    monkeypatch.setattr(superlink, "register", register)
    monkeypatch.setattr(devices, "listed", lambda *_: [])
    monkeypatch.setattr(devices, "public_key", lambda _: b"")
    monkeypatch.setattr(superlink, "start", lambda home, config: done.append(config))
    monkeypatch.setattr(superlink, "finish", lambda *_, **__: None)
    words = SERVICES[service]["command"]
    assert words[:3] == ["python", "-m", "fedtta.simulation.submit"]
    (ca := tmp_path / "ca.crt").touch()
    assert submit.main([word.replace("/run/secrets/ca.crt", str(ca)) for word in words[3:]]) == 0
    capsys.readouterr()
    (seen,) = done
    if command == "register":
        names = [tomllib.loads(COMPOSE["configs"][f"device-{i}"]["content"])["name"] for i in NODES]
        assert seen == (names, [Path(f"/run/secrets/node-{i}.pub") for i in NODES])
    else:
        assert seen["clients"] == len(NODES)
        assert seen["results"] in dict(volume.split(":") for volume in SERVICES["superlink"]["volumes"]).values()


def test_services_restart_are_watched_and_hold_no_more_rights_than_needed() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert "restart" in service, name
        if name not in ("register", "run"):
            assert service["restart"] in ("always", "unless-stopped"), name
        if name not in ("register", "run", "devices"):  # which nothing asks
            ours = ["CMD", "python", "/app/docker/health.py"]
            assert service["healthcheck"]["test"][:3] == ours or "build" not in service, name


def test_health_checks_ask_where_something_listens() -> None:
    for name, service in SERVICES.items():
        address = service.get("healthcheck", {}).get("test", [""])[-1]
        if address.startswith("127"):
            assert f"--health-server-address={address}" in service["command"], name


# --- images ---


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_obeys_the_rules(name: str) -> None:
    steps = instructions(IMAGES[name])
    kinds = [kind for kind, _ in steps]
    assert set(kinds) <= {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD"}  # no ADD, no EXPOSE, no VOLUME
    stages = [words.split()[-1] for kind, words in steps if kind == "FROM" and " AS " in words]
    for kind, words in steps:
        if kind == "FROM":  # what may be a digest; packages may be installed on the builder's own architecture
            base = re.sub(r"^--platform=\$\{(BUILD|TARGET)PLATFORM\} | AS build$", "", words)
            assert base in ("${BASE}", "${BUILD_BASE}")
        if kind == "COPY":
            sources = [word for word in words.split()[:-1] if not word.startswith("--")]
            if words.startswith("--from="):
                assert words.split()[0].removeprefix("--from=") in stages
            else:
                assert all(any(PROJECT.glob(source)) and source != "." for source in sources)
        if kind == "RUN":
            assert not re.search(r"\bsudo\b|curl|wget|\bapt|chmod 777", words)
            assert "pip install" not in words  # docker/install.sh does, with hashes
    assert steps[0] == ("ARG", f"BASE={COMPOSE['x-server']['build']['args']['BASE'].split(':-')[1].rstrip('}')}")
    assert re.fullmatch(r"BASE=python:3\.1[12]-slim-[a-z]+", steps[0][1])
    users = [words for kind, words in steps if kind == "USER"]
    assert users == ["fedtta"]
    assert "COPY" not in kinds[kinds.index("USER") :]
    assert kinds[-1] == "CMD"
    # nothing that is one architecture's or one index's
    ours = re.sub(r"--platform=\$\{(BUILD|TARGET)PLATFORM\}", "", IMAGES[name])
    assert not re.search(r"amd64|x86_64|aarch64|--platform|https?://|cu\d\d\d|latest", ours)
    assert [words for kind, words in steps if kind == "ARG" and "TORCH" in words] == ["TORCH_INDEX", "TORCH_FILE"]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_copies_the_packages_that_its_programs_import(name: str) -> None:
    copied = {
        words.split()[0] for kind, words in instructions(IMAGES[name]) if kind == "COPY" and words.split()[0] in known()
    }
    assert copied == PACKAGES[name.removeprefix("Dockerfile.")]
    for package in sorted(copied):
        missing = {other for _, other, _ in imports(package) if other in known()} - copied
        assert not missing, package


@pytest.mark.parametrize("name", IMAGES)
def test_what_an_image_copies_enters_the_build_and_nothing_else_does(name: str) -> None:
    lines = (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    allowed = [line[1:] for line in lines if line.startswith("!")]
    for kind, words in instructions(IMAGES[name]):
        if kind == "COPY" and not words.startswith("--from"):
            for source in words.split()[:-1]:
                assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source
    assert not {"keys", "results", ".git", ".venv", "docker", "tests"} & set(allowed)


@lru_cache(None)
def known() -> set[str]:
    return {path.parent.name for path in PROJECT.glob("*/__init__.py")} - {"fedtta", "tests"}


@lru_cache(None)
def imports(ours: str) -> set[tuple[str, str, bool]]:
    """Return (file, package, whether it is imported inside a function) of all absolute imports of one of ours."""
    found = set()
    for path in (PROJECT / ours).rglob("*.py"):
        left: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), False)]
        while left:
            node, inside = left.pop()
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [f"fedtta.{each.name}" for each in node.names] if node.module == "fedtta" else [node.module]
            names = [name.removeprefix("fedtta.") for name in names]
            file = str(path.relative_to(PROJECT))
            found |= {(file, name.split(".")[0], inside) for name in names}
            inside = inside or isinstance(node, ast.FunctionDef)
            below = (getattr(node, field, ()) for field in ("body", "orelse", "finalbody", "handlers", "cases"))
            left += [(one, inside) for part in below if isinstance(part, list) for one in part]
    return found


def pins(name: str) -> set[str]:
    lines = (PROJECT / name).read_text(encoding="utf-8").splitlines()
    return {line.rstrip(" \\") for line in lines if re.match(r"[a-z0-9]", line)}


@pytest.mark.parametrize("name", ["edge", "light", "server"])
def test_an_images_requirements_are_pinned_as_the_projects(name: str) -> None:
    ours = pins(f"requirements-{name}.txt")
    assert len(ours) > (15 if name == "light" else 50)
    assert ours <= pins("requirements.txt")
    names = {pin.split("==")[0] for pin in ours}
    assert name != "light" or "flwr" not in names
    assert not {pin for pin in names if re.match(r"torch|triton|nvidia|cuda|ray$|pytest|mypy|ruff", pin)}
    asked = {line for line in (DOCKER / f"{name}.in").read_text(encoding="utf-8").splitlines() if line[0] not in "#-"}
    assert {word for word in asked if not word.startswith("torch")} <= names


@pytest.mark.parametrize("name", ["edge", "server"])
def test_what_an_image_imports_is_required(name: str) -> None:
    asked = set()
    for part in {"edge", name}:
        asked |= set((DOCKER / f"{part}.in").read_text(encoding="utf-8").split())
    ours = known() | set(sys.stdlib_module_names) | {"__future__", "fedtta"}
    for copied in PACKAGES[name] - {"simulation"}:  # of which only what needs no Ray is used
        for path, package, inside in imports(copied):
            distribution = DISTRIBUTIONS.get(package, package.replace("_", "-"))
            optional = AT_WILL.get(package) == path or (inside and distribution in OPTIONAL)
            assert package in ours or distribution in asked or optional, (path, package)


def test_a_device_reads_dicom_without_an_extra() -> None:
    assert {re.split(r"[^\w-]", one)[0] for one in EXTRAS["dicom"]} <= {
        pin.split("==")[0] for pin in pins("requirements-edge.txt")
    }


# --- systemd ---


@pytest.mark.parametrize("name", ["agent", "supernode"])
def test_a_unit_starts_what_install_sh_leaves_there(name: str) -> None:
    """The project is not installed: there is no command `fedtta`, and its package is found in the folder."""
    service = Unit(f"fedtta-{name}.service")["Service"]
    assert shlex.split(service["ExecStart"])[:2] == ["/opt/fedtta/.venv/bin/python", "-m"]
    assert service["WorkingDirectory"] == "/opt/fedtta"


def test_the_supernodes_unit_runs_what_flower_takes() -> None:
    unit = Unit("fedtta-supernode.service")
    words = shlex.split(unit["Service"]["ExecStart"])
    values = {
        "${SUPERLINK}": "fl.example.org:9092",
        "${NAME}": "site-a",
        "%d": "/run/credentials",
        "$OPTIONS": "--trusted-entities=/etc/fedtta/trusted.yaml",
    }
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    local = deployment.supernode_command("x:1", 9094, {}, (KEYS.ca, KEYS.node(1)[0]))
    assert flags(words) == flags(local) | {"--trusted-entities"}
    parsed = check_flwr(words)
    config = parse_config_args([parsed.node_config])
    assert config == {"name": "site-a", "agent": "unix:/run/fedtta/relay.sock"}
    assert "LoadCredential" in unit["Service"]


def test_the_supernode_never_gives_up() -> None:
    unit = Unit("fedtta-supernode.service")
    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Service"]["RestartSec"] == "65"
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"


def test_what_the_agent_keeps_is_out_of_the_supernodes_reach() -> None:
    """Test_units runs the agent under its unit; here is what the units have in common, and what they have not."""
    node, own = Unit("fedtta-supernode.service")["Service"], Unit("fedtta-agent.service")["Service"]
    hidden = [path.lstrip("-") for path in node["InaccessiblePaths"].split()]
    assert hidden == [f"/var/lib/{own['StateDirectory']}", "/run/fedtta-predict", "/etc/fedtta/device.toml"]
    assert own["RuntimeDirectory"].split() == ["fedtta", "fedtta-predict"]
    assert own["Restart"] == "on-failure"
    assert (own["User"], own["Group"]) != (node["User"], node["Group"])
    assert {own["User"], own["Group"]} & {node["User"], node["Group"]} == set()
    assert own["SupplementaryGroups"] == node["SupplementaryGroups"] == "fedtta-relay"
    config = tomllib.loads(re.findall(r"```toml\n(.*?)```", (DOCKER / "README.md").read_text(), flags=re.DOTALL)[0])
    assert config["relay-group"] == "fedtta-relay"


#: What every unit states, as systemd's manual recommends for a service that needs no privileges.
HARDENED = {
    "NoNewPrivileges": "yes", "CapabilityBoundingSet": "", "ProtectProc": "invisible", "ProcSubset": "pid",
    "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes", "PrivateDevices": "yes",
    "SystemCallFilter": "@system-service", "SystemCallArchitectures": "native", "SystemCallErrorNumber": "EPERM",
    "RestrictNamespaces": "yes", "RestrictSUIDSGID": "yes", "LimitCORE": "0", "UMask": "0077",
    "StateDirectoryMode": "0700",
}  # fmt: skip


@pytest.mark.parametrize("name", ["agent", "supernode"])
def test_a_unit_holds_no_more_rights_than_it_needs(name: str) -> None:
    service = Unit(f"fedtta-{name}.service")["Service"]
    assert {key: service.get(key) for key in HARDENED} == HARDENED
    assert re.fullmatch(r"\d+(%|[MG])", service["MemoryMax"])
    assert service["OOMPolicy"] == "continue"  # or systemd ends the unit where one of its processes is killed
    assert int(service["TasksMax"]) > 0


def test_the_agents_unit_runs_the_agent(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(Unit("fedtta-agent.service")["Service"]["ExecStart"])
    assert words[1:] == ["-m", "fedtta.client.agent", "--config", "/etc/fedtta/device.toml"]
    with pytest.raises(SystemExit) as ended:
        agent.main(["--help"])
    assert ended.value.code == 0
    assert "--config" in capsys.readouterr().out


def test_the_readmes_agent_config_is_one(tmp_path: Path) -> None:
    text = (DOCKER / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        AgentConfig.from_mapping(tomllib.loads(block), tmp_path)
    with pytest.raises(SettingsError):
        AgentConfig.from_mapping(tomllib.loads(blocks[0]) | {"naem": "1"}, tmp_path)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("name", ["fedtta-agent.service", "fedtta-supernode.service"])
def test_systemd_reads_the_units(name: str) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(DOCKER / "systemd" / name)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if name in line and "is not executable" not in line]
    assert complaints == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize(("name", "exposure"), [("fedtta-agent.service", 1.0), ("fedtta-supernode.service", 2.0)])
def test_systemd_calls_the_units_safe(name: str, exposure: float, capsys: pytest.CaptureFixture[str]) -> None:
    """0 is the least exposure and 10 the most; the report is printed."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--no-pager", "--offline=true", str(DOCKER / "systemd" / name)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    with capsys.disabled():
        print("", *(line for line in done.stdout.splitlines() if line.startswith(("✗", "→"))), sep="\n")
    (score,) = re.findall(r"exposure level for .*: ([\d.]+)", done.stdout)
    assert float(score) <= exposure
