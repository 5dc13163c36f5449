"""Preprocessing: files of every kind to bytes [C, S, S]; geometry, bit depths, windows, and refusals."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedtta.data.sources.files import read_encoded
from fedtta.models import Preprocessing
from fedtta.models.preprocessing import INTERPOLATIONS, RESIZES

ROOT = Path(__file__).parents[2]
FORMATS = {"JPEG": {"quality": 95}, "PNG": {}, "TIFF": {}, "BMP": {}, "WEBP": {"lossless": True}, "GIF": {}}


def photo(height: int = 40, width: int = 56, channels: int = 3) -> NDArray[np.uint8]:
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (6, 8, channels), np.uint8).squeeze()
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **{**FORMATS[kind], **options})
    return buffer.getvalue()


def prepare(preprocessing: Preprocessing, content: bytes) -> NDArray[np.uint8]:
    pixels = preprocessing.apply(preprocessing.decode(content))
    assert pixels.dtype == np.uint8
    assert pixels.shape == (preprocessing.channels, preprocessing.image_size, preprocessing.image_size)
    return pixels


def channels_last(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pixels.transpose(1, 2, 0)


# Files --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("filter_", INTERPOLATIONS)
def test_colour_files_are_resized_by_pillow(kind: str, filter_: str) -> None:
    content = encoded(Image.fromarray(photo()), kind)
    with Image.open(BytesIO(content)) as opened:
        wanted = opened.convert("RGB").resize((32, 32), INTERPOLATIONS[filter_])
    pixels = prepare(Preprocessing(interpolation=filter_), content)
    np.testing.assert_array_equal(channels_last(pixels), np.asarray(wanted))


def test_an_array_a_pillow_image_and_a_file_give_the_same() -> None:
    one = Preprocessing(24, resize="crop", interpolation="bicubic")
    image = Image.fromarray(photo())
    np.testing.assert_array_equal(one.apply(photo()), one.apply(image))
    np.testing.assert_array_equal(one.apply(photo()), prepare(one, encoded(image)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(Image.fromarray(photo()), "JPEG", exif=exif)
    with Image.open(BytesIO(content)) as opened:
        upright = ImageOps.exif_transpose(opened)
        as_stored = np.asarray(opened)
    pixels = prepare(Preprocessing(32), content)
    np.testing.assert_array_equal(
        channels_last(pixels), np.asarray(upright.resize((32, 32), Image.Resampling.BILINEAR))
    )
    assert (upright.size != as_stored.shape[1::-1]) == (orientation >= 5)


def test_palettes_and_transparency() -> None:
    image = Image.fromarray(photo())
    palette = image.quantize(16)
    np.testing.assert_array_equal(
        prepare(Preprocessing(), encoded(palette)), Preprocessing().apply(palette.convert("RGB"))
    )
    alpha = image.copy()
    alpha.putalpha(Image.new("L", image.size, 255))
    np.testing.assert_array_equal(prepare(Preprocessing(), encoded(alpha)), Preprocessing().apply(image))
    alpha.putalpha(0)
    assert (prepare(Preprocessing(), encoded(alpha)) == 255).all()  # hidden colours stay hidden
    clear = Image.new("P", (4, 4), 1)
    clear.putpalette([0, 0, 0, 9, 9, 9])
    assert (prepare(Preprocessing(4), encoded(clear, transparency=1)) == 255).all()
    assert (prepare(Preprocessing(4), encoded(clear)) == 9).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "CMYK", "YCbCr"])
def test_modes_become_rgb(mode: str) -> None:
    image = Image.fromarray(photo()).convert(mode)
    kind = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    wanted = image.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(channels_last(prepare(Preprocessing(), encoded(image, kind))), np.asarray(wanted))


def test_grayscale_is_luma_and_repeats() -> None:
    wanted = Image.fromarray(photo()).convert("L").resize((32, 32), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(Preprocessing(channels=1).apply(photo())[0], np.asarray(wanted))
    repeated = Preprocessing().apply(photo(channels=1))
    np.testing.assert_array_equal(repeated, np.broadcast_to(repeated[:1], (3, 32, 32)))
    assert np.ptp(repeated) > 100


@pytest.mark.parametrize("damage", ["empty", "text", "half", "eps", "zeros"])
def test_damaged_and_foreign_files_are_refused(damage: str) -> None:
    content = {
        "empty": b"",
        "text": b"not an image at all" * 20,
        "half": encoded(Image.fromarray(photo()), "JPEG")[:700],
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        "zeros": bytes(1000),
    }[damage]
    with pytest.raises(ValueError, match="damaged, or of another format") as caught:
        Preprocessing().decode(content)
    assert " at 0x" not in str(caught.value)


@given(st.integers(0, 10**6), st.integers(0, 255), st.sampled_from(["JPEG", "PNG", "TIFF", "GIF", "WEBP", "BMP"]))
@settings(max_examples=60, deadline=None)
def test_a_changed_byte_gives_an_image_or_a_value_error(position: int, value: int, kind: str) -> None:
    content = bytearray(encoded(Image.fromarray(photo(12, 10)), kind))
    content[position % len(content)] = value
    one = Preprocessing(8)
    with contextlib.suppress(ValueError):  # no other error, and no other shape
        image = one.decode(bytes(content), max_pixels=10_000)
        assert one.apply(image).shape == (3, 8, 8)


def test_large_images_are_refused_before_they_are_decoded() -> None:
    content = encoded(Image.new("1", (3000, 2000)))
    assert Preprocessing().apply(Preprocessing().decode(content, max_pixels=6_000_000)).shape == (3, 32, 32)
    with pytest.raises(ValueError, match=r"^3000 x 2000 pixels; allowed are 5,999,999"):
        Preprocessing().decode(content[:60], max_pixels=5_999_999)  # its pixels are not even there
    with pytest.raises(ValueError, match="too many pixels"):
        Preprocessing().decode(encoded(Image.new("1", (16_000, 16_000)))[:60], max_pixels=10**9)


HUGE = """
from io import BytesIO
from PIL import Image
from fedtta.data.sources.files import read_encoded
from fedtta.models import Preprocessing

