"""Ask gRPC health services, and pages: exit status 0 when all serve.

python docker/health.py unix:/run/agent.sock --wait 60
python docker/health.py https://localhost:8650/ --ca ca.crt
"""

from __future__ import annotations

import argparse
import ssl
import sys
import urllib.error
import urllib.request

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub


def main() -> int:
    """Ask each address once; return exit status 0 if all serve, otherwise 1."""
    parser = argparse.ArgumentParser(prog="health.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("addresses", nargs="+", metavar="address", help="host:port, unix:/path, https://host:port/")
    parser.add_argument("--ca", metavar="FILE", help="authority of an https address")
    parser.add_argument("--wait", type=float, default=5.0, help="seconds for each to start (default: 5)")
    arguments = parser.parse_args()
    return max(
        ask_page(address, arguments.wait, arguments.ca)
        if address.startswith("https://")
        else ask(address, arguments.wait)
        for address in arguments.addresses
    )


def ask_page(address: str, wait: float, ca: str | None) -> int:
    """Ask a page once; return 0 if it answers, also that it needs a token, otherwise 1."""
    try:
        with urllib.request.urlopen(address, timeout=wait, context=ssl.create_default_context(cafile=ca)) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    except OSError as error:
        print(f"{address}: {error}", file=sys.stderr)
        return 1
    print(f"{address}: {status}")
    return 0 if status in (200, 401) else 1


def ask(address: str, wait: float) -> int:
    """Ask one address and print the answer; return 0 if it serves, otherwise 1."""
    # look for a missing socket again soon, not after gRPC's growing pauses
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
