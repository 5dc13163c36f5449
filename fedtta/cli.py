"""The command `fedtta`: one name for the programs of all parts.

Each command imports its program only when it is called, so that `fedtta --help` needs neither torch nor Flower. A
program that has a command line of its own gets the words as they are. Exit status: 0, 1 for what failed, 2 for what was
refused.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from click.core import ParameterSource
from typer.core import TyperGroup

TRY, FEDERATION, DEVICE, RESULTS = "Simulate", "Run a federation", "On a device", "Look at results"
WORDS = {"allow_extra_args": True, "ignore_unknown_options": True}  # a program's own parser reads them
#: Settings that `fedtta run --help` shows; `fedtta settings` shows all.
COMMON = ("dataset", "clients", "partition", "model", "methods", "rounds", "local-epochs", "shifts", "seed", "run-name")

#: Options of `fedtta run` that are no settings.
RUN_OPTIONS = ("watch",)


class Group(TyperGroup):
    """Commands whose errors are one line on stderr."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run; the exit status of wrong usage is 2."""
        try:
            status = super().main(*arguments, **options | {"standalone_mode": False})
        except click.ClickException as error:
            where = getattr(error, "ctx", None)
            more = f" (see {where.command_path} --help)" if where else ""
            if text := error.format_message().rstrip("."):  # none where the help was shown
                print(f"error: {text}{more}", file=sys.stderr)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(130)
        sys.exit(status if isinstance(status, int) else 0)


app = typer.Typer(
    cls=Group, no_args_is_help=True, add_completion=False, rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,  # they may be keys, tokens and images, and terminals are logged
    help="Federated learning with test-time adaptation on the device, without labels.",
)  # fmt: skip
devices = typer.Typer(
    cls=Group, no_args_is_help=True, invoke_without_command=True,
    help="The devices of a SuperLink: watch them, list, enrol, remove.",
)  # fmt: skip


def call(module: str, words: Sequence[str]) -> None:
    """Call a program's `main` and exit with its status."""
    try:
        program = import_module(module)
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or "-"):  # an optional package; what it is for says its own message
            raise click.ClickException(str(error)) from error
        raise click.ClickException(f"this installation has no {module}") from error
    try:
        status = program.main(list(words))
    finally:
        sys.stdout.flush()  # here a reader that has ended, such as `head`, is no error
    raise typer.Exit(status)


def checkout() -> None:
    """Refuse what sends the app to nodes where only the package is installed: it is bundled from a checkout."""
    import fedtta

    if not (Path(fedtta.__path__[0]) / "pyproject.toml").is_file():
        raise click.ClickException("this needs a checkout of the project, from which the app is bundled for the nodes")


