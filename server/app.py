"""The ServerApp: entry point of `flwr run`, and the same app over given settings for a simulation."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from fedtta.messages.grid import GridTransport
from fedtta.messages.transport import Transport
from fedtta.server.checkpoints import FOLDER, Checkpoints
from fedtta.server.environment import describe
from fedtta.server.events import STEPS, Events, JsonLines, Listener, RunError
from fedtta.server.live import LiveState
from fedtta.server.logs import EventLines
from fedtta.server.observation import STANDING, observe
from fedtta.server.progress import TerminalProgress
from fedtta.server.report import METRICS_FILE, read_results, write_table
from fedtta.server.report.journal import COPY
from fedtta.server.resume import earlier_events, find_checkpoint, locked, roll_back, run_folder_of
from fedtta.server.run import run
from fedtta.server.trackers import Trackers
from fedtta.settings import Settings, SettingsError, class_names, from_config, to_toml
from fedtta.settings.files import make_folder, write_atomically
from fedtta.settings.logs import configure
from fedtta.settings.memory import return_large_blocks

LOG = logging.getLogger("fedtta.run")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run with the settings of Flower's run config; results go to the folder `results` of the SuperLink's machine."""
    return_large_blocks()  # those of a round's models would leave holes
    settings = from_config(context.run_config)
    settings.check_clients()  # with devices, too: here their number is that of Flower's nodes
    if settings.engine in ("ray", "vectorised"):
        raise SettingsError(f"engine = {settings.engine!r}: Flower runs these nodes; allowed are auto, flower")
    configure(settings.log_format, settings.log_level)  # until the process ends: Flower logs after the run, too
    folder = run_folder(settings)
    try:
        serve(GridTransport(grid), settings, folder, bundle=grid.run.fab_hash or None)
    finally:
        if folder.is_dir():
            LOG.info("results: %s", folder.resolve())  # in the log that who submits the run sees


def make_app(
    settings: Settings,
    folder: Path,
    listeners: Sequence[Listener] = (),
    class_counts: list[list[int]] | None = None,
    window: int | None = None,
) -> ServerApp:
    """Return a ServerApp over given settings: Flower's direct simulation passes no run config.

    Parameters
    ----------
    settings, folder, listeners, class_counts
        As in `serve`.
    window : int, optional
        Messages under way at once; see `fedtta.messages.grid.GridTransport`.
    """
    made = ServerApp()

    @made.main()
    def _(grid: Grid, context: Context) -> None:
        serve(GridTransport(grid, window), settings, folder, listeners, class_counts)

    return made


def serve(
    transport: Transport,
    settings: Settings,
    folder: Path,
    listeners: Sequence[Listener] = (),
    class_counts: list[list[int]] | None = None,
    bundle: str | None = None,
) -> None:
    """Run with progress and write the run folder; a run that fails leaves its results so far, and the reason.

    Parameters
    ----------
    transport : Transport
        Runs the clients.
    settings : Settings
    folder : Path
        The run folder.
    listeners : sequence of callable
        Get every event, after the metrics file.
    class_counts, bundle
        See `run`.

    Raises
    ------
    SettingsError, RunError
        As `run`, and as `resume.find_checkpoint` before any file is changed.
    RunError
        The folder cannot be made, or another process is writing it; or the run is complete, and its report could not be
        written.
    OSError
        The run's files could not be written; it can be resumed from its last checkpoint.
    """
    if settings.observe_only:
        return _observe(transport, settings, folder)
    settings = settings.replace(classes=class_names(settings.classes))
    if settings.resume and folder.resolve() != run_folder_of(settings.resume).resolve():
        raise SettingsError(f"resume = {settings.resume!r}: a run is resumed in its own folder, not in {folder}")
    trackers = Trackers(settings, folder)
    _make(folder)
    with locked(folder), LiveState(folder) as live, ExitStack() as stack:
        about = {"run_name": folder.name}
        stack.callback(configure(settings.log_format, settings.log_level, lambda: about))
        progress = TerminalProgress(Console(stderr=True)) if settings.log_format == "text" else EventLines()
        events = Events(JsonLines(folder / METRICS_FILE), progress, trackers, live, *listeners)
        if settings.resume:
            checkpoints = _resume(settings, events, [progress, live], bundle)
        else:
            write_atomically(folder / "settings.toml", to_toml(settings).encode())
            (folder / COPY).unlink(missing_ok=True)  # of a run whose events were removed
            checkpoints = Checkpoints(folder, settings)
        about["run"] = checkpoints.run
        try:
            with progress:
                run(transport, settings, folder, events, class_counts, checkpoints, bundle)
        except BaseException as error:
            try:
                if isinstance(error, Exception):
                    text = f"{type(error).__name__}: {error}"
                    events("end", seconds=checkpoints.seconds(), status=f"failed: {text}")
                _write_results(folder)
            except (OSError, ValueError, RunError) as unwritten:  # the first failure is the reason
                error.add_note(f"{folder} does not say so: {unwritten}")
            raise
        _write_results(folder)


