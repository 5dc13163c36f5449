"""Signed apps: devices run only the bundle of the app that a key of the operator has signed.

A SuperNode with `--trusted-entities` verifies an Ed25519 signature of the bundle before it starts any of its code.
Flower's own tools keep signatures in its Hub only. Here the operator signs a bundle in a file (`fedtta sign`), and
submitting it writes the same records that the Hub would give into the SuperLink's database (`fedtta submit --signed`).
The private key signs where the code is reviewed; neither the SuperLink nor a device needs it.

The file of a signature also has the public key, so that a bundle and a signature that do not belong together are
refused before they are submitted. Whether that key is to be trusted only the devices decide.

A signature covers the code of a run, not its settings. It does not expire: to revoke one, replace the key.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import sqlite3
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from fedtta.simulation.certificates import KeysError, app_key, key_id, public_text, write
from fedtta.simulation.control import FlowerError, client
from fedtta.simulation.superlink import PROJECT, Scalar, app_files

if TYPE_CHECKING:
    from flwr.server.superlink.linkstate import LinkState

SIGNATURE = ".sig"  # ending of the file beside a bundle


@dataclass(frozen=True)
class Signature:
    """A signature of a bundle, as Flower verifies it.

    Parameters
    ----------
    key_id : str
        Name of the key in the devices' files of trusted keys.
    signed_at : int
        Unix time.
    signature : str
        Of 8 bytes of time and the SHA-256 of the bundle; base64url without padding.
    """

    key_id: str
    signed_at: int
    signature: str

    def records(self) -> dict[str, str]:
        """Return what Flower keeps beside a bundle: key id → JSON."""
        return {self.key_id: json.dumps(asdict(self)), "valid_license": "Valid"}

    def verifies(self, bundle: bytes, key: Ed25519PublicKey) -> bool:
        """Return whether it is that of the bundle by the key."""
        try:
            key.verify(_decoded(self.signature), _message(bundle, self.signed_at))
        except (InvalidSignature, ValueError, OverflowError):  # the last: a time that is none
            return False
        return self.key_id == key_id(key)


def sign(bundle: bytes, key: Ed25519PrivateKey, now: int | None = None) -> Signature:
    """Sign a bundle."""
    at = int(time.time()) if now is None else now
    return Signature(key_id(key.public_key()), at, _encoded(key.sign(_message(bundle, at))))


def read(path: Path) -> tuple[bytes, Signature]:
    """Return a bundle and the signature beside it.

    Raises
    ------
    KeysError
        A file is missing, the signature's is damaged, or it is not that of the bundle. Whether its key is to be
        trusted is decided by the devices.
    """
    beside = path.with_name(path.name + SIGNATURE)
    try:
        content = json.loads(beside.read_text(encoding="utf-8"))
        bundle, key = path.read_bytes(), load_ssh_public_key(str(content["public_key"]).encode())
        signature = Signature(str(content["key_id"]), int(content["signed_at"]), str(content["signature"]))
    except KeyError as error:  # as those of before, without the key
        raise KeysError(f"{path}, {beside.name}: {error} is missing; `fedtta sign` makes both") from error
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeysError(f"{path}, {beside.name}: {error}; `fedtta sign` makes both") from error
    if not isinstance(key, Ed25519PublicKey) or not signature.verifies(bundle, key):
        raise KeysError(f"{path}: {beside.name} is not its signature: one has changed; `fedtta sign` makes both")
    return bundle, signature


def link_state(database: Path) -> LinkState:
    """Open the database of a SuperLink, which may be running.

    Raises
    ------
    KeysError
        There is none, or the file is the database of another program, in which Flower would make its tables.
    """
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager

    if not database.is_file():
        raise KeysError(f"{database}: no such file; allowed is the --database of the SuperLink, on its machine")
    with contextlib.closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True)) as file:
        tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and not {"run", "node", "fab"} <= tables:
        raise KeysError(f"{database} is another program's database; allowed is the --database of the SuperLink")
    return LinkStateFactory(str(database), NoOpFederationManager(), ObjectStoreFactory(str(database))).state()


def store(bundle: bytes, signature: Signature, state: LinkState) -> str:
    """Write a signed bundle into the SuperLink's database and return the app's id, such as "@fedtta/fedtta"."""
    from flwr.cli.config_utils import get_fab_config, get_metadata_from_config
    from flwr.common.constant import NOOP_FLWR_AID
    from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
    from flwr.supercore.fab import Fab

    app = f"@{get_metadata_from_config(get_fab_config(bundle))[0]}"
    fab = Fab(hashlib.sha256(bundle).hexdigest(), bundle, signature.records())
    state.store_app(fab, NOOP_FEDERATION_ID, app, TaskType.SERVER_APP, NOOP_FLWR_AID)
    return app


def start(superlink: str, ca: Path | None, database: Path, path: Path, config: Mapping[str, Scalar]) -> str:
    """Submit a run of a signed bundle, on the SuperLink's machine, and return the run's number.

    Parameters
    ----------
    superlink, ca
        As in `control.client`.
    database : Path
        The SuperLink's `--database`.
    path : Path
        The bundle; its signature is beside it.
    config : mapping
        As in `superlink.start`.

    Raises
    ------
    KeysError
        As `read`, the bundle is none, or the database is none of a SuperLink or cannot be written.
    FlowerError
        Flower refused the run.
    """
    from flwr.common.serde import user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab
    from sqlalchemy.exc import SQLAlchemyError

    bundle, signature = read(path)
    try:
        app = store(bundle, signature, link_state(database))
    except (SQLAlchemyError, sqlite3.Error) as error:  # such as another file, or that of another user
        why = str(error).splitlines()[0]
        raise KeysError(f"{database}: {why}; allowed is the --database of the SuperLink, as its user") from error
    except (zipfile.BadZipFile, KeyError, ValueError) as error:  # such as half a copy
        raise KeysError(f"{path} is not the bundle of an app: {error}; `fedtta sign` makes one") from error
    request = StartRunRequest(
        # without its bytes: Flower takes the stored bundle, with its records
        fab=Fab(hash_str=hashlib.sha256(bundle).hexdigest()), app_spec=app,
        override_config=user_config_to_proto(dict(config)),
    )  # fmt: skip
    with client(superlink, ca) as control:
        answer = control.StartRun(request)
    if not answer.HasField("run_id"):
        raise FlowerError(f"Flower refused a run of {path}")
    return str(answer.run_id)


def _message(bundle: bytes, at: int) -> bytes:
    return at.to_bytes(8, "big") + hashlib.sha256(bundle).digest()


def _encoded(signature: bytes) -> str:
    return base64.urlsafe_b64encode(signature).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def main(words: Sequence[str] | None = None) -> int:
    """Bundle the app, sign it, write both files; return exit status 0, 1 for a failed build, 2 for a bad key."""
    parser = argparse.ArgumentParser(prog="fedtta sign", description=__doc__, allow_abbrev=False)
    parser.add_argument("key", type=Path, help="app.key of `fedtta keys --app`")
    parser.add_argument("--out", type=Path, default=Path("app.fab"), help="the bundle (default: app.fab)")
    parser.add_argument("--app", type=Path, default=PROJECT, help="folder of the app (default: this project)")
    arguments = parser.parse_args(words)
    import click
    from flwr.cli.build import build_fab_from_disk

    try:
        key = app_key(arguments.key)
        with app_files(arguments.app) as app:
            bundle = build_fab_from_disk(app)
        signature = sign(bundle, key)
        write(arguments.out, bundle, private=False)
        content = {**asdict(signature), "public_key": public_text(key.public_key())}
        beside = arguments.out.with_name(arguments.out.name + SIGNATURE)
        write(beside, (json.dumps(content, indent=2) + "\n").encode(), private=False)
    except (KeysError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (click.ClickException, ValueError) as error:
        print(f"failed: {arguments.app} is no app: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: {hashlib.sha256(bundle).hexdigest()}, signed by {signature.key_id}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
