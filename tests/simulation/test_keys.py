"""Keys of a deployment: what is valid for whom, what is kept, what is refused."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve

from fedtta.simulation import certificates
from fedtta.simulation.certificates import KeysError, hosts_of, read_certificate, write
from fedtta.simulation.keys import AUTHORITY_DAYS, DAYS, LOCAL, Keys, main, make_keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys") / "of a fleet"
    return make_keys(folder, 2, ["fl.example.org", "10.0.0.7"], ["camera.local"])[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str:
    """Return "" when both sides are content, else what the client or the server says."""
    ours, theirs = socket.socketpair()
    told: list[str] = []

    def answer() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as link:
                link.sendall(b"hello")
        except (ssl.SSLError, OSError) as error:
            told.append(str(error))

    for end in (ours, theirs):
        end.settimeout(120)
    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=name) as link:
            assert link.recv(5) == b"hello"
    except (ssl.SSLError, OSError, AssertionError) as error:
        told.append(str(error))
    thread.join(120)
    assert not thread.is_alive()
    return "; ".join(told)


def served_by(folder: Path, name: str, clients_of: str = "") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    if clients_of:
        context.load_verify_locations(folder / f"{clients_of}.crt")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def trusting(folder: Path, authority: str, own: str = "") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(folder / f"{authority}.crt")
    if own:
        context.load_cert_chain(folder / f"{own}.crt", folder / f"{own}.key")
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "fl.example.org", "10.0.0.7"])
def test_nodes_accept_the_superlink_under_its_names(keys: Keys, host: str) -> None:
    assert handshake(served_by(keys.folder, "server"), trusting(keys.folder, "ca"), host) == ""


def test_nodes_refuse_another_name_another_authority_and_an_agent(keys: Keys, tmp_path: Path) -> None:
    server = served_by(keys.folder, "server")
    assert "not valid for 'other.example.org'" in handshake(server, trusting(keys.folder, "ca"), "other.example.org")
    foreign = make_keys(tmp_path, 1)[0]
    assert "verify failed" in handshake(server, trusting(foreign.folder, "ca"), "localhost")
    agent = served_by(keys.folder, "agent-camera.local")
    assert "verify failed" in handshake(agent, trusting(keys.folder, "ca"), "localhost")


def test_agents_on_tcp_accept_programs_with_a_certificate_only(keys: Keys) -> None:
    agent = served_by(keys.folder, "agent-camera.local", clients_of="agents-ca")
    assert handshake(agent, trusting(keys.folder, "agents-ca", own="program"), "camera.local") == ""
    assert handshake(agent, trusting(keys.folder, "agents-ca"), "camera.local") != ""
    # another agent is a server: it cannot pass for a program, nor can the SuperLink
    assert handshake(agent, trusting(keys.folder, "agents-ca", own="agent-camera.local"), "camera.local") != ""
    assert handshake(agent, trusting(keys.folder, "agents-ca", own="server"), "camera.local") != ""


def test_node_keys_are_what_flower_reads(keys: Keys) -> None:
    publics = []
    for number in range(2):
        path, public_path = keys.node(number)
        private = serialization.load_ssh_private_key(path.read_bytes(), None)
        public = serialization.load_ssh_public_key(public_path.read_bytes())
        assert isinstance(public, ec.EllipticCurvePublicKey)
        assert uses_nist_ec_curve(public)
        assert public.curve.name == "secp384r1"
        assert private.public_key() == public
        publics.append(public_path.read_bytes())
    assert publics[0] != publics[1]


def test_private_files_are_the_owners_only(keys: Keys) -> None:
    private = [path for path in keys.folder.iterdir() if path.suffix == ".key" or path.name in ("node-0", "node-1")]
    assert len(private) == 5 + 2
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}
    assert keys.folder.stat().st_mode & 0o777 == 0o700
    assert not list(keys.folder.glob("*.tmp"))


def test_validity_is_as_said(keys: Keys) -> None:
    now = datetime.datetime.now(datetime.UTC)
    for name, days in (("ca", AUTHORITY_DAYS), ("server", DAYS), ("program", DAYS)):
        certificate = read_certificate(keys.folder / f"{name}.crt")
        left = certificate.not_valid_after_utc - now
        assert datetime.timedelta(days=days - 1) < left <= datetime.timedelta(days=days)
        assert certificate.not_valid_before_utc < now


def test_what_is_there_is_kept_and_what_is_missing_made(tmp_path: Path) -> None:
    make_keys(tmp_path, 1, ["a.example.org"])
    before = contents(tmp_path)
    _, lines = make_keys(tmp_path, 2, ["a.example.org"])
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"node-1", "node-1.pub"}
    assert [line.split(":")[0] for line in lines] == ["kept ca", "kept server", "kept node-0", "made node-1"]


def test_only_what_is_asked_for_is_replaced(tmp_path: Path) -> None:
    make_keys(tmp_path, 1, agents=["cam"])
    before = contents(tmp_path)
    make_keys(tmp_path, 1, ["new.example.org"], replace=["server"])
    after = contents(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"server.crt", "server.key"}
    assert "new.example.org" in hosts_of(read_certificate(tmp_path / "server.crt"))
    with pytest.raises(KeysError, match=r"replace = 'authorities': .*; name them with --agent"):
        make_keys(tmp_path, 1, replace=["authorities"])
    make_keys(tmp_path, 1, agents=["cam"], replace=["authorities"])
    last = contents(tmp_path)
    assert {name for name in last if last[name] == before[name]} == {"node-0", "node-0.pub"}


@pytest.mark.parametrize("kind", ["server", "authorities"])
def test_a_certificate_that_replaces_another_has_its_hosts_unless_others_are_named(tmp_path: Path, kind: str) -> None:
    def hosts() -> list[str]:
        return hosts_of(read_certificate(tmp_path / "server.crt"))

    make_keys(tmp_path, 1, ["a.example.org", "10.0.0.7"])
    before = hosts()
    make_keys(tmp_path, 1, replace=[kind])
    assert hosts() == before
    make_keys(tmp_path, 1, ["b.example.org"], replace=[kind])
    assert hosts() == [*LOCAL, "b.example.org"]
    (tmp_path / "server.crt").write_text("half")
    with pytest.raises(KeysError, match=r"server\.crt is not a certificate: .*; name its hosts with --host"):
        make_keys(tmp_path, 1, replace=[kind])


def test_an_authority_may_be_kept_elsewhere_until_something_is_to_be_signed(tmp_path: Path) -> None:
    make_keys(tmp_path, 1)
    (tmp_path / "ca.key").unlink()
    make_keys(tmp_path, 2)
    with pytest.raises(KeysError, match=r"ca\.key is missing: it must be here to sign .*server\.crt"):
        make_keys(tmp_path, 2, replace=["server"])


def test_a_nodes_private_key_may_be_on_its_device(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, 2)[0]
    before = contents(tmp_path)
    keys.node(0)[0].unlink()
    _, lines = make_keys(tmp_path, 2, replace=["server"])
    assert [line.split(":")[0] for line in lines] == ["kept ca", "made server", "kept node-0", "kept node-1"]
    after = contents(tmp_path)
    assert {name for name in before if after.get(name) != before[name]} == {"server.crt", "server.key", "node-0"}
    assert "node-0" not in after


def test_refusals_name_file_and_cure_and_change_nothing(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, 1)[0]
    whole = contents(tmp_path)

    def refused(match: str, nodes: int = 2, **more: object) -> None:
        before = contents(tmp_path)
        with pytest.raises(KeysError, match=match):
            make_keys(tmp_path, nodes, **more)
        assert contents(tmp_path) == before
        for name, content in whole.items():
            write(tmp_path / name, content, private=not name.endswith((".crt", ".pub")))

    refused(
        r"server\.crt is not valid for b\.example\.org, only for localhost, .*--replace server", hosts=["b.example.org"]
    )
    refused(r"host 'a b': allowed is a name", hosts=["a b"])
    refused(r"host '-': allowed is a name", agents=["-"])
    refused("nodes = 0: allowed are 1 to", nodes=0)
    refused(f"days = 3651: allowed are 1 to {AUTHORITY_DAYS}", days=AUTHORITY_DAYS + 1)
    refused("replace = 'all': allowed are authorities, server, agents, nodes", replace=["all"])
    refused("replace = 'agents': agents get new certificates; name them with --agent", replace=["agents"])
    keys.server[1].unlink()
    refused(r"server\.key is missing; move .*server\.crt away, and both are made")
    keys.node(0)[1].unlink()
    refused(r"node-0\.pub is missing; move .*node-0 away")
    keys.ca.unlink()
    refused(r"ca\.crt is missing; move .*ca\.key away")
    (tmp_path / "ca.crt").write_bytes(whole["ca.crt"][:100])
    refused(r"ca\.crt is not a certificate")
    (tmp_path / "server.key").write_bytes(whole["ca.key"])
    refused(r"server\.key is not the key of the certificate beside it")
    keys.node(0)[0].write_bytes(whole["node-0"][:-60])
    refused(r"node-0 .*damaged")


def test_what_another_authority_has_signed_is_refused(tmp_path: Path) -> None:
    ours, theirs = (make_keys(tmp_path / name, 1)[0].folder for name in ("ours", "theirs"))
    for name in ("ca.crt", "ca.key"):
        write(ours / name, (theirs / name).read_bytes(), private=name == "ca.key")
    with pytest.raises(KeysError, match=r"server\.crt is not signed by .*ca\.crt; .*--replace server"):
        make_keys(ours, 1)


def test_a_private_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, 1)[0]
    keys.node(0)[0].chmod(0o640)
    with pytest.raises(KeysError, match=r"node-0 has mode 0640: allowed is 0600"):
        make_keys(tmp_path, 1)


def test_a_certificate_that_has_run_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_keys(tmp_path, 1, days=1)

    monkeypatch.setattr(certificates, "_now", lambda: datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=2))
    with pytest.raises(KeysError, match=r"server\.crt has expired on .*--replace server"):
        make_keys(tmp_path, 1)


def test_a_certificate_ends_no_later_than_its_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes would refuse it before its end, of which an alert warns."""
    make_keys(tmp_path, 1)
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=AUTHORITY_DAYS - 100)
    monkeypatch.setattr(certificates, "_now", lambda: later)
    make_keys(tmp_path, 1, replace=["server"])
    authority, server = (read_certificate(tmp_path / name) for name in ("ca.crt", "server.crt"))
    assert server.not_valid_after_utc == authority.not_valid_after_utc


def test_the_command_line_says_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--folder", str(tmp_path / "k"), "--nodes", "1", "--host", "fl.example.org"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "made server: valid until 20" in told
    assert "for localhost, 127.0.0.1, ::1, fl.example.org" in told
    assert main([*words, "--host", "other.org"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_an_authority_signs_nothing_that_signs(keys: Keys) -> None:
    constraints = read_certificate(keys.ca).extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)


def test_a_host_may_be_longer_than_a_common_name(tmp_path: Path) -> None:
    """Common names have at most 64 characters, names of hosts 253."""
    host = ".".join(["a" * 60, "b" * 60, "example.org"])
    keys, _ = make_keys(tmp_path, nodes=1, agents=[host])
    certificate = read_certificate(keys.folder / f"agent-{host}.crt")
    assert host in hosts_of(certificate)
    assert certificate.subject.rfc4514_string() == "CN=agent-" + "a" * 58
    make_keys(tmp_path, nodes=1, agents=[host])  # and it is kept
