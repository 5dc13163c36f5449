"""Certificates and key pairs as files: existing ones are checked, missing ones are made."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedtta.settings import SettingsError
from fedtta.settings.files import write_atomically

Purpose = Literal["server", "client"]
COMMON_NAME_LENGTH = 64  # characters, at most (RFC 5280); hosts are in the alternative names, which TLS compares
SKEW = datetime.timedelta(minutes=10)  # clocks of devices may be behind by this much
_PURPOSES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
_REPLACE = "move it away, or replace it (--replace {})"


class KeysError(SettingsError):
    """A key or certificate cannot be made, or an existing one cannot be used; the message names it."""


@dataclass(frozen=True)
class Certificate(ABC):
    """A certificate and its private key, `<stem>.crt` and `<stem>.key`.

    Parameters
    ----------
    stem : Path
        Path without its ending.
    kind : str
        The word for `--replace` that errors name.
    days : int
        Validity of a new one.
    replace : bool
        Replace an existing one.
    """

    stem: Path
    kind: str
    days: int
    replace: bool

    def new(self) -> bool:
        """Return whether `make` makes a new one."""
        return self.replace or _absent(*files_of(self.stem))

    @abstractmethod
    def check(self) -> None:
        """Raise KeysError if an existing one cannot be used, or a new one cannot be signed."""

    def make(self) -> str:
        """Make or keep it; return a line of text on it."""
        new = self.new()
        if new:
            self._issue()
        certificate = read_certificate(files_of(self.stem)[0])
        hosts, end = hosts_of(certificate), f"valid until {certificate.not_valid_after_utc:%Y-%m-%d}"
        return f"{'made' if new else 'kept'} {self.stem.name}: {end}{', for ' + ', '.join(hosts) if hosts else ''}"

    @abstractmethod
    def _issue(self) -> None:
        """Write a new one."""


@dataclass(frozen=True)
class Authority(Certificate):
    """A certificate that signs others; its private key may be stored elsewhere while there is nothing to sign.

    Parameters
    ----------
    name : str
        Common name.
    """

    name: str

    def check(self) -> None:
        """Raise KeysError if an existing one cannot be used."""
        if not self.new():
            certificate, key = files_of(self.stem)
            _require(certificate, key)
            public = _valid(certificate, self.kind).public_key()
            if key.exists():
                _matching(key, public, self.kind)

    def _issue(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(self.name, self.name, key.public_key(), _after(self.days))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs=True), critical=True)
        _write_pair(self.stem, key, builder.sign(key, hashes.SHA256()))


@dataclass(frozen=True)
class Leaf(Certificate):
    """A certificate of a server or a client, signed by an authority.

    Parameters
    ----------
    hosts : tuple of str
        Names and addresses for which it is valid.
    purpose : "server" or "client"
        Extended key usage.
    authority : Authority
        Signs it; made before it.
    """

    hosts: tuple[str, ...]
    purpose: Purpose
    authority: Authority

    def check(self) -> None:
        """Raise KeysError if an existing one cannot be used, or a new one cannot be signed."""
        names = [general_name(host) for host in self.hosts]
        certificate, key = files_of(self.stem)
        if self.new():
            signer = files_of(self.authority.stem)[1]
            if not self.authority.new() and not signer.exists():
                raise KeysError(f"{signer} is missing: it must be here to sign {certificate}")
            return
        _require(certificate, key)
        _require(key, certificate)
        found = _valid(certificate, self.kind)
        _matching(key, found.public_key(), self.kind)
        signer = files_of(self.authority.stem)[0]
        try:
            found.verify_directly_issued_by(read_certificate(signer))
        except (KeysError, ValueError, InvalidSignature, TypeError) as error:
            raise KeysError(f"{certificate} is not signed by {signer}; {_REPLACE.format(self.kind)}") from error
        missing = [host for host, name in zip(self.hosts, names, strict=True) if name not in _names(found)]
        if missing:
            raise KeysError(
                f"{certificate} is not valid for {', '.join(missing)}, only for {', '.join(hosts_of(found))}; "
                f"{_REPLACE.format(self.kind)}"
            )

    def _issue(self) -> None:
        certificate, signer = (path.read_bytes() for path in files_of(self.authority.stem))
        issuer = x509.load_pem_x509_certificate(certificate)
        signing = serialization.load_pem_private_key(signer, None)
        assert isinstance(signing, ec.EllipticCurvePrivateKey)  # checked before
        key = ec.generate_private_key(ec.SECP256R1())
        common = issuer.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        end = min(_after(self.days), issuer.not_valid_after_utc)  # when nothing that it has signed is trusted any more
        builder = _builder(self.stem.name, str(common), key.public_key(), end)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([_PURPOSES[self.purpose]]), critical=False)
        identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
        builder = builder.add_extension(by, critical=False)
        if self.hosts:
            names = x509.SubjectAlternativeName([general_name(host) for host in dict.fromkeys(self.hosts)])
            builder = builder.add_extension(names, critical=False)
        _write_pair(self.stem, key, builder.sign(signing, hashes.SHA256()))


@dataclass(frozen=True)
class KeyPair:
    """A key pair in OpenSSH's format, `<path>` and `<path>.pub`; it does not expire.

    A SuperNode's private key belongs to its device: here the public one is enough.

    Parameters
    ----------
    path : Path
        Of the private key.
    kind : "nodes" or "app"
        A SuperNode's (ECDSA P-384), or the one that signs apps (Ed25519); the word for `--replace`.
    replace : bool
        Replace an existing one.
    """

    path: Path
    kind: Literal["nodes", "app"]
    replace: bool

    def new(self) -> bool:
        """Return whether `make` makes a new one."""
        return self.replace or _absent(self.path, self.public)

    @property
    def public(self) -> Path:
        """Return the path of the public key."""
        return self.path.with_name(self.path.name + ".pub")

    def check(self) -> None:
        """Raise KeysError if an existing one cannot be used."""
        if self.new():
            return
        _require(self.public, self.path)
        if self.kind == "nodes" and not self.path.exists():
            return
        _require(self.path, self.public)
        _private(self.path, self.kind)
        try:
            key = serialization.load_ssh_private_key(_read(self.path), None)
            public = serialization.load_ssh_public_key(_read(self.public))
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise KeysError(f"{self.path} or {self.public} is damaged: {error}") from error
        kind, name = (EllipticCurvePrivateKey, "ECDSA") if self.kind == "nodes" else (Ed25519PrivateKey, "Ed25519")
        if not isinstance(key, kind) or key.public_key() != public:
            raise KeysError(f"{self.path} and {self.public} are not one {name} pair; {_REPLACE.format(self.kind)}")

    def make(self) -> str:
        """Make or keep it; return a line of text on it."""
        new = self.new()
        if new:
            node = self.kind == "nodes"
            key = ec.generate_private_key(ec.SECP384R1()) if node else Ed25519PrivateKey.generate()
            openssh, none = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
            write(self.path, key.private_bytes(serialization.Encoding.PEM, openssh, none), private=True)
            form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            write(self.public, key.public_key().public_bytes(*form) + b"\n", private=False)
        until = "it is unregistered" if self.kind == "nodes" else "devices no longer trust it"
        return f"{'made' if new else 'kept'} {self.path.name}: valid until {until}"


def key_id(key: Ed25519PublicKey) -> str:
    """Return the name of a key, made from its bytes."""
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return f"fedtta_{hashlib.sha256(raw).hexdigest()[:16]}"


def trusted_entities(key: Ed25519PublicKey) -> str:
    """Return the file for `flower-supernode --trusted-entities`: YAML, key id → key."""
    return f'{key_id(key)}: "{public_text(key)}"\n'


def public_text(key: Ed25519PublicKey) -> str:
    """Return a key in OpenSSH's format, without a comment."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def app_key(path: Path) -> Ed25519PrivateKey:
    """Read `app.key` of `fedtta keys --app`.

    Raises
    ------
    KeysError
        It is missing, is damaged, has a password, or is of another kind.
    """
    try:
        key = serialization.load_ssh_private_key(_read(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeysError(f"{path}: {error}; allowed is app.key of `fedtta keys --app`") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeysError(f"{path}: allowed is an Ed25519 key, app.key of `fedtta keys --app`")
    return key


def files_of(stem: Path) -> tuple[Path, Path]:
    """Return the paths of certificate and private key; names may contain dots."""
    return stem.with_name(stem.name + ".crt"), stem.with_name(stem.name + ".key")


def general_name(host: str) -> x509.GeneralName:
    """Return a host as certificates spell it; raise KeysError unless it is a name or an address."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        label = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
        if len(host) > 253 or not re.fullmatch(rf"{label}(\.{label})*", host):
            raise KeysError(f"host {host!r}: allowed is a name such as fl.example.org, or an address") from None
        return x509.DNSName(host)


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate; KeysError names an invalid file."""
    try:
        return x509.load_pem_x509_certificate(_read(path))
    except ValueError as error:
        raise KeysError(f"{path} is not a certificate: {error}") from error


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses for which a certificate is valid."""
    return [str(name.value) for name in _names(certificate)]


def write(path: Path, content: bytes, private: bool) -> None:
    """Write a file atomically; a private one is never readable by others."""
    write_atomically(path, content, private=private)


def _builder(
    subject: str, issuer: str, key: ec.EllipticCurvePublicKey, end: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:COMMON_NAME_LENGTH])]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _after(days: int) -> datetime.datetime:
    return _now() + datetime.timedelta(days=days)


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _write_pair(stem: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path, private = files_of(stem)
    write(private, key.private_bytes(serialization.Encoding.PEM, *form), private=True)
    write(path, certificate.public_bytes(serialization.Encoding.PEM), private=False)


def _valid(path: Path, kind: str) -> x509.Certificate:
    """Read a certificate; raise KeysError if it has expired."""
    certificate = read_certificate(path)
    if certificate.not_valid_after_utc <= _now():
        raise KeysError(f"{path} has expired on {certificate.not_valid_after_utc:%Y-%m-%d}; {_REPLACE.format(kind)}")
    return certificate


def _matching(path: Path, public: object, kind: str) -> None:
    """Raise KeysError unless `path` is the private key of `public` and readable by its owner only."""
    content = _read(path)
    _private(path, kind)
    try:
        key = serialization.load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeysError(f"{path} is not a private key without a password: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != public:
        raise KeysError(f"{path} is not the key of the certificate beside it; {_REPLACE.format(kind)}")


def _private(path: Path, kind: str) -> None:
    """Raise KeysError if others can read a private file, and may have copied it."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    if mode & 0o077:
        raise KeysError(f"{path} has mode {mode:04o}: allowed is 0600; chmod it, or {_REPLACE.format(kind)}")


def _require(path: Path, other: Path) -> None:
    """Raise KeysError if one file of a pair is missing, as after an interruption."""
    if not path.exists():
        raise KeysError(f"{path} is missing; move {other} away, and both are made")


def _absent(*paths: Path) -> bool:
    return not any(path.exists() for path in paths)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}") from error


def _names(certificate: x509.Certificate) -> list[x509.GeneralName]:
    try:
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []
