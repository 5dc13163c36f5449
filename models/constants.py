"""Constants that are read without torch: names of a two-head network's parts, and those of Adam."""

#: Parameters with this prefix never leave the device.
PERSONAL_PREFIX = "personal_head."
#: Parameters with this prefix are used in training only: the rotation task of test-time training.
ROTATION_PREFIX = "rotation_head."
#: The global head's parameters.
HEAD_PREFIX = "head."

BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam
