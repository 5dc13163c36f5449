"""Errors that end a run."""


class RunError(RuntimeError):
    """A run cannot go on."""


class NodesMissing(RunError):
    """Nodes that a run needs are not there, or do not say who they are."""


class QuorumMissed(RunError):
    """A round brought fewer usable replies than it needs, also when it was done again, or could not be done again."""


class NoReplies(QuorumMissed):
    """A round brought no usable reply at all."""


class Leak(RunError):
    """A test stream holds a sample that was trained on."""
