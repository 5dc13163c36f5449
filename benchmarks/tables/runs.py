"""Runs and cached trainings: a training is identified by a hash of all it depends on, and later rows reuse it."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from fedtta.server.checkpoints import checkpoint_files, read_checkpoint
from fedtta.server.events import RunError
from fedtta.server.fork import LATER, fork
from fedtta.server.methods import Training, plan
from fedtta.server.report import METRICS_FILE, Results, read_results
from fedtta.server.resume import FREE, locked
from fedtta.settings import Settings, SettingsError
from fedtta.settings.files import write_atomically

ROOT = Path(__file__).parent.parent.parent
#: Packages whose code determines the outcome of a training.
PACKAGES = ("client", "data", "messages", "models", "privacy", "server", "settings", "strategies", "tta")
NOT_TRAINING = ("agent", "report")  # folders in them that do not take part
RUN, STATE, MARK = "run", "state", "made-by"  # the last holds what a test was made from, in its folder


def evaluated(settings: Settings, trainings: Path, folder: Path, of: Settings | None = None) -> Results:
    """Return the results of rows that share one training, which is run only if it is not cached.

    An interrupted training or test is resumed, or repeated, with the same bits.

    Parameters
    ----------
    settings : Settings
        With the rows in `methods`.
    trainings : Path
        Folder of cached trainings, one folder each.
    folder : Path
        The run folder of this test; a completed run there with these settings, this code, the same initial network and
        the same rates is read instead of run.
    of : Settings, optional
        A training with more rounds that begins with this one; the longer one is run and cached.

    Raises
    ------
    SettingsError
        As `plan`, `simulate` and `fork`.
    RunError
        The training or the test failed, or a client's evaluation did: rows are paired by client. Or another process is
        at one of them.
    """
    from fedtta.simulation import simulate

    several = plan(settings)
    if len(several) != 1:
        names = ", ".join(one.name for one in several)
        raise SettingsError(f"methods = {settings.methods!r}: allowed are rows of one training, not of {names}")
    (training,) = several
    made_by, mark = key(of or settings, training) + _rates(settings), folder / MARK
    if (done := _completed(folder)) is not None and _same(done, settings) and _read(mark) == made_by:
        return done
    _remove(folder, folder)
    if training.recipe.rounds(settings) == 0:
        simulate(settings, folder)
    else:
        kept = trained(of or settings, training, trainings, settings.rounds if of else None)
        state = folder / STATE
        shutil.copytree(kept / STATE, state)
        simulate(fork(kept / RUN, folder, settings.replace(state_dir=str(state))), folder)
        shutil.rmtree(state)
    results = _completed(folder)
    if results is None:
        raise RunError(f"{folder}: the run did not complete; its metrics.jsonl says why")
    if absent := _absent(results):
        raise RunError(f"{folder}: clients {absent} have no accuracy; its metrics.jsonl says why")
    write_atomically(mark, made_by.encode())
    return results


def _remove(folder: Path, run: Path) -> None:
    """Remove a folder with a run in it; RunError if another process is writing that run."""
    with locked(run) if run.exists() else nullcontext():
        shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _rates(settings: Settings) -> str:
    """Return what a test depends on beside its training: its rates. A missing file is refused by the run."""
    path = Path(settings.rates_init)
    return f" {hashlib.sha256(path.read_bytes()).hexdigest()}" if path.is_file() else ""


def trained(settings: Settings, training: Training, trainings: Path, back_to: int | None = None) -> Path:
    """Return the folder of a completed training: its run and its clients' private state.

    Parameters
    ----------
    back_to : int, optional
        A round that tests start from: all checkpoints are then kept, and a training without this one is run again.

    Raises
    ------
    SettingsError, RunError
        As `simulate`; or another process is at this training.
    """
    from fedtta.simulation import simulate

    folder = trainings / key(settings, training)
    row = f"fedavg[training={training.name}]"  # the cheapest test
    # three checkpoints: after the last round, the statistics, the test
    kept = 3 if back_to is None else settings.rounds + 3
    own = settings.replace(
        methods=row, shifts="original", state_dir=str(folder / STATE), checkpoint_every=1, checkpoints_kept=kept
    )
    if _completed(folder / RUN) is None or (back_to is not None and not _stands_at(folder / RUN, back_to)):
        if checkpoint_files(folder / RUN) and _completed(folder / RUN) is None:
            own = own.replace(resume=str(folder / RUN))
        else:
            _remove(folder, folder / RUN)
        simulate(own, folder / RUN)
    if _completed(folder / RUN) is None:
        raise RunError(f"{folder / RUN}: the training did not complete; its metrics.jsonl says why")
    return folder


def key(settings: Settings, training: Training) -> str:
    """Return a name for a training that changes with all it depends on."""
    return f"{settings.dataset}-{training.name}-{settings.seed}-{digest(settings, training.name)}"


def digest(settings: Settings, *about: Any) -> str:
    """Return 16 digits that change with what a training depends on: JSON values, settings, initial network, code."""
    inputs = {name: value for name, value in settings.flat().items() if name not in (*LATER, *FREE)}
    if settings.init:
        inputs["init"] = hashlib.sha256(Path(settings.init).read_bytes()).hexdigest()
    text = json.dumps([*about, inputs, code()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def code() -> str:
    """Return a hash of all code that trains."""
    total = hashlib.sha256()
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    for path in sorted(path for path in paths if not set(path.parts) & set(NOT_TRAINING)):
        total.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def _stands_at(folder: Path, round: int) -> bool:
    """Tell whether a run folder has a checkpoint after a training round."""
    found = (read_checkpoint(path).position for path in checkpoint_files(folder).values())
    return any((position.stage, position.round) == ("training", round) for position in found)


def _completed(folder: Path) -> Results | None:
    """Return what a run folder holds if its run completed."""
    if not (folder / METRICS_FILE).exists():
        return None
    results = read_results(folder / METRICS_FILE)
    return results if results.end is not None and results.end.status == "completed" else None


def _absent(results: Results) -> list[int]:
    """Return the clients whose evaluation failed, and that have no accuracy from a repeated round either."""
    failed = {one.partition for one in results.incidents if one.phase.startswith("evaluate ")}
    tested = {one.partition for one in results.evaluations}
    return sorted(partition for partition in failed - tested if partition is not None)


def _same(results: Results, settings: Settings) -> bool:
    """Tell whether a run had these settings, except those that do not affect results."""
    found = results.run.settings if results.run else {}
    return all(found.get(name) == value for name, value in settings.flat().items() if name not in FREE)
