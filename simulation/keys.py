"""Keys and certificates of a deployment: `python -m fedtta.simulation.keys --nodes 3 --host name` (`make keys`).

    ca.crt, ca.key                 authority of the SuperLink; SuperNodes and `flwr` need ca.crt
    server.crt, server.key         the SuperLink under the given hosts and localhost
    node-0, node-0.pub, ...        a SuperNode's key, which is its identity (`flwr supernode register node-0.pub`)
    app.key, app.key.pub           signs apps (`fedtta sign`); with trusted.yaml, devices run no others
    agents-ca.crt, agents-ca.key   authority of agents that listen on TCP (off by default)
    agent-<host>.crt, .key         such an agent
    program.crt, program.key       a program that may talk to such agents

Agents have their own authority, so that none of them can pass for the SuperLink. The owner of `ca.key` can: keep it
away from the other machines. Existing files are checked and kept, unless `--replace` names them; private files have
mode 0600. TLS keys are ECDSA P-256; as Flower requires, SuperNode keys are ECDSA P-384 and the one that signs apps is
Ed25519, both in OpenSSH's format.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedtta.simulation.certificates import (
    Authority,
    Certificate,
    KeyPair,
    KeysError,
    Leaf,
    Purpose,
    app_key,
    hosts_of,
    read_certificate,
    trusted_entities,
    write,
)

DAYS = 365  # certificates are valid this long
AUTHORITY_DAYS = 3650
LOCAL = ("localhost", "127.0.0.1", "::1")  # names for processes of the same machine
#: What `--replace` may name. Replacing an authority replaces everything that it has signed.
KINDS = ("authorities", "server", "agents", "nodes", "app")


@dataclass(frozen=True)
class Keys:
    """Paths of a deployment's keys."""

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

    @property
    def app(self) -> Path:
        """Return the private key that signs apps."""
        return self.folder / "app.key"

    @property
    def trusted(self) -> Path:
        """Return the file for `flower-supernode --trusted-entities`."""
        return self.folder / "trusted.yaml"


def make_keys(
    folder: Path,
    nodes: int,
    hosts: Sequence[str] = (),
    agents: Sequence[str] = (),
    days: int = DAYS,
    replace: Sequence[str] = (),
    app: bool = False,
) -> tuple[Keys, list[str]]:
    """Make the missing files in `folder`; return their absolute paths, and a line of text on each.

    Parameters
    ----------
    nodes : int
        Number of SuperNodes, 1 or more; keys of further nodes are left alone.
    hosts : sequence of str
        Names and addresses by which nodes reach the SuperLink, beside localhost; none: a certificate that replaces
        another one has those of the other.
    agents : sequence of str
        Names or addresses of devices whose agents listen on TCP.
    days : int
        Validity of new certificates, 1 to `AUTHORITY_DAYS`; authorities are valid for the latter.
    replace : sequence of str
        Members of `KINDS`.
    app : bool
        Make the key that signs apps, too, and the file by which devices trust it.

    Raises
    ------
    KeysError
        A number, host or kind is invalid, or agents are to be replaced and none is named; or an existing file is
        damaged, has expired, lacks its counterpart or a host, was signed by another authority, or is private and
        readable by others. Nothing is written then. Private keys of authorities and SuperNodes may be elsewhere.
    """
    unknown = sorted(set(replace) - set(KINDS))
    if unknown:
        raise KeysError(f"replace = {unknown[0]!r}: allowed are {', '.join(KINDS)}")
    for name, value, high in (("nodes", nodes, 100_000), ("days", days, AUTHORITY_DAYS)):
        if not 1 <= value <= high:
            raise KeysError(f"{name} = {value}: allowed are 1 to {high}")
    keys, new = Keys(folder.expanduser().resolve()), set(replace)
    if not agents and ("agents" in new or ("authorities" in new and (keys.folder / "agents-ca.crt").exists())):
        raise KeysError(f"replace = {', '.join(replace)!r}: agents get new certificates; name them with --agent")
    if "authorities" in new:
        new |= {"server", "agents"}
    if "server" in new and not hosts:
        hosts = _hosts_before(keys.server[0])
    files = _certificates(keys.folder, hosts, agents, days, new)
    files += [KeyPair(keys.node(number)[0], "nodes", "nodes" in new) for number in range(nodes)]
    signs = app or "app" in new
    if signs:
        files.append(KeyPair(keys.app, "app", "app" in new))
    for each in files:  # check all before writing any
        each.check()
    keys.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = [each.make() for each in files]
    if signs:
        write(keys.trusted, trusted_entities(app_key(keys.app).public_key()).encode(), private=False)
    return keys, lines


def _certificates(
    folder: Path, hosts: Sequence[str], agents: Sequence[str], days: int, new: Collection[str]
) -> list[Certificate | KeyPair]:
    """Return the certificates that there are to be, each after the authority that signs it.

    `new`: the kinds whose existing files are replaced.
    """

    def authority(stem: str, name: str) -> Authority:
        return Authority(folder / stem, "authorities", AUTHORITY_DAYS, "authorities" in new, name)

    def leaf(stem: str, kind: str, hosts: Sequence[str], by: Authority, purpose: Purpose = "server") -> Leaf:
        return Leaf(folder / stem, kind, days, kind in new, tuple(hosts), purpose, by)

    main = authority("ca", "FedTTA SuperLink authority")
    files: list[Certificate | KeyPair] = [main, leaf("server", "server", (*LOCAL, *hosts), main)]
    if agents:
        own = authority("agents-ca", "FedTTA agents authority")
        names = dict.fromkeys(agents)
        files += [own, *(leaf(f"agent-{one.replace(':', '_')}", "agents", (*LOCAL, one), own) for one in names)]
        files.append(leaf("program", "agents", (), own, "client"))
    return files


def _hosts_before(certificate: Path) -> list[str]:
    """Return the hosts of the certificate that is replaced; KeysError if they cannot be read."""
    try:
        return hosts_of(read_certificate(certificate)) if certificate.exists() else []
    except KeysError as error:
        raise KeysError(f"{error}; name its hosts with --host") from error


def main(words: Sequence[str] | None = None) -> int:
    """Make keys and list them; return exit status 0, or 2 when something was refused."""
    parser = argparse.ArgumentParser(
        prog="fedtta keys", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=Path("keys"), help="folder of the files (default: keys)")
    parser.add_argument("--nodes", type=int, default=3, help="number of SuperNodes (default: 3)")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="name or address of the SuperLink; may be repeated (default: those of a certificate that is replaced)",
    )
    parser.add_argument(
        "--agent",
        action="append",
        default=[],
        metavar="NAME",
        help="device whose agent listens on TCP; may be repeated",
    )
    parser.add_argument("--days", type=int, default=DAYS, help=f"validity of new certificates (default: {DAYS})")
    parser.add_argument("--app", action="store_true", help="a key that signs apps, too")
    parser.add_argument("--replace", nargs="+", choices=KINDS, default=[], help="replace these")
    arguments = parser.parse_args(words)
    try:
        keys, lines = make_keys(
            arguments.folder,
            arguments.nodes,
            arguments.host,
            arguments.agent,
            arguments.days,
            arguments.replace,
            arguments.app,
        )
    except (KeysError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    print(f"Keys: {keys.folder}/ (the SuperLink needs ca.crt, server.crt, server.key; a SuperNode ca.crt and its key)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
