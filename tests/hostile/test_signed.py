"""A device that trusts the operator's key runs the operator's bundle, and no other code that a SuperLink may send.

Flower's own code verifies here, with records that have been through a SuperLink's database and Fleet messages.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import sqlite3
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_from_proto, fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.fab_pb2 import Fab as FabMessage
from flwr.server.superlink.linkstate import LinkState
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.servicer.control.control_handlers import start_run
from flwr.supernode.cli.flower_supernode import _try_obtain_trusted_entities, _validate_public_keys_ed25519
from flwr.supernode.start_client_internal import _verify_fab

from fedtta.simulation import signing
from fedtta.simulation.certificates import KeysError, app_key
from fedtta.simulation.keys import Keys, make_keys
from fedtta.simulation.superlink import app_files


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"), 1, app=True)[0]


@pytest.fixture(scope="module")
def bundle() -> bytes:
    with app_files() as app:
        return build_fab_from_disk(app)


@pytest.fixture
def state(tmp_path: Path) -> LinkState:
    """A SuperLink's state on disk, with its database."""
    (tmp_path / "superlink.db").touch()
    return signing.link_state(tmp_path / "superlink.db")


def sent(state: LinkState, digest: str) -> Fab:
    """Return the bundle as a SuperNode gets it."""
    stored = state.get_fab(digest)
    assert stored is not None
    return fab_from_proto(FabMessage.FromString(fab_to_proto(stored).SerializeToString()))


def trusts(keys: Keys, fab: Fab) -> bool:
    """Return what a SuperNode with `--trusted-entities` decides."""
    entities = _try_obtain_trusted_entities(keys.trusted)
    assert entities
    _validate_public_keys_ed25519(entities)
    return bool(fab.verifications.get("valid_license")) and _verify_fab(fab, entities)


def digest(bundle: bytes) -> str:
    return hashlib.sha256(bundle).hexdigest()


def account() -> Any:
    return NoOpControlAuthnPlugin().validate_tokens_in_metadata([])[1]


def test_the_operators_bundle_runs(keys: Keys, bundle: bytes, state: LinkState, tmp_path: Path) -> None:
    """Signed into files, submitted from them, started by the SuperLink, verified by the SuperNode."""
    (tmp_path / "app.fab").write_bytes(bundle)
    assert signing.main([str(keys.app), "--out", str(tmp_path / "app.fab")]) == 0
    read, signature = signing.read(tmp_path / "app.fab")
    app = signing.store(read, signature, state)
    request = StartRunRequest(fab=FabMessage(hash_str=digest(read)), app_spec=app)
    answer = start_run(request, account(), state, "grpc-rere")
    (run,) = state.get_run_info(run_ids=[answer.run_id])
    assert run.fab_hash == digest(read)
    assert trusts(keys, sent(state, run.fab_hash))


def test_a_bundle_sent_from_a_folder_does_not(keys: Keys, bundle: bytes, state: LinkState) -> None:
    answer = start_run(StartRunRequest(fab=FabMessage(content=bundle)), account(), state, "grpc-rere")
    (run,) = state.get_run_info(run_ids=[answer.run_id])
    assert not trusts(keys, sent(state, run.fab_hash))


def changed(bundle: bytes) -> bytes:
    """Return the bundle with one more line of code."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(bundle)) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            more = b"import os\n" if name == "client_app.py" else b""
            target.writestr(name, source.read(name) + more)
    return out.getvalue()


def forged(keys: Keys, bundle: bytes, tmp_path: Path) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Yield what a SuperLink in wrong hands can send: name, bundle, records."""
    good = signing.sign(bundle, app_key(keys.app))
    other = app_key(make_keys(tmp_path / "other", 1, app=True)[0].app)
    yield "the records of the bundle with another one", changed(bundle), good.records()
    yield "a signature by another key", bundle, signing.sign(bundle, other).records()
    theirs = signing.sign(bundle, other).signature
    claimed = {"key_id": good.key_id, "signed_at": good.signed_at, "signature": theirs}
    yield (
        "another key's signature under the trusted name",
        bundle,
        {good.key_id: json.dumps(claimed), "valid_license": "Valid"},
    )
    later = json.loads(good.records()[good.key_id]) | {"signed_at": good.signed_at + 1}
    yield "another time", bundle, {good.key_id: json.dumps(later), "valid_license": "Valid"}
    yield "no signature", bundle, {"valid_license": "Valid"}
    yield "nothing", bundle, {}


def test_a_superlink_in_wrong_hands_gets_no_code_onto_a_device(
    keys: Keys, bundle: bytes, state: LinkState, tmp_path: Path
) -> None:
    for name, content, records in forged(keys, bundle, tmp_path):
        state.store_fab(Fab(digest(content), content, records))
        assert not trusts(keys, sent(state, digest(content))), name


def test_a_stored_bundle_is_found_by_its_own_hash_only(keys: Keys, bundle: bytes, state: LinkState) -> None:
    app = signing.store(bundle, signing.sign(bundle, app_key(keys.app)), state)
    with pytest.raises(FlowerError):
        start_run(StartRunRequest(fab=FabMessage(hash_str="0" * 64), app_spec=app), account(), state, "grpc-rere")


def test_our_verification_agrees_with_flowers(keys: Keys, bundle: bytes) -> None:
    key = app_key(keys.app)
    good = signing.sign(bundle, key, now=1)
    assert good.verifies(bundle, key.public_key())
    assert not good.verifies(bundle + b" ", key.public_key())
    fab = Fab(digest(bundle), bundle, good.records())
    assert _verify_fab(fab, yaml.safe_load(keys.trusted.read_text()))


