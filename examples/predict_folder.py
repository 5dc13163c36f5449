"""Predict the image files of a folder with a model file; neither an agent nor a federation is needed.

python -m examples.predict_folder results/<run>/model.safetensors FOLDER

Preprocessing and class names come from the model file, so an image gives the bytes that training and the agent see.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fedtta.models import Preprocessing, load_model


def images(folder: Path, preprocessing: Preprocessing) -> Iterator[tuple[str, Tensor | str]]:
    """Yield name and image [C, S, S], uint8, of each file in the order of the names; text says why there is none."""
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        try:
            yield path.name, torch.tensor(preprocessing.apply(preprocessing.decode(path.read_bytes())))
        except (ValueError, OSError) as error:
            yield path.name, str(error)


@torch.no_grad()
def main(model: str, folder: str) -> None:
    """Print one line an image: name, class, probability."""
    network, spec = load_model(model)
    if "preprocessing" not in spec:
        sys.exit(f"{model} does not say how images are prepared: it was written by an older version")
    classes = spec.get("classes") or [str(label) for label in range(spec["num_classes"])]
    for name, image in images(Path(folder), Preprocessing.from_dict(spec["preprocessing"])):
        if isinstance(image, str):
            print(name, image)
            continue
        p = network(image[None].float() / 255).softmax(1)[0]
        print(name, classes[int(p.argmax())], f"{float(p.max()):.3f}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m examples.predict_folder MODEL FOLDER")
    try:
        main(*sys.argv[1:])
    except (ValueError, OSError) as error:  # a damaged model file, or no such file or folder
        sys.exit(str(error))
