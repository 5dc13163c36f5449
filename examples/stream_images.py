"""Stream the image files of a folder to a device's agent and print its predictions.

python -m examples.stream_images FOLDER unix:/var/lib/fedtta/agent.sock

The files are sent as they are: the agent decodes and resizes them as its model was trained. Needs numpy, grpcio and
protobuf; neither torch nor Flower nor Pillow.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np

from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc

ENDINGS = (".bmp", ".dcm", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


def requests(folder: Path) -> Iterator[pb.PredictRequest]:
    """Yield one request for each file, in the order of the file names."""
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.suffix.lower() in ENDINGS):
        images = pb.Images(kind=pb.Images.ENCODED, files=[path.read_bytes()])
        yield pb.PredictRequest(id=path.name, images=images)


def main(folder: str, address: str) -> None:
    """Stream; print one line an image: name, class, probability, weight of the global head (if the method has one)."""
    agent = agent_pb2_grpc.PredictorStub(grpc.insecure_channel(address))
    status = agent.Status(pb.StatusRequest(), wait_for_ready=True, timeout=30)
    if not status.shape:
        sys.exit("the agent has no model yet: it comes from training")
    for reply in agent.PredictStream(requests(Path(folder))):
        p, e = np.frombuffer(reply.probabilities, "<f4"), np.frombuffer(reply.weights, "<f4")
        answer = reply.error or f"{status.classes[p.argmax()]} {p.max():.3f}"
        print(reply.id, answer, *(f"e={weight:.2f}" for weight in e))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m examples.stream_images FOLDER ADDRESS")
    if not Path(sys.argv[1]).is_dir():
        sys.exit(f"{sys.argv[1]}: no such folder")
    try:
        main(*sys.argv[1:])
    except grpc.RpcError as error:
        sys.exit(f"the agent at {sys.argv[2]} does not answer: {error.details()}")
