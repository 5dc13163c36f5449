"""`python -m fedtta.simulation`: one run from settings on the command line, results and a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console

from fedtta.settings import SettingsError, add_arguments, from_arguments
from fedtta.simulation.live_page import NotServed, live_page
from fedtta.simulation.program import show_results, unwind_on_signals


class Parser(argparse.ArgumentParser):
    """A parser whose errors do not list all settings."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line."""
        self.exit(2, f"error: {message}; `fedtta settings` lists the settings\n")


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(prog="python -m fedtta.simulation", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--watch", nargs="?", const="", metavar="HOST:PORT",
        help="serve a page that follows the run, on this machine (see `fedtta watch`)",
    )  # fmt: skip
    add_arguments(parser)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Parse, run, print the table; exit status 0 on success, 1 when the run failed, 2 for bad settings."""
    arguments = make_parser().parse_args(words)
    console = Console()
    try:
        settings = from_arguments(arguments)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from fedtta.server.app import run_folder  # imports torch and Flower, which refusing a setting does not need
    from fedtta.server.events import RunError
    from fedtta.simulation.engine import simulate

    unwind_on_signals()
    try:
        if arguments.watch is None:
            folder = simulate(settings)
        else:
            folder = run_folder(settings)
            with live_page(folder, arguments.watch) as address:
                console.print(f"Live page: {address}", soft_wrap=True, markup=False, highlight=False)
                folder = simulate(settings, folder)
    except (SettingsError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except NotServed:
        return 2
    except (RunError, OSError) as error:  # such as a full disk
        print(f"run failed: {error}", file=sys.stderr)
        return 1
    show_results(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
