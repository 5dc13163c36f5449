"""`python -m fedtta`: the command `fedtta` of a checkout that is not installed."""

import sys

try:
    from fedtta.cli import app
except ModuleNotFoundError as error:  # of what a light agent does without
    sys.exit(
        f"error: the command fedtta needs {error.name}, which is not installed here; without it there are "
        "python -m fedtta.client.agent --config FILE, python -m fedtta.client.agent.control --socket ADDRESS status, "
        "and python -m fedtta.client.agent.audit"
    )

app(prog_name="fedtta")