@contextmanager
def refused() -> Iterator[None]:
    """Turn what the user can change into one line and exit status 2."""
    from fedtta.settings import SettingsError

    try:
        yield
    except (SettingsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


# Commands with settings


def shortened(text: str, width: int) -> str:
    """Return the text, cut at the width."""
    return text if len(text) <= width else text[: width - 2] + " …"


def common_settings() -> str:
    """Return the lines of `fedtta run --help` about settings."""
    from fedtta.settings.schema import fields_by_key

    rows = []
    for key in COMMON:
        field = fields_by_key()[key]
        about, default = field.metadata["help"], shortened(str(field.default) or "none", 20)
        rows.append(f"--{key:13} {shortened(about, 58 - len(default))} [dim]({default})[/dim]")
    return "\n".join(rows)


RUN_HELP = f"""One run: clients train, methods adapt, the results are a table and a report.

Every setting is an option, [bold]--key value[/bold], and wins over the file of --settings. The usual ones:

\b
{common_settings()}

[bold]--watch[/bold] serves a page that follows the run, [bold]--watch 127.0.0.1:9000[/bold] at this address.
[bold]fedtta settings[/bold] lists the groups of settings, [bold]fedtta settings GROUP[/bold] its keys.
Example: fedtta run --dataset digits --methods fedavg,btfl --rounds 5
"""


@app.command(rich_help_panel=TRY, context_settings=WORDS, help=RUN_HELP, short_help="One run on this machine.")
def run(
    context: typer.Context,
    file: Annotated[str, typer.Option("--settings", metavar="FILE", help="TOML file of settings.")] = "",
) -> None:
    """Run a simulation; unknown keys are refused before anything is imported."""
    from fedtta.settings.fields import near
    from fedtta.settings.schema import fields_by_key

    for word in context.args:
        key = word[2:].partition("=")[0]
        if word.startswith("--") and key not in (known := [*fields_by_key(), *RUN_OPTIONS]):
            raise click.UsageError(f"unknown setting {key!r}{near(key, known)}; `fedtta settings` lists all")
    call("fedtta.simulation.__main__", [*(["--settings", file] if file else []), *context.args])


@app.command(rich_help_panel=TRY, short_help="The settings of a run: their groups, or the keys of one.")
def settings(
    group: Annotated[str, typer.Argument(help="A group, or a key; without it, all groups are listed.")] = "",
) -> None:
    """Show the settings of a run: their groups, or the keys of one group."""
    from rich.console import Console
    from rich.table import Table

    from fedtta.settings import GROUPS, keys_in
    from fedtta.settings.fields import near
    from fedtta.settings.schema import fields_by_key

    fields, console = fields_by_key(), Console(markup=False)  # options of methods are in brackets
    if not group:
        table = Table("group", "keys", "what its settings decide", box=None, pad_edge=False)
        for name, about in GROUPS.items():
            table.add_row(name, str(len(keys_in(name))), about)
    elif group in GROUPS or group in fields:
        table = Table("key", "default", "meaning", box=None, pad_edge=False)
        for key in keys_in(group) if group in GROUPS else [group]:
            table.add_row(key, repr(fields[key].default), fields[key].metadata["help"])
    else:
        known = [*GROUPS, *fields]
        raise click.UsageError(f"no group and no key is called {group!r}{near(group, known)}")
    console.print(table)


# Programs with a command line of their own


def program(name: str, module: str, panel: str, about: str) -> None:
    """Add a command that hands all words, `--help` too, to the program of a module."""

    def command(context: typer.Context) -> None:
        if name in ("deploy-local", "sign"):
            checkout()
        call(module, context.args)

    own: Callable[..., Any] = app.command(
        name, help=about, rich_help_panel=panel, add_help_option=False,
        context_settings={**WORDS, "allow_interspersed_args": False},
    )  # fmt: skip
    own(command)


program("demo", "fedtta.simulation.demo.__main__", TRY, "Four sites with data of their own, a shift, and a page.")
program("bench", "fedtta.benchmarks.__main__", TRY, "Tables of the papers, and measurements of speed.")
program("keys", "fedtta.simulation.keys", FEDERATION, "Make the keys and certificates of a federation.")
program("sign", "fedtta.simulation.signing", FEDERATION, "Sign the app: devices that trust the key run no other.")
program("deploy-local", "fedtta.simulation.deploy_local", FEDERATION, "A federation as processes of this machine.")
program("agent", "fedtta.client.agent.__main__", DEVICE, "Run a device's agent: --config device.toml.")
program("supernode", "fedtta.client.supernode", DEVICE, "Flower's SuperNode, with ClientApps that start at once.")
program("audit", "fedtta.client.agent.audit", DEVICE, "What a device was asked, and what left it.")
program("data", "fedtta.data.sources.__main__", DEVICE, "What a device's folder holds: classes, skipped files.")
program("report", "fedtta.server.report.__main__", RESULTS, "Write the table and the report of a run folder again.")
program("watch", "fedtta.watch.__main__", RESULTS, "Pages that follow the runs of a results folder.")
program("export", "fedtta.models.export", RESULTS, "Write a run's model as a file that loads without this project.")


# A federation

SuperLink = Annotated[str, typer.Option("--superlink", metavar="HOST:PORT", help="Its Runtime HTTP API.")]
Root = Annotated[Path, typer.Option("--root-certificates", metavar="FILE", help="ca.crt of `fedtta keys`.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS.")]
LOCAL, CA = "127.0.0.1:8000", Path("keys/ca.crt")


@app.command(rich_help_panel=FEDERATION)
def submit(
    pairs: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Settings of the run.")] = None,
    superlink: SuperLink = LOCAL,
    root: Root = CA,
    timeout: Annotated[
        float | None,
        typer.Option(help=r"Seconds after which the run is stopped. \[default: 86400; a standing run: never]"),
    ] = None,
    supervise: Annotated[
        int, typer.Option(metavar="N", help="Resume, at most so often, a run whose SuperLink or ServerApp died.")
    ] = 0,
    signed: Annotated[str, typer.Option(metavar="FILE", help="Run this bundle of `fedtta sign`.")] = "",
    database: Annotated[str, typer.Option(metavar="FILE", help="With --signed: the SuperLink's database.")] = "",
) -> None:
    """Run the app on a SuperLink that is running, and show its log."""
    checkout()
    words = ["--superlink", superlink, "--root-certificates", str(root), "run"]
    words += [] if timeout is None else ["--timeout", str(timeout)]
    words += ["--supervise", str(supervise)] if supervise else []
    words += [
        word for name, path in (("signed", signed), ("database", database)) if path for word in (f"--{name}", path)
    ]
    call("fedtta.simulation.submit", [*words, *(["--set", *pairs] if pairs else [])])


@devices.callback()
def fleet(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="Show how the devices are, until Ctrl-C.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Show what is known, once; no run is started for it.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Print an alert a line; exit status 1 if there is one, and 0 otherwise.")
    ] = False,
    alerts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --check: the rules, TOML. [default: the default rules]")
    ] = None,
    results: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of run folders, on the SuperLink's machine.")
    ] = Path("results"),
    every: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Between two questions to a device.")] = 30.0,
    superlink: SuperLink = LOCAL,
    root: Root = CA,
    insecure: Insecure = False,
    signed: Annotated[str, typer.Option(metavar="FILE", help="Ask by this bundle of `fedtta sign`.")] = "",
    database: Annotated[str, typer.Option(metavar="FILE", help="With --signed: the SuperLink's database.")] = "",
) -> None:
    """Show the fleet; a standing run asks the devices, which is started if there is none, and stopped at the end."""
    if context.invoked_subcommand is not None:
        return
    if not (watch or once or check):
        raise click.UsageError("allowed are --watch, --once, --check, or a command", context)
    if (check and (watch or once)) or (alerts and not check):
        raise click.UsageError("--check is allowed without --watch and --once, and --alerts with it only", context)
    if bool(signed) != bool(database):
        raise click.UsageError("--signed and --database: allowed are both, or neither", context)
    from rich.console import Console

    from fedtta.simulation import devices as enrolled
    from fedtta.simulation import signing, standing
    from fedtta.simulation import superlink as flower
    from fedtta.simulation.control import certificate_ends
    from fedtta.watch.devices import follow

    ca = None if insecure else root
    if check:
        if not results.is_dir() and context.get_parameter_source("results") is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--results {results}: no such folder; rules about telemetry would find nothing")
        certificate = partial(certificate_ends, superlink) if ca else lambda: None
        check_devices(alerts, results, lambda: enrolled.listed(superlink, ca), certificate)

    def begin(config: Mapping[str, Any]) -> str:
        if signed:
            return signing.start(superlink, ca, Path(database), Path(signed), config)
        checkout()
        with flower.temporary_home(superlink, ca) as home:
            return flower.start(home, config)

    run = standing.Standing(superlink, ca, begin, results, every)
    ensure = (lambda: None) if once else run.ensure
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the run is stopped on the way
    with failing():
        try:
            follow(results, lambda: enrolled.listed(superlink, ca), every, Console(), ensure, once)
        finally:
            run.stop()


