"""Run a program as a systemd unit would: `confined.py '{"uid": 1, "gid": 1, "groups": [2], "calls": []}' program ...`.

User, groups, no new privileges, and a filter of system calls, by libseccomp as in systemd itself.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
PR_SET_NO_NEW_PRIVS = 38


def filtered(calls: list[str]) -> None:
    """Let this process make no other system calls; those are refused with EPERM."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ERRNO | errno.EPERM))
    for name in calls:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # otherwise of another architecture
            assert library.seccomp_rule_add(rules, ALLOW, number, 0) == 0, name
    assert library.seccomp_load(rules) == 0


def main() -> None:
    unit, program = json.loads(sys.argv[1]), sys.argv[2:]
    os.setgroups(unit["groups"])
    os.setresgid(*[unit["gid"]] * 3)
    os.setresuid(*[unit["uid"]] * 3)
    assert ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    os.umask(0o077)
    filtered(unit["calls"])
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
