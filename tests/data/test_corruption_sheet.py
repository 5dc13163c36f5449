"""The contact sheet of the corruptions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from fedtta.data.corruptions import corrupt
from fedtta.data.corruptions.sheet import GAP, HEADER_HEIGHT, LABEL_WIDTH, contact_sheet, load_image, main


def cell(sheet: Image.Image, row: int, column: int, side: int = 96) -> np.ndarray:
    left, top = LABEL_WIDTH + column * (side + GAP), HEADER_HEIGHT + row * (side + GAP)
    return np.asarray(sheet.crop((left, top, left + side, top + side)))


def test_cells_hold_the_original_and_the_corrupted_image(tmp_path):
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    path = contact_sheet(image, tmp_path / "deep" / "sheet.png", (2, 5), ["fog", "contrast"], seed=4)
    with Image.open(path) as sheet:
        assert sheet.size == (LABEL_WIDTH + 3 * (96 + GAP), HEADER_HEIGHT + 2 * (96 + GAP))
        for row, name in enumerate(["fog", "contrast"]):
            wanted = [image, *(corrupt(image[None], name, level, [4])[0] for level in (2, 5))]
            for column, want in enumerate(wanted):
                levels = (want.permute(1, 2, 0) * 255).round().byte().numpy()
                np.testing.assert_array_equal(cell(sheet, row, column)[1::3, 1::3], levels)
        labels = np.asarray(sheet.crop((0, HEADER_HEIGHT, LABEL_WIDTH, sheet.height)))
        assert (labels < 100).any()  # there is text
    assert [file.name for file in path.parent.iterdir()] == ["sheet.png"]


def test_grey_image(tmp_path):
    with Image.open(contact_sheet(torch.rand(1, 8, 8), tmp_path / "grey.png", names=["frost"])) as sheet:
        pixels = cell(sheet, 0, 3)
    assert (pixels[..., 0] == pixels[..., 2]).all()


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"\[C, H, W\]"):
        contact_sheet(torch.rand(1, 3, 16, 16), tmp_path / "x.png")
    with pytest.raises(ValueError, match="at least one"):
        contact_sheet(torch.rand(3, 16, 16), tmp_path / "x.png", names=[])
    with pytest.raises(ValueError, match="unknown corruption"):
        contact_sheet(torch.rand(3, 16, 16), tmp_path / "x.png", names=["rain"])
    assert not list(tmp_path.iterdir())


def test_command_line(tmp_path, capsys):
    photo = tmp_path / "in.png"
    Image.new("RGB", (40, 20), (200, 100, 50)).save(photo)
    main([str(tmp_path / "out.png"), "--image", str(photo)])
    assert capsys.readouterr().out.strip() == str(tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as sheet:
        assert (cell(sheet, 0, 0) == (200, 100, 50)).all()
        assert sheet.height == HEADER_HEIGHT + 19 * (96 + GAP)


def test_default_image_is_a_photograph():
    image = load_image(None, 32)
    assert image.shape == (3, 32, 32)
    assert image.std() > 0.15
    assert image[0].mean() > image[2].mean()  # an orange flower
    with pytest.raises(FileNotFoundError):
        load_image("missing.png", 32)
