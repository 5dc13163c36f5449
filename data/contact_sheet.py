"""A contact sheet: one image under every corruption and severity, as a labelled PNG.

    python -m data.contact_sheet OUT.png [--image FILE] [--size 32] [--seed 0]

Without a file it shows the flower that scikit-learn bundles.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt

CELL = 96  # pixels of a cell, at least; small images are enlarged by a whole factor
GAP = 4
LABEL_WIDTH, HEADER_HEIGHT = 170, 28
FONT_SIZE = 15


def contact_sheet(
    image: Tensor,
    path: str | Path,
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    names: Sequence[str] = CORRUPTIONS + EXTRA_CORRUPTIONS,
    seed: int = 0,
) -> Path:
    """Write a PNG with a row for each corruption: the original, then each severity.

    Parameters
    ----------
    image : Tensor
        [C, H, W], floating point in [0, 1], C 1 or 3.
    path : str or Path
        Where to; missing folders are made, an older file is replaced in one step.
    severities : sequence of int
        Columns, each in 1..5.
    names : sequence of str
        Rows, corruption names.
    seed : int
        The same for every cell.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        If the image is not [C, H, W], there is no row or column, or `corrupt` refuses an argument.
    """
    if image.ndim != 3:
        raise ValueError(f"image must be [C, H, W], got shape {tuple(image.shape)}")
    if not names or not severities:
        raise ValueError("a contact sheet needs at least one corruption and one severity")
    batch = image.detach().cpu().unsqueeze(0)
    rows = [[batch[0], *(corrupt(batch, name, level, [seed])[0] for level in severities)] for name in names]
    target = Path(path)
    _save_png(_draw_sheet(rows, ["original", *map(str, severities)], names), target)
    return target


def _draw_sheet(rows: list[list[Tensor]], header: list[str], labels: Sequence[str]) -> Image.Image:
    """Return the grid of images [C, H, W] with its labels."""
    height, width = rows[0][0].shape[-2:]
    factor = max(1, round(CELL / max(height, width)))
    step_x, step_y = width * factor + GAP, height * factor + GAP
    font = ImageFont.load_default(FONT_SIZE)
    size = (LABEL_WIDTH + step_x * len(header), HEADER_HEIGHT + step_y * len(rows))
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for column, text in enumerate(header):
        middle = LABEL_WIDTH + column * step_x + width * factor // 2
        pen.text((middle, HEADER_HEIGHT // 2), text, fill="black", font=font, anchor="mm")
    for row, (label, cells) in enumerate(zip(labels, rows, strict=True)):
        top = HEADER_HEIGHT + row * step_y
        pen.text((LABEL_WIDTH - 10, top + height * factor // 2), label, fill="black", font=font, anchor="rm")
        for column, cell in enumerate(cells):
            picture = _to_picture(cell).resize((width * factor, height * factor), Image.Resampling.NEAREST)
            sheet.paste(picture, (LABEL_WIDTH + column * step_x, top))
    return sheet


def _to_picture(image: Tensor) -> Image.Image:
    """Return [C, H, W] in [0, 1] as an 8-bit RGB picture."""
    levels = (image * 255).round().to(torch.uint8).expand(3, -1, -1)
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())


def _save_png(picture: Image.Image, path: Path) -> None:
    """Write a PNG so that a reader sees the old file or the whole new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            picture.save(file, format="PNG")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_picture(path: Path | None, size: int) -> Tensor:
    """Return the middle square of a picture file, or of scikit-learn's flower, as [3, size, size] in [0, 1].

    Raises FileNotFoundError for a missing file and PIL.UnidentifiedImageError for one that is no picture.
    """
    if path is None:
        from sklearn.datasets import load_sample_image  # slow to import, needed only here

        picture = Image.fromarray(load_sample_image("flower.jpg"))
    else:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    square = picture.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).float() / 255


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m data.contact_sheet", description="Show every corruption.")
    parser.add_argument("out", type=Path, help="PNG to write")
    parser.add_argument("--image", type=Path, help="picture to corrupt (default: scikit-learn's flower)")
    parser.add_argument("--size", type=int, default=32, help="side it is resized to (default 32)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(contact_sheet(load_picture(options.image, options.size), options.out, seed=options.seed))


if __name__ == "__main__":
    main()
