"""Preprocessing of images: from a file or an array to the bytes [C, S, S] that a network takes.

Training, evaluation, the agent and client programs all use `Preprocessing`, and model files carry it, so an image gives
the same bytes on every way. Mean/std normalization is the network's first layer and no part of this.

    image = preprocessing.decode(Path("scan.dcm").read_bytes())
    pixels = preprocessing.apply(image)  # uint8 [C, S, S]

Images of 8 bits are converted to RGB or grayscale and resized by Pillow. Images of more bits are scaled to [0, 255] as
floats, resized by the same filter and rounded once, at the end.

This file needs nothing else of the project: exported models contain a copy.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

RawImage: TypeAlias = "NDArray[Any] | Image.Image"

RESIZES = ("stretch", "crop", "pad")
INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
#: File formats that Pillow may open. Others are refused: some of them (EPS) run programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
#: Pillow's modes with more than 8 bits per channel.
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
#: ITU-R 601 luma, the weights of R, G and B in a grayscale image.
LUMA = np.array([0.299, 0.587, 0.114], np.float32)
#: Pixels of the largest image that `decode` accepts by default.
MAX_PIXELS = 100_000_000
# `max_pixels` decides, of which Pillow's warning of more than 89 megapixels knows nothing. Its error of more than 178
# stays: the image inside a DICOM file may be larger than the file's header says.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class _Refused(ValueError):
    """An intact file that is not accepted."""


@dataclass(frozen=True)
class Preprocessing:
    """What is done to an image before it enters a network.

    Parameters
    ----------
    image_size : int
        S, the edge of the result.
    channels : int
        C, 1 (grayscale) or 3 (RGB).
    resize : "stretch", "crop" or "pad"
        How images become square: by scaling both edges to S; by cutting out a square at the center, whose edge is
        `crop_fraction` of the shorter edge, and scaling it to S; or by scaling the longer edge to S and adding a black
        border to the shorter one.
    interpolation : "nearest", "bilinear", "bicubic" or "lanczos"
        The filter that resizes; antialiased where an image shrinks, apart from "nearest".
    crop_fraction : float
        In (0, 1], of "crop" only. 0.875 is torchvision's `Resize(256)`, `CenterCrop(224)`.
    window : (float, float), "low,high" or None
        Values of images with more than 8 bits (16-bit and float images, DICOM after rescaling, e.g. in Hounsfield
        units) that become black and white; values beyond are clipped. None: the range of the type (0 to 65535, 0 to 1
        for floats), or a DICOM file's own window, else its bit depth. Images of 8 bits have no window.

    Raises
    ------
    ValueError
        A value is not allowed.
    """

    image_size: int = 32
    channels: int = 3
    resize: str = "stretch"
    interpolation: str = "bilinear"
    crop_fraction: float = 1.0
    window: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        checks = {
            "image_size": type(self.image_size) is int and self.image_size >= 1,
            "channels": type(self.channels) is int and self.channels in (1, 3),
            "resize": self.resize in RESIZES,
            "interpolation": self.interpolation in INTERPOLATIONS,
            "crop_fraction": type(self.crop_fraction) in (int, float) and 0 < self.crop_fraction <= 1,
        }
        allowed = {
            "image_size": "a whole number of at least 1",
            "channels": "1 or 3",
            "resize": ", ".join(RESIZES),
            "interpolation": ", ".join(INTERPOLATIONS),
            "crop_fraction": "a number in (0, 1]",
        }
        for name, fits in checks.items():
            if not fits:
                raise ValueError(f"preprocessing: {name}={getattr(self, name)!r}; allowed: {allowed[name]}")
        object.__setattr__(self, "window", _window(self.window))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """Return what `to_dict` was called on; fields that are not given have their defaults.

        Raises
        ------
        ValueError
            A name is unknown or a value is not allowed.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, Mapping) or not set(values) <= set(names):
            raise ValueError(f"preprocessing={values!r} must be a mapping; its keys are: {', '.join(names)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {**dataclasses.asdict(self), "window": None if self.window is None else list(self.window)}

    def decode(self, content: bytes, max_pixels: int = MAX_PIXELS) -> RawImage:
        """Return the image in a JPEG, PNG, TIFF, BMP, WebP, GIF or DICOM file, upright according to its EXIF data.

        Of files with several images the first is taken; DICOM files with several frames are refused.

        Parameters
        ----------
        content : bytes
            The file.
        max_pixels : int
            Larger images are refused before their pixels are decoded.

        Returns
        -------
        PIL.Image or ndarray
            The argument of `apply`.

        Raises
        ------
        ValueError
            The content is damaged, of another format or too large.
        ImportError
            It is a DICOM file and pydicom is missing.
        """
        try:
            if content[128:132] == b"DICM":
                return self._decode_dicom(content, max_pixels)
            with Image.open(BytesIO(content), formats=FORMATS) as opened:
                _check_size(*opened.size, max_pixels)
                tags = getattr(opened, "tag_v2", {})  # of TIFF
                bits, white_is_zero = tags.get(258), tags.get(262) == 0
                if self.window is not None and has_deep_colours(opened):
                    raise _Refused("16 bits of colour, of which 8 are read; a window needs a grayscale file, or DICOM")
                opened.load()
                image = ImageOps.exif_transpose(opened)
        except (ImportError, MemoryError, _Refused):
            raise
        except Image.DecompressionBombError as error:
            raise ValueError(f"too many pixels: {error}") from error
        except UnidentifiedImageError as error:  # its message is the address of `content` in memory
            raise ValueError("damaged, or of another format") from error
        except Exception as error:  # the error type depends on where a file is damaged
            raise ValueError(f"damaged, or of another format: {error or type(error).__name__}") from error
        if white_is_zero and image.mode in DEEP_MODES:  # Pillow inverts those of 8 bits only
            return _inverted(np.asarray(image), self.window)
        if bits == (12,) and self.window is None:  # such a file's values, too, are 16-bit integers to Pillow
            return _full_scale(np.asarray(image), 12)
        return image

    def apply(self, image: RawImage) -> NDArray[np.uint8]:
        """Return an image as uint8 [C, S, S].

        Parameters
        ----------
        image : PIL.Image or ndarray [H, W], [H, W, 1] or [H, W, 3]
            Arrays are uint8, uint16, or floats in [0, 1]; with a window, also floats and integers of any range.
            Transparent parts of an image become white.

        Raises
        ------
        ValueError
            Another shape or type, values that are not finite, or values outside [0, 1] without a window.
        """
        if isinstance(image, Image.Image):
            if image.mode not in DEEP_MODES:
                return self._apply_bytes(image)
            image = np.asarray(image)
        if image.ndim == 3 and image.shape[2] == 1:
            image = image[:, :, 0]
        if image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)) or 0 in image.shape:
            raise ValueError(f"an image is [H, W] or [H, W, 3], not {list(image.shape)}")
        if image.dtype == np.uint8:
            return self._apply_bytes(Image.fromarray(image))
        return self._apply_floats(self._scaled(image))

    def _apply_bytes(self, image: Image.Image) -> NDArray[np.uint8]:
        """Return an image of 8 bits per channel as uint8 [C, S, S]."""
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        pixels = np.asarray(self._resized(image.convert("L" if self.channels == 1 else "RGB")))
        return pixels[None] if self.channels == 1 else pixels.transpose(2, 0, 1)

    def _apply_floats(self, image: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Return floats in [0, 255] [H, W] or [H, W, 3] as uint8 [C, S, S], rounded once."""
        if self.channels == 1 and image.ndim == 3:
            image = image @ LUMA
        planes = [image] if image.ndim == 2 else [image[:, :, channel] for channel in range(3)]
        resized = [np.asarray(self._resized(Image.fromarray(np.ascontiguousarray(plane)))) for plane in planes]
        pixels = np.rint(np.clip(np.stack(resized), 0, 255)).astype(np.uint8)  # bicubic and lanczos overshoot
        return np.repeat(pixels, self.channels // len(pixels), axis=0)

    def _scaled(self, image: NDArray[Any]) -> NDArray[np.float32]:
        """Scale values of more than 8 bits to float32 in [0, 255]."""
        if image.dtype.kind not in "iuf":
            raise ValueError(f"an image of type {image.dtype}; there are: uint8, uint16, float")
        if image.dtype.kind == "f" and not np.isfinite(image).all():
            raise ValueError("values of the image are not finite")
        if self.window is not None:
            low, high = self.window
        elif image.dtype.kind == "u" and image.dtype.itemsize == 2:  # of either byte order
            low, high = 0, 65535
        elif image.dtype.kind == "f" and image.min() >= 0 and image.max() <= 1:
            low, high = 0, 1
        else:
            raise ValueError(
                f"{image.dtype} values from {image.min():g} to {image.max():g} need a window: the raw values that "
                "become black and white, e.g. window = '0,4095'"
            )
        return np.clip(_above(image, low) * np.float32(255 / (high - low)), 0, 255)

    def _resized(self, image: Image.Image) -> Image.Image:
        """Return an image of mode L, RGB or F with both edges S."""
        size, resample = self.image_size, INTERPOLATIONS[self.interpolation]
        width, height = image.size
        if self.resize == "stretch":
            return image.resize((size, size), resample)
        if self.resize == "crop":
            edge = min(width, height) * self.crop_fraction
            left, top = (width - edge) / 2, (height - edge) / 2
            # One step: scaling first would make a very long image very large.
            return image.resize((size, size), resample, box=(left, top, left + edge, top + edge))
        scale = size / max(width, height)
        inner = (max(1, round(width * scale)), max(1, round(height * scale)))
        canvas = Image.new(image.mode, (size, size))
        canvas.paste(image.resize(inner, resample), ((size - inner[0]) // 2, (size - inner[1]) // 2))
        return canvas

    def _decode_dicom(self, content: bytes, max_pixels: int) -> NDArray[Any]:
        """Return a DICOM image: colours of 8 bits as uint8 [H, W, 3]; else in [0, 1], or raw if there is a window."""
        pydicom = _pydicom()
        check_inflated(BytesIO(content), max_pixels)
        file = pydicom.dcmread(BytesIO(content))
        _check_size(int(file.Columns), int(file.Rows), max_pixels)
        if int(file.get("NumberOfFrames", 1) or 1) != 1:
            raise _Refused(f"a DICOM file of {file.NumberOfFrames} frames; it must hold one image")
        syntax = file.file_meta.get("TransferSyntaxUID")
        decoder = pydicom.pixels.get_decoder(syntax) if syntax is not None and syntax.is_compressed else None
        if decoder is not None and not decoder.is_available:
            needed = " or ".join(decoder.missing_dependencies)
            raise _Refused(f"DICOM compression without its decoder: {syntax.name}; install one: {needed}")
        stored = file.pixel_array  # colours are RGB
        if file.PhotometricInterpretation == "PALETTE COLOR":  # numbers of colours
            bits = int(file.RedPaletteColorLookupTableDescriptor[2])
            colours = _full_scale(pydicom.pixels.apply_color_lut(stored, file), bits)
            return np.rint(colours * 255).astype(np.uint8)
        if stored.ndim == 3:
            if stored.dtype == np.uint8:
                return stored
            return _full_scale(stored, int(file.BitsStored)) if self.window is None else stored.astype(np.float32)
        raw = np.asarray(pydicom.pixels.apply_modality_lut(stored, file), np.float64)
        inverted = file.PhotometricInterpretation == "MONOCHROME1"  # small values are white
        if self.window is not None:
            return sum(self.window) - raw if inverted else raw
        shown = _dicom_window(file, stored, raw)
        return 1 - shown if inverted else shown


def _window(value: object) -> tuple[float, float] | None:
    """Return a window given as (low, high), as text or not at all; raise ValueError unless low < high."""
    if value is None or value == "":
        return None
    parts: Any = value.split(",") if isinstance(value, str) else value
    try:
        low, high = (float(part) for part in parts)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"preprocessing: window={value!r}; allowed: low,high with low < high, or nothing")
    return low, high


def has_deep_colours(opened: ImageFile.ImageFile) -> bool:
    """Return whether a file that is opened and not loaded has 16 bits of colour, of which Pillow reads 8."""
    return any(";16" in str(tile.args) for tile in opened.tile) and opened.mode not in DEEP_MODES


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise _Refused(f"{width} x {height} pixels; allowed are {max_pixels:,}")


def check_inflated(file: BinaryIO, max_pixels: int) -> None:
    """Check what a DICOM file that is deflated as a whole inflates to; pydicom does that at once, without a bound.

    Raises
    ------
    DecompressionBombError
        It is more than 8 bytes a pixel, and 1 MiB of other elements.
    """
    from pydicom.filereader import read_dataset

    file.seek(132)
    meta = read_dataset(file, False, True, stop_when=lambda tag, *_: tag >> 16 != 2)
    if meta.get("TransferSyntaxUID") == "1.2.840.10008.1.2.1.99":
        most, inflated, inflater = 8 * max_pixels + (1 << 20), 0, zlib.decompressobj(-zlib.MAX_WBITS)
        while chunk := inflater.unconsumed_tail or file.read(1 << 16):
            inflated += len(inflater.decompress(chunk, 1 << 20))
            if inflated > most:
                raise Image.DecompressionBombError(f"a deflated DICOM file of more than {most / 1e6:.0f} MB")
    file.seek(0)


def _above(values: NDArray[Any], low: float) -> NDArray[np.float32]:
    """Return values - low, rounded once: far from zero, float32 is coarser than the grey levels of a narrow window."""
    return np.subtract(values, low, dtype=np.float64).astype(np.float32)


def _inverted(values: NDArray[Any], window: tuple[float, float] | None) -> NDArray[Any]:
    """Return 16-bit values or floats of which small ones are white, turned round."""
    if window is not None:
        return sum(window) - values.astype(np.float64)
    return (1 if values.dtype.kind == "f" else 65535) - values


def _full_scale(values: NDArray[Any], bits: int) -> NDArray[np.float32]:
    """Scale unsigned integers of `bits` bits to [0, 1]."""
    return np.clip(values.astype(np.float32) / np.float32(2**bits - 1), 0, 1)


def _pydicom() -> Any:
    """Return the package pydicom; ImportError names the extra that brings it."""
    try:
        import pydicom
        import pydicom.pixels
    except ImportError as error:
        raise ImportError("DICOM files need pydicom: pip install 'fedtta[dicom]'") from error
    return pydicom


def _dicom_window(file: Any, stored: NDArray[Any], raw: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return a grayscale DICOM image in [0, 1]: through its own window or look-up table (the first), else by bit depth.

    Parameters
    ----------
    file : pydicom.FileDataset
    stored, raw : ndarray [H, W]
        Pixel values as stored, and after rescaling.

    Notes
    -----
    DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3.
    """
    luts = _pydicom().pixels
    if file.get("VOILUTSequence"):
        bits = int(file.VOILUTSequence[0].LUTDescriptor[2])
        entries = raw.astype(np.float32).astype(np.int64)  # rounded before it is cut off: 100 x 0.29 is 29
        return _full_scale(luts.apply_voi_lut(entries, file, prefer_lut=True), bits)
    if file.get("WindowCenter") is not None and file.get("WindowWidth") is not None:
        center, width = (
            float(value[0] if isinstance(value, Sequence) else value) for value in (file.WindowCenter, file.WindowWidth)
        )
        shape = file.get("VOILUTFunction", "LINEAR")
        if shape == "SIGMOID":
            return 1 / (1 + np.exp(np.clip(-4 * _above(raw, center) / width, -700, 700)))
        if shape == "LINEAR":  # from c - w/2 to c + w/2 - 1
            center, width = center - 0.5, width - 1
        return np.clip(_above(raw, center) / max(width, 1e-9) + 0.5, 0, 1)
    bits, signed = int(file.BitsStored), bool(file.PixelRepresentation)
    ends = np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if signed else [0, 2**bits - 1], stored.dtype)
    low, high = sorted(np.asarray(luts.apply_modality_lut(ends, file), np.float64).tolist())
    return np.clip(_above(raw, low) / max(high - low, 1e-9), 0, 1)
