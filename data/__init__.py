"""Data: data sets, their partition into clients, corruptions, and test streams.

    images = load("cifar10", root="...")                            # uint8 images, labels, class names
    federation = Federation.create(images, num_clients=20, alpha=0.1, seed=0)   # training/validation/test splits
    test = stream(federation, partition=3, shift="mixture", seed=0)             # x in [0, 1], y, source of each sample

Images are floats in [0, 1] outside this package; the network normalizes them. Every draw comes from an explicit
generator: equal settings give equal bits on every machine and in any order of calls. The package depends on numpy and
torch, not on Flower.
"""

from .augment import Augmentation, CropFlip
from .corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt
from .datasets import DATASETS, Dataset, load, load_natural
from .domains import Domain, Role
from .federation import Federation
from .images import Images, LazyRows, Rows
from .imbalanced_streams import Batch, CorruptionStream, class_counts, corruption_streams
from .own_stream import UNCORRUPTED, OwnStream
from .partition import SCHEMES, partition
from .rng import client_number
from .split import Split, split
from .streams import BRFL, BTGFL, SHIFTS, Shift, Stream, available, check_no_leak, resolve, stream

__all__ = [
    "BRFL",
    "BTGFL",
    "CORRUPTIONS",
    "DATASETS",
    "EXTRA_CORRUPTIONS",
    "SCHEMES",
    "SHIFTS",
    "UNCORRUPTED",
    "Augmentation",
    "Batch",
    "CorruptionStream",
    "CropFlip",
    "Dataset",
    "Domain",
    "Federation",
    "Images",
    "LazyRows",
    "OwnStream",
    "Role",
    "Rows",
    "Shift",
    "Split",
    "Stream",
    "available",
    "check_no_leak",
    "class_counts",
    "client_number",
    "corrupt",
    "corruption_streams",
    "load",
    "load_natural",
    "partition",
    "resolve",
    "split",
    "stream",
]
