"""`python -m fedtta`: the command `fedtta` of a checkout that is not installed."""

from fedtta.cli import app

app(prog_name="fedtta")