def test_a_key_of_another_kind_and_damaged_files_are_refused(
    keys: Keys, bundle: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert signing.main([str(keys.node(0)[0]), "--out", str(tmp_path / "app.fab")]) == 2
    assert "Ed25519" in capsys.readouterr().err
    assert not (tmp_path / "app.fab").exists()
    (tmp_path / "app.fab").write_bytes(bundle)
    for content in (None, "", "[]", '{"key_id": "a"}', '{"key_id": "a", "signed_at": "b", "signature": "c"}'):
        if content is not None:
            (tmp_path / "app.fab.sig").write_text(content)
        with pytest.raises(KeysError, match=r"app\.fab"):
            signing.read(tmp_path / "app.fab")


def test_a_key_of_a_kind_that_is_not_known_is_refused(
    keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "app.key"
    lines = keys.app.read_bytes().splitlines()
    content = base64.b64decode(b"".join(lines[1:-1])).replace(b"ssh-ed25519", b"ssh-ed44819")
    other.write_bytes(b"\n".join([lines[0], base64.b64encode(content), lines[-1], b""]))
    assert signing.main([str(other), "--out", str(tmp_path / "app.fab")]) == 2
    assert "app.key: Unsupported key type" in capsys.readouterr().err


def signed(path: Path, bundle: bytes, key: Path) -> dict[str, Any]:
    """Write a bundle and its signature as `fedtta sign` does, and return what the signature's file has."""
    assert signing.main([str(key), "--out", str(path)]) == 0
    path.write_bytes(bundle)
    beside = path.with_name(path.name + signing.SIGNATURE)
    made: dict[str, Any] = json.loads(beside.read_text())
    made |= asdict(signing.sign(bundle, app_key(key)))
    beside.write_text(json.dumps(made))
    return made


def test_what_is_no_bundle_is_not_submitted(keys: Keys, bundle: bytes, tmp_path: Path) -> None:
    path, database = tmp_path / "app.fab", tmp_path / "superlink.db"
    database.touch()
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a.txt", "a")
    for content in (bundle[: len(bundle) // 2], b"", other.getvalue()):
        signed(path, content, keys.app)
        with pytest.raises(KeysError, match=r"app\.fab is not the bundle of an app: .*`fedtta sign` makes one"):
            signing.start("127.0.0.1:1", None, database, path, {})


def test_a_file_that_is_no_database_is_named(keys: Keys, bundle: bytes, tmp_path: Path) -> None:
    path, database = tmp_path / "app.fab", tmp_path / "results.db"
    signed(path, bundle, keys.app)
    database.write_bytes(b"no database" * 1000)
    with pytest.raises(KeysError, match=r"results\.db: .*file is not a database; allowed is the --database"):
        signing.start("127.0.0.1:1", None, database, path, {})
    assert database.read_bytes() == b"no database" * 1000


def test_another_programs_database_gets_no_tables(keys: Keys, bundle: bytes, tmp_path: Path) -> None:
    path, database = tmp_path / "app.fab", tmp_path / "mlflow.db"
    signed(path, bundle, keys.app)
    with contextlib.closing(sqlite3.connect(database)) as file:
        file.execute("CREATE TABLE runs (id INTEGER)")
    before = database.read_bytes()
    with pytest.raises(KeysError, match=r"mlflow\.db is another program's database; allowed is the --database"):
        signing.start("127.0.0.1:1", None, database, path, {})
    assert database.read_bytes() == before


def test_a_bundle_is_not_submitted_with_a_signature_that_is_not_its_own(
    keys: Keys, bundle: bytes, tmp_path: Path
) -> None:
    """No device that trusts the key would run it, but a SuperLink, and a device that trusts none, would."""
    path, beside, database = tmp_path / "app.fab", tmp_path / "app.fab.sig", tmp_path / "superlink.db"
    database.touch()
    other = make_keys(tmp_path / "other", 1, app=True)[0].app
    theirs, good = signed(path, bundle, other), signed(path, bundle, keys.app)
    wrong = [
        (changed(bundle), good), (bundle, {**good, "signature": theirs["signature"]}),
        (bundle, {**good, "public_key": theirs["public_key"]}), (bundle, {**theirs, "key_id": good["key_id"]}),
        (bundle, {**good, "signed_at": good["signed_at"] + 1}), (bundle, {**good, "signed_at": -1}),
    ]  # fmt: skip
    for content, signature in wrong:
        path.write_bytes(content)
        beside.write_text(json.dumps(signature))
        with pytest.raises(KeysError, match=r"app\.fab\.sig is not its signature: .*`fedtta sign` makes both"):
            signing.start("127.0.0.1:1", None, database, path, {})
    assert signing.link_state(database).get_fab(digest(bundle)) is None
    beside.write_text(json.dumps({key: value for key, value in good.items() if key != "public_key"}))
    with pytest.raises(KeysError, match="'public_key' is missing; `fedtta sign` makes both"):
        signing.read(path)


def test_a_folder_without_an_app_is_not_signed(keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\n')
    words = [str(keys.app), "--app", str(tmp_path), "--out", str(tmp_path / "app.fab")]
    assert signing.main(words) == 1
    assert "is no app" in capsys.readouterr().err
    assert not (tmp_path / "app.fab").exists()


def test_the_key_is_kept_and_private(keys: Keys) -> None:
    before = keys.app.read_bytes()
    _, lines = make_keys(keys.folder, 1, app=True)
    assert keys.app.read_bytes() == before
    assert "kept app.key: valid until devices no longer trust it" in lines
    assert keys.app.stat().st_mode & 0o777 == 0o600
