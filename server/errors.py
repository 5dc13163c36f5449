"""Errors that end a run."""


class RunError(RuntimeError):
    """A run cannot go on."""


class NodesMissing(RunError):
    """Nodes that a run needs are not there, or do not say who they are."""


class NoReplies(RunError):
    """A round brought no usable reply at all."""


class Leak(RunError):
    """A test stream holds a sample that was trained on."""
