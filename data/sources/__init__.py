"""A device's own data: where they come from (`open_source`), and how they are scanned and split (`own_data`).

    data = own_data("folder:/data/site-a", classes=("covid", "normal"), preprocessing=Preprocessing(image_size=224))
    x = data.images.batch(data.split.train[:32])      # read from disk now, [32, 3, 224, 224] in [0, 1]

`fedtta data folder:/data/site-a` shows samples, classes, groups, splits, and what is skipped and why.
"""

from .base import Source, UnusableData
from .own import OwnData, open_source, own_data

__all__ = ["OwnData", "Source", "UnusableData", "open_source", "own_data"]
