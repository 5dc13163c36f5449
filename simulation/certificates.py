"""Keys of a deployment: `python -m simulation.certificates --folder keys --nodes 3 --host name` (`make keys`).

    ca.crt, ca.key                 authority of the SuperLink; SuperNodes and `flwr` are given ca.crt
    server.crt, server.key         the SuperLink under the given hosts, and under localhost
    node-0, node-0.pub, ...        a SuperNode's key, which is its identity (`flwr supernode register node-0.pub`)
    agents-ca.crt, agents-ca.key   authority of agents that listen on TCP (none does unless told to)
    agent-<host>.crt, .key         such an agent
    program.crt, program.key       a program that may talk to such agents

Agents have an authority of their own, so that none of them can pass for the SuperLink. Whoever has `ca.key` can: keep
it away from the machines. What is there is kept, unless it is asked to be replaced; private files have mode 0600.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simulation.key_files import Authority, KeysError, Leaf, NodeKey

DAYS = 365  # certificates are valid this long
AUTHORITY_DAYS = 3650
LOCAL = ("localhost", "127.0.0.1", "::1")  # the SuperLink's own processes reach it so
#: What may be asked to be replaced. What an authority has signed is worthless without it, and replaced with it.
KINDS = ("authorities", "server", "agents", "nodes")


@dataclass(frozen=True)
class Keys:
    """Where the keys of a deployment are."""

    folder: Path

    @property
    def ca(self) -> Path:
        """Return the certificate that nodes and `flwr` trust."""
        return self.folder / "ca.crt"

    @property
    def server(self) -> tuple[Path, Path]:
        """Return the SuperLink's certificate and private key."""
        return self.folder / "server.crt", self.folder / "server.key"

    def node(self, number: int) -> tuple[Path, Path]:
        """Return the private and the public key of a SuperNode."""
        return self.folder / f"node-{number}", self.folder / f"node-{number}.pub"


def make_keys(
    folder: Path,
    nodes: int,
    hosts: Sequence[str] = (),
    agents: Sequence[str] = (),
    days: int = DAYS,
    replace: Sequence[str] = (),
) -> tuple[Keys, list[str]]:
    """Make what is missing in `folder`; return where things are (absolute paths), and a line on each of them.

    Parameters
    ----------
    nodes : int
        SuperNodes, 1 or more; keys of others are left alone.
    hosts : sequence of str
        Names and addresses by which nodes reach the SuperLink, besides those of this machine itself.
    agents : sequence of str
        Names or addresses of devices whose agents listen on TCP.
    days : int
        How long a new certificate is valid, 1 to `AUTHORITY_DAYS`; an authority is always valid for the latter.
    replace : sequence of str
        Of `KINDS`.

    Raises
    ------
    KeysError
        An impossible number, host or kind; a file that is there is damaged, has run out, lacks its other half or a
        host, was signed by another authority, or is private and readable for others. Nothing is written then.
    """
    unknown = sorted(set(replace) - set(KINDS))
    if unknown:
        raise KeysError(f"replace = {unknown[0]!r}: allowed are {', '.join(KINDS)}")
    for name, value, high in (("nodes", nodes, 100_000), ("days", days, AUTHORITY_DAYS)):
        if not 1 <= value <= high:
            raise KeysError(f"{name} = {value}: allowed are 1 to {high}")
    keys, new = Keys(folder.expanduser().resolve()), set(replace)
    if "authorities" in new:
        new |= {"server", "agents"}

    def signed(name: str, hosts: Sequence[str], client: bool, by: Authority, kind: str) -> Leaf:
        return Leaf(
            keys.folder / name, tuple(hosts), "client" if client else "server", by, days, kind, kind in new
        )  # fmt: skip

    main = Authority(keys.folder / "ca", "FedTTA SuperLink authority", AUTHORITY_DAYS, "authorities" in new)
    files: list[Authority | Leaf | NodeKey] = [main, signed("server", (*LOCAL, *hosts), False, main, "server")]
    if agents:
        device = Authority(keys.folder / "agents-ca", "FedTTA agents authority", AUTHORITY_DAYS, "authorities" in new)
        files.append(device)
        for host in dict.fromkeys(agents):
            files.append(signed(f"agent-{host.replace(':', '_')}", (*LOCAL, host), False, device, "agents"))
        files.append(signed("program", (), True, device, "agents"))
    files += [NodeKey(keys.node(number)[0], "nodes" in new) for number in range(nodes)]
    for each in files:  # all are looked at before one is written
        each.check()
    keys.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return keys, [each.make() for each in files]


def main(words: Sequence[str] | None = None) -> int:
    """Make keys and say what there is; exit status 0, or 2 when something was refused."""
    parser = argparse.ArgumentParser(
        prog="python -m simulation.certificates", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=Path("keys"), help="where the files are (default: keys)")
    parser.add_argument("--nodes", type=int, default=3, help="number of SuperNodes (default: 3)")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="by which nodes reach the SuperLink; may be repeated",
    )
    parser.add_argument(
        "--agent",
        action="append",
        default=[],
        metavar="NAME",
        help="device whose agent listens on TCP; may be repeated",
    )
    parser.add_argument("--days", type=int, default=DAYS, help=f"validity of new certificates (default: {DAYS})")
    parser.add_argument("--replace", nargs="+", choices=KINDS, default=[], help="make these anew")
    arguments = parser.parse_args(words)
    try:
        keys, lines = make_keys(
            arguments.folder, arguments.nodes, arguments.host, arguments.agent, arguments.days, arguments.replace
        )
    except (KeysError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    print(f"Keys: {keys.folder}/ (the SuperLink needs ca.crt, server.crt, server.key; a SuperNode ca.crt and its key)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
