"""Stream the images of a folder to a device's agent and print what each is; numpy, grpcio, protobuf and pillow suffice.

python -m examples.stream_images FOLDER unix:/var/lib/fedtta/agent.sock
"""

import sys
from pathlib import Path

import grpc
import numpy as np
from PIL import Image

from messages import agent_pb2 as pb
from messages import agent_pb2_grpc


def requests(folder, channels, height, width):
    """Yield one image a request, files in the order of their names."""
    for path in sorted(path for path in Path(folder).iterdir() if path.suffix in (".png", ".jpg", ".jpeg", ".webp")):
        image = Image.open(path).convert("L" if channels == 1 else "RGB").resize((width, height))
        pixels = np.asarray(image, np.uint8).reshape(height, width, channels).transpose(2, 0, 1)
        images = pb.Images(kind=pb.Images.UINT8, shape=[1, channels, height, width], values=pixels.tobytes())
        yield pb.PredictRequest(id=path.name, images=images)


folder, address = sys.argv[1:]
agent = agent_pb2_grpc.PredictorStub(grpc.insecure_channel(address))
status = agent.Status(pb.StatusRequest(), wait_for_ready=True, timeout=30)
if not status.shape:
    sys.exit("the agent has no model yet: it comes from training")
for reply in agent.PredictStream(requests(folder, *status.shape)):
    p, e = np.frombuffer(reply.probabilities, "<f4"), np.frombuffer(reply.weights, "<f4")
    print(reply.id, reply.error or f"{status.classes[p.argmax()]} {p.max():.3f}", *(f"e={weight:.2f}" for weight in e))
