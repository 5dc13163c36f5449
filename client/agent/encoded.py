"""Images that a program sends as files: JPEG, PNG, TIFF, DICOM and others, decoded and prepared for the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fedtta.models.preprocessing import Preprocessing


@dataclass(frozen=True)
class Encoded:
    """The files of one request, in order.

    Parameters
    ----------
    files : tuple of bytes
        Contents; at least one.
    """

    files: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.files)

    def prepared(self, preprocessing: Preprocessing, megapixels: float) -> NDArray[np.uint8]:
        """Return images [B, C, S, S].

        Parameters
        ----------
        preprocessing : Preprocessing
            That of the model.
        megapixels : float
            Larger images are refused before they are decoded.

        Raises
        ------
        ValueError
            A file cannot be decoded or is too large; the message says which one, from 0, and why.
        """
        images = []
        for number, content in enumerate(self.files):
            try:
                images.append(preprocessing.apply(preprocessing.decode(content, round(megapixels * 1e6))))
            except (ValueError, ImportError, MemoryError) as error:
                reason = str(error) or type(error).__name__
                raise ValueError(f"file {number} of the request: {reason}") from error
        return np.stack(images)
