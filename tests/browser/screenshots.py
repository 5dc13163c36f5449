"""`make screenshots`: pictures of the pages for the documentation, from made runs and devices."""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from playwright.sync_api import Browser, expect

from tests.browser import stage

ASSETS = stage.ROOT / "docs" / "assets"
COLORS = 128  # of a picture: enough for text and lines, and a third of the bytes
MOST_BYTES = 150_000
SCALE = 1.5  # pixels of a picture for each of the page


class Picture(NamedTuple):
    """A page, the part of it that is shown, and the schemes of colors."""

    name: str
    path: str
    width: int = 960
    height: int = 900
    schemes: tuple[str, ...] = ("light", "dark")
    folded: str = ""  # selector of a part that is closed first


PICTURES = (
    Picture("watch-run", f"/runs/{stage.RUNNING}", height=1150, folded="#now-clients"),
    Picture("watch-phone", f"/runs/{stage.RUNNING}", 390, 780, ("light",)),
    Picture("watch-report", f"/runs/{stage.ENDED}"),
    Picture("watch-devices", "/devices", 1280, 900),
    Picture("watch-device", "/devices/ward-1", height=1250),
    Picture("watch-runs", "/", 960, 300),
)


def take(browser: Browser, address: str, picture: Picture, scheme: str) -> bytes:
    """Return a picture as PNG."""
    size = {"width": picture.width, "height": picture.height}
    with browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=SCALE) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(address + picture.path)
        expect(page.locator("#connection")).not_to_be_empty()
        if picture.path == "/devices":
            expect(page.locator("#alerts td").first).to_be_visible(timeout=60_000)
        if picture.folded:
            page.locator(f"{picture.folded} > summary").click()
        image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    made = io.BytesIO()
    few = image.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)  # keeps colors of few pixels
    few.save(made, "PNG", optimize=True)
    return made.getvalue()


def main(words: Sequence[str] | None = None) -> int:
    """Write all pictures; exit status 1 if there is no browser or one is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder of the pictures")
    parser.add_argument("--only", default="", help="beginning of the names of the pictures to make")
    options = parser.parse_args(words)
    if not stage.chromium():
        print("error: no chromium on this machine", file=sys.stderr)
        return 1
    large = 0
    with tempfile.TemporaryDirectory() as folder:
        results = stage.results(Path(folder))
        with stage.served(results) as address, stage.Run(results), stage.browser() as browser:
            for picture in PICTURES:
                for scheme in picture.schemes if picture.name.startswith(options.only) else ():
                    content = take(browser, address, picture, scheme)
                    path = options.out / f"{picture.name}-{scheme}.png"
                    path.write_bytes(content)
                    large += len(content) > MOST_BYTES
                    print(f"{path.name}: {len(content) / 1000:.0f} kB")
    return min(large, 1)


if __name__ == "__main__":
    sys.exit(main())
