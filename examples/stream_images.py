"""Stream the images of a folder to a device's agent and print its predictions.

python -m examples.stream_images FOLDER unix:/var/lib/fedtta/agent.sock

Needs numpy, grpcio, protobuf and pillow; neither torch nor Flower.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
from PIL import Image

from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc

ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


def requests(folder: Path, channels: int, height: int, width: int) -> Iterator[pb.PredictRequest]:
    """Yield one request for each image, in the order of the file names."""
    for path in sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS):
        image = Image.open(path).convert("L" if channels == 1 else "RGB").resize((width, height))
        pixels = np.asarray(image, np.uint8).reshape(height, width, channels).transpose(2, 0, 1)
        images = pb.Images(kind=pb.Images.UINT8, shape=[1, channels, height, width], values=pixels.tobytes())
        yield pb.PredictRequest(id=path.name, images=images)


def main(folder: str, address: str) -> None:
    """Ask for the model's input shape, then stream; one line an image: name, class, probability, head weight."""
    agent = agent_pb2_grpc.PredictorStub(grpc.insecure_channel(address))
    status = agent.Status(pb.StatusRequest(), wait_for_ready=True, timeout=30)
    if not status.shape:
        sys.exit("the agent has no model yet: it comes from training")
    for reply in agent.PredictStream(requests(Path(folder), *status.shape)):
        p, e = np.frombuffer(reply.probabilities, "<f4"), np.frombuffer(reply.weights, "<f4")
        answer = reply.error or f"{status.classes[p.argmax()]} {p.max():.3f}"
        print(reply.id, answer, *(f"e={weight:.2f}" for weight in e))


if __name__ == "__main__":
    main(*sys.argv[1:])