def check_devices(
    rules: Path | None, results: Path, listed: Callable[[], Sequence[Any]], certificate: Callable[[], float | None]
) -> None:
    """Print the alerts of the devices and exit: status 1 if there is one, or the SuperLink does not answer."""
    from fedtta.watch.alerting import Alerting
    from fedtta.watch.fleet import history, read_fleet
    from fedtta.watch.rules import Rules

    with failing():
        kept = Rules.from_toml(rules) if rules else Rules()
        fleet = read_fleet(results, listed())
        past = partial(history, results)
        found = Alerting(kept, lambda: fleet, lambda one: past(one.name, node_id=one.key[1]), certificate).look()
        for change in found:
            print(change.alert.line)
        raise typer.Exit(1 if found else 0)


@devices.command("list")
def list_devices(
    superlink: SuperLink = LOCAL,
    root: Root = CA,
    insecure: Insecure = False,
    folder: Annotated[Path | None, typer.Option("--run", help="A run's folder: what each device's data were.")] = None,
    agents: Annotated[
        list[str] | None, typer.Option("--agent", metavar="NAME=unix:PATH", help="Ask this device's agent, too.")
    ] = None,
    gone: Annotated[bool, typer.Option("--all", help="Removed devices, too.")] = False,
) -> None:
    """Show name, node, status, last seen, data and model of every device."""
    from rich.console import Console

    from fedtta.settings import SettingsError
    from fedtta.simulation import devices as enrolled

    asked: dict[str, str] = {}
    for pair in agents or ():
        name, _, address = pair.partition("=")
        if not (name and address) or name in asked:
            raise click.UsageError(f"--agent {pair}: allowed is NAME=unix:PATH, once for each device")
        asked[name] = address
    with failing():
        found = enrolled.listed(superlink, None if insecure else root)
        if unknown := sorted(asked.keys() - {one.name for one in found}):
            raise SettingsError(f"--agent {unknown[0]}=...: no device of this name is enrolled")
        known = enrolled.from_run(folder) if folder else {}
        known |= {name: enrolled.from_agent(address) for name, address in asked.items()}
        Console().print(enrolled.table(found, known, gone))


