"""Contact sheet of the corruptions: one image under every corruption and severity, as a labelled PNG.

    python -m fedtta.data.corruptions.sheet OUT.png [--image FILE] [--size 32] [--seed 0]

The default image is the flower bundled with scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fedtta.data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt

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
    """Write a PNG with one row per corruption: the original, then each severity.

    Parameters
    ----------
    image : Tensor
        [C, H, W], floating point in [0, 1], C 1 or 3.
    path : str or Path
        Output file; missing folders are created.
    severities : sequence of int
        Columns, each in 1..5.
    names : sequence of str
        Rows, corruption names.
    seed : int
        Seed of every cell.

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
    target.parent.mkdir(parents=True, exist_ok=True)
    _draw_sheet(rows, ["original", *map(str, severities)], names).save(target, format="PNG")
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
            tile = _to_rgb(cell).resize((width * factor, height * factor), Image.Resampling.NEAREST)
            sheet.paste(tile, (LABEL_WIDTH + column * step_x, top))
    return sheet


def _to_rgb(image: Tensor) -> Image.Image:
    """Convert [C, H, W] in [0, 1] to an 8-bit RGB image."""
    levels = (image * 255).round().to(torch.uint8).expand(3, -1, -1)
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())


def load_image(path: Path | None, size: int) -> Tensor:
    """Return the central square of an image file, or of scikit-learn's flower, as [3, size, size] in [0, 1].

    Raises FileNotFoundError for a missing file and PIL.UnidentifiedImageError for another format.
    """
    if path is None:
        from sklearn.datasets import load_sample_image  # slow to import, needed only here

        image = Image.fromarray(load_sample_image("flower.jpg"))
    else:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).float() / 255


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fedtta.data.corruptions.sheet", description="Draw every corruption."
    )
    parser.add_argument("out", type=Path, help="PNG to write")
    parser.add_argument("--image", type=Path, help="image to corrupt (default: scikit-learn's flower)")
    parser.add_argument("--size", type=int, default=32, help="side it is resized to (default 32)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(contact_sheet(load_image(options.image, options.size), options.out, seed=options.seed))


if __name__ == "__main__":
    main()
