"""Ask gRPC health services: exit status 0 when all serve. `python docker/health.py unix:/run/agent.sock --wait 60`."""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub


def main() -> int:
    """Ask each once; 0: all serve, 1: one does not, or does not answer."""
    parser = argparse.ArgumentParser(prog="health.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("addresses", nargs="+", metavar="address", help="host:port or unix:/path, without TLS")
    parser.add_argument("--wait", type=float, default=5.0, help="seconds that each may take to come up (default: 5)")
    arguments = parser.parse_args()
    return max(ask(address, arguments.wait) for address in arguments.addresses)


def ask(address: str, wait: float) -> int:
    """Ask one and say what it answers."""
    # a socket that is not there yet is looked for again soon, not after gRPC's growing pauses
    options = [("grpc.max_reconnect_backoff_ms", 1000), ("grpc.initial_reconnect_backoff_ms", 200)]
    with grpc.insecure_channel(address, options) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=wait, wait_for_ready=True)
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print(f"{address}: {HealthCheckResponse.ServingStatus.Name(answer.status)}")
    return 0 if answer.status == HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