@devices.command()
def enrol(
    key: Annotated[Path, typer.Argument(help="The device's public key, node-<i>.pub of `fedtta keys`.")],
    name: Annotated[str, typer.Option(help="The device's name in its config. [default: that of the file]")] = "",
    superlink: SuperLink = LOCAL,
    root: Root = CA,
    insecure: Insecure = False,
) -> None:
    """Let a device connect: register its public key under a name."""
    from fedtta.simulation import devices as enrolled

    with failing():
        print(enrolled.enrol(superlink, None if insecure else root, key, name or key.stem))


@devices.command()
def remove(
    device: Annotated[str, typer.Argument(help="A name, or a node id.")],
    superlink: SuperLink = LOCAL,
    root: Root = CA,
    insecure: Insecure = False,
) -> None:
    """Let a device no longer connect; its agent goes on predicting."""
    from fedtta.simulation import devices as enrolled

    with failing():
        print(enrolled.remove(superlink, None if insecure else root, device))


@contextmanager
def failing() -> Iterator[None]:
    """Turn a failed call to a SuperLink or an agent into one line: exit status 1, or 2 for what was refused."""
    from fedtta.simulation.superlink import FlowerError

    with refused():
        try:
            yield
        except FlowerError as error:
            print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(1) from error


app.add_typer(devices, name="devices", rich_help_panel=FEDERATION)


# A device