def _make(folder: Path) -> None:
    """Make the run folder; RunError if that cannot be."""
    try:
        make_folder(folder)
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error}") from error


def _observe(transport: Transport, settings: Settings, folder: Path) -> None:
    """Ask the devices how they are until this process is stopped."""
    _make(folder)
    with locked(folder):
        write_atomically(folder / "settings.toml", to_toml(settings).encode())
        observe(transport, settings, folder, lambda text: LOG.warning("%s", text))


def _write_results(folder: Path) -> None:
    """Write the files that are generated from a run's events.

    Raises
    ------
    RunError
        They could not be written, or an event is none of this version; the events are there.
    """
    from fedtta.server.report.page import write_report  # matplotlib, 40 MB, comes after the rounds

    try:
        write_report(folder)
        write_table(read_results(folder / METRICS_FILE), folder / "table.csv")
    except (OSError, ValueError) as error:
        raise RunError(
            f"the report of {folder} could not be written: {error}; its events are there: "
            f"python -m fedtta.server.report {folder} writes it again"
        ) from error


def _resume(settings: Settings, events: Events, showing: Sequence[Listener], bundle: str | None) -> Checkpoints:
    """Roll the run folder back to a checkpoint and report it; what shows progress gets the events before it."""
    found = find_checkpoint(settings)
    tail = roll_back(found)
    earlier = earlier_events(found.folder)
    steps = sum(event["event"] in STEPS for event in earlier)
    for event in earlier:
        if event["event"] in ("run", "clients", "joined", "plan"):
            left = {**event, "steps": event.get("steps", 0) - steps} if event["event"] == "plan" else event
            for listener in showing:
                listener(left)
    position, name = found.checkpoint.position, f"{FOLDER}/{found.path.name}"
    about = {key: value for key, value in describe(settings, bundle).items() if key != "settings"}
    events("resumed", **about, checkpoint=name, **asdict(position), cut=tail)
    if found.restored:
        events("note", text=found.restored)
    for path, reason in found.damaged.items():
        events("note", text=f"a checkpoint was not used: {FOLDER}/{path.name}: {reason.removeprefix(f'{path}: ')}")
    events("note", text=f"resumed after {position} ({name})" + (f"; later events are in {tail}" if tail else ""))
    return Checkpoints(found.folder, settings, found.checkpoint, found.kept)


def run_folder(settings: Settings) -> Path:
    """Return the run's folder: `results/<run-name>`, or data set (or "devices"), seed and time where no name is set.

    A resumed run continues in its own folder.

    Raises
    ------
    SettingsError
        There is no such run to resume.
    FileExistsError
        A folder of that name already holds a run.
    """
    if settings.resume:
        return run_folder_of(settings.resume)
    data = "devices" if settings.devices or settings.classes else settings.dataset
    name = settings.run_name or (STANDING if settings.observe_only else "")
    name = name or f"{data}-{settings.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(settings.results).expanduser() / name
    if (folder / METRICS_FILE).exists():
        raise FileExistsError(f"{folder} already holds a run; choose another run-name")
    return folder
