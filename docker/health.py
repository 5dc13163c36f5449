"""Ask gRPC health services, and pages: exit status 0 when all serve.

python docker/health.py unix:/run/agent.sock --wait 60
python docker/health.py https://localhost:8650/ --ca ca.crt
"""

from __future__ import annotations

import argparse
import http.client
import ssl
import sys
import time
import urllib.error
import urllib.request

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

PAUSE = 0.2  # seconds between two questions to a page


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
    """Ask a page until it answers; return 0 if that is in time and well, also that it needs a token, otherwise 1."""
    end = time.monotonic() + wait
    while True:
        try:
            left, tls = max(PAUSE, end - time.monotonic()), ssl.create_default_context(cafile=ca)
            with urllib.request.urlopen(address, timeout=left, context=tls) as answer:
                status = answer.status
            break
        except urllib.error.HTTPError as error:
            status = error.code
            break
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() + PAUSE > end:
                print(f"{address}: {error}", file=sys.stderr)
                return 1
        time.sleep(PAUSE)
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