Image.new("1", (9900, 9900)).save(file := BytesIO(), "PNG")
print(len(read_encoded(file, 99_000_000)) == len(file.getvalue()))
cut = file.getvalue()[:60]
for read in (lambda: read_encoded(BytesIO(cut), 90_000_000), lambda: Preprocessing().decode(cut, 90_000_000)):
    try:
        read()
    except ValueError as error:
        print(error)
"""


def test_of_large_images_the_bound_decides_and_nothing_else_is_said() -> None:
    """Pillow warned of more than 89 megapixels; in a process of its own, since pytest has its filters of warnings."""
    done = subprocess.run([sys.executable, "-c", HUGE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "True",
        "too large: 9900 x 9900 pixels; max-megapixels allows 90 million",
        "9900 x 9900 pixels; allowed are 90,000,000",
    ]


# More than 8 bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("resize", RESIZES)
def test_16_bits_keep_their_values(kind: str, resize: str) -> None:
    deep = photo(channels=1).astype(np.uint16) * 257  # the same gray levels in 16 bits
    one = Preprocessing(resize=resize)
    pixels = prepare(one, encoded(Image.fromarray(deep), kind))
    difference = pixels.astype(int) - one.apply(photo(channels=1)).astype(int)
    assert np.abs(difference).max() <= 1  # 8 bits are rounded after either axis
    np.testing.assert_array_equal(pixels, one.apply(deep))
    np.testing.assert_array_equal(pixels, one.apply(deep.astype(">u2")))
    np.testing.assert_array_equal(pixels, one.apply(deep / np.float32(65535)))


def test_16_bits_are_rounded_once() -> None:
    deep = np.random.default_rng(1).integers(0, 2**16, (64, 64), np.uint16)
    exact = deep.astype(np.float64).reshape(1, 1, 64, 64) * 255 / 65535
    wanted = torch.nn.functional.interpolate(
        torch.from_numpy(exact), size=(16, 16), mode="bilinear", antialias=True
    ).numpy()[0]
    assert np.abs(Preprocessing(16, channels=1).apply(deep) - wanted).max() <= 0.5 + 1e-3


def test_a_window_names_black_and_white() -> None:
    deep = np.array([[0, 1000], [2000, 3000]], np.uint16)
    one = Preprocessing(2, 1, window="1000,2000")  # type: ignore[arg-type]
    assert one.window == (1000.0, 2000.0)
    assert one.apply(deep).tolist() == [[[0, 0], [255, 255]]]
    assert Preprocessing(2, 1, window=(0, 3000)).apply(deep).tolist() == [[[0, 85], [170, 255]]]
    assert Preprocessing(2, 1, window=(0, 3000)).apply(deep.astype(np.int32)).tolist() == [[[0, 85], [170, 255]]]
    plain = photo(2, 2, 1)
    np.testing.assert_array_equal(Preprocessing(2, 1, window=(0, 3000)).apply(plain)[0], plain)


@pytest.mark.parametrize(
    ("image", "window"),
    [
        (np.array([[0, 1], [2, 3]], np.int32) + 100_000_000, (100_000_000, 100_000_003)),
        (np.array([[0, 1], [2, 3]], np.uint32) + 4_000_000_000, (4_000_000_000, 4_000_000_003)),
        (np.array([[0, 1], [2, 3]]) / 1000 + 50_000, (50_000, 50_000.003)),
    ],
)
def test_a_narrow_window_far_from_zero_is_exact(image: NDArray[Any], window: tuple[float, float]) -> None:
    """float32 has steps of 8 at 1e8, of 256 at 4e9 and of 0.004 at 50,000."""
    assert Preprocessing(2, 1, window=window).apply(image).tolist() == [[[0, 85], [170, 255]]]


def test_a_window_on_colours_whose_low_bits_pillow_drops_is_refused() -> None:
    """Pillow reads PNG of 3 x 16 bits as 3 x 8: within 0 to 4095 all of it would be black."""
    rows = b"".join(b"\0" + bytes([15, 255] * 3 * 8) for _ in range(8))
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in parts:
        content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    assert (prepare(Preprocessing(8), content) == 15).all()
    with pytest.raises(ValueError, match="16 bits of colour, of which 8 are read"):
        Preprocessing(8, window=(0, 4095)).decode(content)


def test_12_bit_tiff_is_scaled_by_its_bit_depth() -> None:
    # two pixels of 12 bits, 0xFFF and 0x800, packed into three bytes, after one directory of tags
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 122, 277: 1, 278: 1, 279: 3}
    entries = b"".join(
        tag.to_bytes(2, "little") + (4).to_bytes(2, "little") + (1).to_bytes(4, "little") + value.to_bytes(4, "little")
        for tag, value in tags.items()
    )
    head = b"II*\x00" + (8).to_bytes(4, "little") + len(tags).to_bytes(2, "little")
    content = head + entries + bytes(4) + b"\xff\xf8\x00"
    assert len(head + entries) + 4 == 122
    one = Preprocessing(2, 1)
    assert one.apply(one.decode(content))[0, 0].tolist() == [255, 128]


@pytest.mark.parametrize(
    ("values", "window", "black_is_zero"),
    [
        (np.array([[0, 85], [170, 255]], np.uint8), None, [0, 85, 170, 255]),
        (np.array([[0, 85], [170, 255]], np.uint16) * 257, None, [0, 85, 170, 255]),
        (np.array([[0, 85], [170, 255]], np.uint16), (0, 255), [0, 85, 170, 255]),
        (np.array([[0, 85], [170, 255]], np.float32) / 255, None, [0, 85, 170, 255]),
    ],
)
def test_a_tiff_whose_zero_is_white_is_turned_round(
    values: NDArray[Any], window: tuple[float, float] | None, black_is_zero: list[int]
) -> None:
    content = bytearray(encoded(Image.fromarray(values), "TIFF"))
    one, directory = Preprocessing(2, 1, window=window), int.from_bytes(content[4:8], "little")
    assert one.apply(one.decode(bytes(content))).ravel().tolist() == black_is_zero
    tag = next(at for at in range(directory + 2, len(content), 12) if content[at : at + 2] == b"\x06\x01")  # 262
    content[tag + 8] = 0  # WhiteIsZero
    assert one.apply(one.decode(bytes(content))).ravel().tolist() == black_is_zero[::-1]


def test_values_without_a_range_need_a_window() -> None:
    for array in (np.array([[0.0, 1.5]]), np.array([[-1.0, 0.0]]), np.array([[0, 9]], np.int32)):
        with pytest.raises(ValueError, match="need a window"):
            Preprocessing().apply(array)
    with pytest.raises(ValueError, match="need a window"):
        Preprocessing().apply(Preprocessing().decode(encoded(Image.fromarray(np.full((4, 4), 70.0, "f4")), "TIFF")))
    with pytest.raises(ValueError, match="not finite"):
        Preprocessing(window=(0, 1)).apply(np.array([[np.nan, 0.0]]))


@pytest.mark.parametrize(
    "array", [np.zeros((2, 2, 4), "u1"), np.zeros(3, "u1"), np.zeros((0, 3), "u1"), np.zeros((2, 2), "c8")]
)
def test_other_arrays_are_refused(array: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match="an image "):
        Preprocessing().apply(array)


# Geometry -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filter_", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(64, 128), (128, 64), (96, 96)])
def test_crop_is_torchvisions_resize_and_center_crop(filter_: str, size: tuple[int, int]) -> None:
    from torchvision.transforms import v2  # not above: every worker would import it, for seconds

    one = Preprocessing(28, resize="crop", interpolation=filter_, crop_fraction=0.875)
    image = Image.fromarray(photo(*size))
    theirs = v2.Compose([v2.Resize(32, v2.InterpolationMode(filter_)), v2.CenterCrop(28)])(image)
    difference = channels_last(one.apply(image)).astype(int) - np.asarray(theirs)
    assert np.abs(difference).max() <= 1
    assert np.count_nonzero(difference) < 0.2 * difference.size


def test_pad_keeps_the_aspect() -> None:
    pixels = Preprocessing(32, resize="pad").apply(np.full((10, 40, 3), 200, np.uint8))
    filled = pixels[0] > 0
    assert filled.all(axis=1).sum() == 8
    assert filled.all(axis=1)[12:20].all()
    assert Preprocessing(8, resize="pad").apply(np.full((1, 4000), 200, np.uint8)).sum() == 3 * 8 * 200


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(RESIZES), st.sampled_from(list(INTERPOLATIONS)))
@settings(max_examples=60, deadline=None)
def test_a_constant_image_stays_constant(height: int, width: int, resize: str, filter_: str) -> None:
    one = Preprocessing(12, 1, resize, filter_, 0.7)
    for image in (np.full((height, width), 77, np.uint8), np.full((height, width), 77 * 257, np.uint16)):
        assert set(np.unique(one.apply(image)).tolist()) <= ({77, 0} if resize == "pad" else {77})


# DICOM --------------------------------------------------------------------------------------------------------------


def dicom(pixels: NDArray[Any], bits: int = 12, **tags: Any) -> bytes:
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file = FileDataset("", {}, file_meta=meta, preamble=bytes(128))
    file.Rows, file.Columns = pixels.shape[-2:] if pixels.ndim == 2 else pixels.shape[:2]
    file.SamplesPerPixel = 1 if pixels.ndim == 2 else 3
    file.PhotometricInterpretation = "MONOCHROME2" if pixels.ndim == 2 else "RGB"
    if pixels.ndim == 3:
        file.PlanarConfiguration = 0
    file.BitsAllocated, file.BitsStored, file.HighBit = pixels.itemsize * 8, bits, bits - 1
    file.PixelRepresentation = int(pixels.dtype.kind == "i")
    file.PixelData = pixels.tobytes()
    for name, value in tags.items():
        setattr(file, name, value)
    buffer = BytesIO()
    file.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


RAMP = np.array([[0, 1365], [2730, 4095]], np.uint16)


@pytest.mark.parametrize(
    ("tags", "window", "expected"),
    [
        ({}, None, [0, 85, 170, 255]),  # 12 bits stored
        ({"PhotometricInterpretation": "MONOCHROME1"}, None, [255, 170, 85, 0]),
        ({}, (1365, 2730), [0, 0, 255, 255]),
        ({"PhotometricInterpretation": "MONOCHROME1"}, (1365, 2730), [255, 255, 0, 0]),
        # its own window: from c - w/2 to c + w/2 - 1, the first of several
        ({"WindowCenter": 2048.0, "WindowWidth": 1366.0}, None, [0, 0, 255, 255]),
        ({"WindowCenter": [2048, 9], "WindowWidth": [4096, 9]}, None, [0, 85, 170, 255]),
        ({"WindowCenter": 2047.5, "WindowWidth": 4095, "VOILUTFunction": "LINEAR_EXACT"}, None, [0, 85, 170, 255]),
        # 255/(1 + exp(-4 (x - 1365)/1365))
        ({"WindowCenter": 1365, "WindowWidth": 1365, "VOILUTFunction": "SIGMOID"}, None, [5, 128, 250, 255]),
        ({"WindowCenter": 2048, "WindowWidth": 1366}, (0, 4095), [0, 85, 170, 255]),  # the set window wins
        # rescaled to Hounsfield units from -1024 to 3071
        ({"RescaleSlope": 1, "RescaleIntercept": -1024}, None, [0, 85, 170, 255]),
        ({"RescaleSlope": 1, "RescaleIntercept": -1024}, (-1024, 341), [0, 255, 255, 255]),
        ({"RescaleSlope": -1, "RescaleIntercept": 0}, None, [255, 170, 85, 0]),
    ],
)
def test_dicom(tags: dict[str, Any], window: tuple[float, float] | None, expected: list[int]) -> None:
    pixels = prepare(Preprocessing(2, 1, window=window), dicom(RAMP, **tags))
    assert pixels.ravel().tolist() == expected


@pytest.mark.parametrize(
    ("tags", "window"),
    [
        ({}, (1e8, 1e8 + 3)),
        ({}, None),  # 2 bits stored
        ({"WindowCenter": "100000001.5", "WindowWidth": 3, "VOILUTFunction": "LINEAR_EXACT"}, None),
        ({"WindowCenter": "100000002", "WindowWidth": 4}, None),  # from c - w/2 to c + w/2 - 1
    ],
)
@pytest.mark.parametrize("inverted", [False, True])
def test_dicom_values_far_from_zero(tags: dict[str, Any], window: tuple[float, float] | None, inverted: bool) -> None:
    """0 to 3, rescaled by 100,000,000, where float32 has steps of 8."""
    rescaled = {"RescaleSlope": 1, "RescaleIntercept": 100_000_000}
    shown = {"PhotometricInterpretation": "MONOCHROME1"} if inverted else {}
    file = dicom(RAMP // 1365, bits=2, **tags, **rescaled, **shown)
    expected = [255, 170, 85, 0] if inverted else [0, 85, 170, 255]
    assert prepare(Preprocessing(2, 1, window=window), file).ravel().tolist() == expected


def test_signed_dicom_without_a_window() -> None:
    signed = (RAMP.astype(np.int32) - 2048).astype(np.int16)
    assert prepare(Preprocessing(2, 1), dicom(signed)).ravel().tolist() == [0, 85, 170, 255]


@pytest.mark.parametrize(
    ("stored", "first", "rescaled", "expected"),
    [
        (RAMP // 1365, 0, {}, [9, 51, 102, 255]),
        (RAMP // 1365 + 99, 28, {"RescaleSlope": 0.29, "RescaleIntercept": 0}, [9, 51, 51, 51]),  # 28.71, 29, 29.29 ...
    ],
)
def test_dicom_look_up_table(stored: NDArray[Any], first: int, rescaled: dict[str, float], expected: list[int]) -> None:
    from pydicom.dataset import Dataset
    from pydicom.sequence import Sequence

    table = Dataset()
    table.LUTDescriptor, table.LUTData = [4, first, 8], np.array([9, 51, 102, 255], np.uint16).tobytes()
    table["LUTData"].VR = "OW"
    pixels = prepare(Preprocessing(2, 1), dicom(stored, VOILUTSequence=Sequence([table]), **rescaled))
    assert pixels.ravel().tolist() == expected


def test_colour_dicom_and_refusals() -> None:
    colours = photo(8, 8)
    np.testing.assert_array_equal(channels_last(prepare(Preprocessing(8), dicom(colours, bits=8))), colours)
    with pytest.raises(ValueError, match="5 frames"):
        Preprocessing().decode(dicom(RAMP, NumberOfFrames=5))
    with pytest.raises(ValueError, match="2 x 2 pixels; allowed are 3"):
        Preprocessing().decode(dicom(RAMP), max_pixels=3)
    with pytest.raises(ValueError, match="damaged"):
        Preprocessing().decode(dicom(RAMP)[:-4])


@pytest.mark.parametrize(("window", "expected"), [(None, [0, 85, 170, 255]), ((1365, 2730), [0, 0, 255, 255])])
def test_colour_dicom_of_12_bits(window: tuple[float, float] | None, expected: list[int]) -> None:
    pixels = prepare(Preprocessing(2, window=window), dicom(np.stack([RAMP] * 3, axis=2)))
    assert pixels.reshape(3, 4).tolist() == [expected] * 3


def palette(entries: list[int], bits: int) -> dict[str, Any]:
    """Return the tags of a palette whose colours are (r, 0, r), r one of the entries."""
    tags: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for colour, levels in (("Red", entries), ("Green", [0] * len(entries)), ("Blue", entries)):
        tags[f"{colour}PaletteColorLookupTableDescriptor"] = [len(entries), 0, bits]
        tags[f"{colour}PaletteColorLookupTableData"] = np.array(levels, f"u{bits // 8}").tobytes()
    return tags


@pytest.mark.parametrize("window", [None, (0, 3)])
@pytest.mark.parametrize(("bits", "entries"), [(8, [255, 0, 102, 51]), (16, [65535, 0, 26214, 13107])])
def test_palette_dicom_has_the_colours_that_its_numbers_stand_for(
    bits: int, entries: list[int], window: tuple[float, float] | None
) -> None:
    numbers = np.array([[0, 1], [2, 3]], np.uint8)
    pixels = prepare(Preprocessing(2, window=window), dicom(numbers, bits=8, **palette(entries, bits)))
    assert pixels.reshape(3, 4).tolist() == [[255, 0, 102, 51], [0] * 4, [255, 0, 102, 51]]


def deflated(content: bytes, more: int) -> bytes:
    """Return a DICOM file deflated as a whole, with an element of `more` zeros."""
    import pydicom

    file = pydicom.dcmread(BytesIO(content))
    file.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    file.add_new((0x11, 0x10), "LO", "zeros")
    file.add_new((0x11, 0x1001), "OB", bytes(more))
    buffer = BytesIO()
    file.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def test_a_deflated_dicom_file_may_not_grow_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    pydicom = pytest.importorskip("pydicom")
    plain = dicom(RAMP)
    intact, large = deflated(plain, 1 << 19), deflated(plain, 1 << 23)
    np.testing.assert_array_equal(prepare(Preprocessing(2, 1), intact), prepare(Preprocessing(2, 1), plain))
    assert len(large) < 20_000
    monkeypatch.setattr(pydicom, "dcmread", lambda *_, **__: pytest.fail("it is inflated"))
    with pytest.raises(ValueError, match="a deflated DICOM file of more than 1 MB"):
        Preprocessing().decode(large, max_pixels=100)
    with pytest.raises(ValueError, match="too large: a deflated DICOM file of more than 1 MB"):
        read_encoded(BytesIO(large), 100)


def test_a_dicom_file_whose_decoder_is_not_installed_is_not_called_damaged() -> None:
    pydicom = pytest.importorskip("pydicom")
    syntax = pydicom.uid.JPEGLSLossless
    if pydicom.pixels.get_decoder(syntax).is_available:
        pytest.skip("the decoder is installed")
    file = pydicom.dcmread(BytesIO(dicom(RAMP)))
    file.file_meta.TransferSyntaxUID = syntax
    file.PixelData = pydicom.encaps.encapsulate([bytes(8)])
    buffer = BytesIO()
    file.save_as(buffer)
    with pytest.raises(ValueError, match=r"^DICOM compression without its decoder: JPEG-LS .* and pyjpegls"):
        Preprocessing().decode(buffer.getvalue())


def test_dicom_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    with pytest.raises(ImportError, match=r"fedtta\[dicom\]"):
        Preprocessing().decode(bytes(128) + b"DICM" + bytes(100))


# The record ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, (-100.0, 900.5)])
def test_it_comes_back_from_json(window: tuple[float, float] | None) -> None:
    import json

    one = Preprocessing(48, 1, "crop", "lanczos", 0.875, window)
    assert Preprocessing.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert Preprocessing.from_dict({}) == Preprocessing()
    assert Preprocessing.from_dict({"window": "", "image_size": 8}) == Preprocessing(8)


@pytest.mark.parametrize(
    "change",
    [
        {"image_size": 0}, {"image_size": 8.0}, {"channels": 2}, {"channels": True}, {"resize": "squash"},
        {"interpolation": "area"}, {"crop_fraction": 0}, {"crop_fraction": 1.5}, {"crop_fraction": "1"},
        {"window": "1"}, {"window": "5,5"}, {"window": (0, float("inf"))}, {"window": "a,b"}, {"size": 3},
    ],
)  # fmt: skip
def test_impossible_values_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Preprocessing.from_dict(change)