@app.command(rich_help_panel=DEVICE, short_help="Serve a model with no federation.")
def serve(
    model: Annotated[Path, typer.Argument(help="A model file, such as results/<run>/model.safetensors.")],
    state: Annotated[Path, typer.Option("--state-dir", help="Folder of the agent's state.")],
    name: Annotated[str, typer.Option(help="The device's name.")] = "device",
    adapter: Annotated[str, typer.Option(help=r"Test-time adaptation, with options: 'tent\[lr=0.001]'.")] = "none",
    listen: Annotated[str, typer.Option(help="unix:PATH, by default in the folder of the state.")] = "",
) -> None:
    """Serve a model with no federation; its config is STATE-DIR/device.toml."""
    import tomli_w

    from fedtta.client.agent.store import Lock, StateInUse
    from fedtta.client.config import AgentConfig
    from fedtta.settings import from_toml
    from fedtta.settings.files import write_atomically

    if not model.is_file():
        raise click.UsageError(f"{model}: no such file")
    file = state / "device.toml"
    content = {"name": name, "model": str(model.resolve()), "state-dir": str(state.resolve()), "adapter": adapter}
    content |= {"listen": listen} if listen else {}
    with refused():
        config = AgentConfig.from_mapping(content, Path.cwd())
        content |= {"listen": config.listen} if listen else {}  # relative, it would be in the folder of the state
        if file.exists() and (more := from_toml(file, ("policy",)).keys() - {*content, "listen"}):
            raise click.UsageError(
                f"{file} has keys that serve does not write ({', '.join(sorted(more))}): "
                f"run `fedtta agent --config {file}`, or choose another --state-dir"
            )
        try:
            lock = Lock(state)
        except StateInUse as error:  # before the config of the running agent is replaced
            raise click.ClickException(str(error)) from error
        try:
            write_atomically(file, tomli_w.dumps(content).encode())
        finally:
            lock.release()
    call("fedtta.client.agent.__main__", ["--config", str(file)])


Sockets = Annotated[
    list[str], typer.Option("--agent", metavar="ADDRESS", help="unix:PATH or HOST:PORT of an agent; may be repeated.")
]
Ca = Annotated[str, typer.Option(metavar="FILE", help="The agent's authority (TCP).")]
Certificate = Annotated[str, typer.Option(metavar="FILE", help="This client's certificate (TCP).")]
Key = Annotated[str, typer.Option(metavar="FILE", help="This client's private key (TCP).")]
Version = Annotated[str, typer.Argument(help="A version, or its last part.")]


def ask(agents: Sequence[str], tls: tuple[str, str, str], *words: str) -> None:
    """Send a command to each agent; the exit status is the worst."""
    files = [word for name, path in zip(("ca", "certificate", "key"), tls, strict=True) if path
             for word in (f"--{name}", path)]  # fmt: skip
    worst = 0
    for address in agents:
        if len(agents) > 1:
            print(f"{address}:")
        try:
            call("fedtta.client.agent.control", ["--socket", address, *files, *(word for word in words if word)])
        except typer.Exit as ended:
            worst = max(worst, ended.exit_code)
    raise typer.Exit(worst)


def to_agents(name: str, about: str, of_model: bool) -> None:
    """Add a command to running agents, with a version of a model or without."""

    def with_version(
        agent: Sockets, version: Version = "", ca: Ca = "", certificate: Certificate = "", key: Key = ""
    ) -> None:
        ask(agent, (ca, certificate, key), name, version)

    def plain(agent: Sockets, ca: Ca = "", certificate: Certificate = "", key: Key = "") -> None:
        ask(agent, (ca, certificate, key), name)

    app.command(name, help=about, rich_help_panel=DEVICE)(with_version if of_model else plain)


to_agents("status", "What an agent serves, adapts and guards.", False)
to_agents("models", "The models of an agent by version, with their checks.", False)
to_agents("rollback", "Serve an older model again, by default the one before.", True)
to_agents("approve", "Serve the model that waits for approval.", True)
to_agents("reject", "Drop the model that waits for approval.", True)
to_agents("rescan", "Let an agent look at its own data again.", False)
