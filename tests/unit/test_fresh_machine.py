"""`make test` on an incomplete machine reports all missing parts first, before it downloads or compiles."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = "tests/cluster/install.sh"
COMMANDS = (
    *("containerd", "ctr", "runc", "iptables", "iptables-save", "iptables-legacy-save", "ip", "conntrack"),
    *("unshare", "nsenter", "mount", "buildah", "debootstrap", "gcc", "tar", "chromium"),
)
FILES = (
    *(f"usr/lib/cni/{name}" for name in ("ptp", "host-local", "portmap", "loopback")),
    *("usr/lib/any-linux/libc.a", "sys/fs/cgroup/cpu"),
)
UNREACHABLE = "http://127.0.0.1:9"  # nothing listens on the discard port


class FreshMachine:
    """A checkout and a PATH of its own; every command on it records itself in `called` and does nothing."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.path, self.called = folder / "checkout", folder / "bin", folder / "called"
        for name in ("Makefile", SCRIPT, "tests/cluster/cluster.mk", "images/images.mk", "pyproject.toml", "uv.lock"):
            (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)
        self.path.mkdir()
        self.root = folder / "root"

    def have(self, *names: str, says: str = "") -> None:
        """Put commands on the PATH that run the line `says`."""
        for name in names:
            path = self.path / name
            path.unlink(missing_ok=True)
            path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.called}\n{says}\n')
            path.chmod(0o755)

    def have_everything(self) -> None:
        """Install everything that real nodes need, including the network but not yet the environment."""
        (self.path / "python3").symlink_to(sys.executable)
        for name in ("sh", "find", "ls"):
            (self.path / name).symlink_to(shutil.which(name) or name)
        self.have(*COMMANDS, "uv", "go")
        self.have("id", says="echo 0")
        for name in FILES:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).touch()

    def lack(self, names: Iterable[str]) -> None:
        """Remove commands."""
        for name in names:
            (self.path / name).unlink()

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `command` in the checkout with that PATH, and without network unless `variables` provide it."""
        environment = {"PATH": str(self.path), "HOME": str(self.checkout), "INSTALL_ROOT": str(self.root)}
        environment |= {"UV_OFFLINE": "1", "GOPROXY": "off"} | variables
        program = shutil.which(command[0]) or command[0]
        return subprocess.run(
            [program, *command[1:]], cwd=self.checkout, env=environment, capture_output=True, text=True
        )

    def install(self, level: str = "nodes", **variables: str) -> list[str]:
        """Return the missing parts that install.sh reports; empty if none."""
        done = self.run("sh", SCRIPT, level, **variables)
        lines = [line.removeprefix("  - ") for line in done.stderr.splitlines() if line.startswith("  - ")]
        assert bool(done.returncode) == bool(lines), done.stderr
        return lines

    def calls(self) -> list[str]:
        """Command lines that were run, oldest first."""
        return self.called.read_text().splitlines() if self.called.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> FreshMachine:
    """Return a machine without any command."""
    return FreshMachine(tmp_path)


def test_an_empty_machine_is_told_everything_at_once(machine: FreshMachine) -> None:
    """No command exists, not even those that shell scripts usually rely on."""
    before = os.times()
    python, root, tools = machine.install()
    after = os.times()
    assert python.startswith("Python 3.11 or later: there is no python3")
    assert root.startswith("root: ")
    assert all(name in tools.split() or f"{name}:" in tools.split() for name in (*COMMANDS, "ptp", "libc.a"))
    for package in ("containerd", "containernetworking-plugins", "buildah", "debootstrap", "iproute2"):
        assert package in tools.partition("Debian's:")[2]
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    assert spent < 1.0  # seconds of CPU, so that a busy machine is forgiven


def test_make_test_looks_before_it_does_anything(machine: FreshMachine) -> None:
    """buildah was missed after twenty minutes of compiling: `unshare: failed to execute buildah`."""
    machine.have_everything()
    machine.lack(["buildah"])
    machine.have("id", says="echo 1000")
    done = machine.run("make", "test")
    assert done.returncode != 0
    assert re.search(r"commands and files: buildah: .*buildah", done.stderr), done.stderr
    assert "root: " in done.stderr
    assert {line.split()[0] for line in machine.calls()} <= {"id", "go"}, machine.calls()  # `go env` is a look, too
    planned = machine.run("make", "-n", "test").stdout.splitlines()
    assert planned[0] == f"PYTHON=python3 sh {SCRIPT} nodes"


@pytest.mark.parametrize(
    ("version", "named"),
    [("3.9.2", "Python 3.11 or later: python3 is 3.9.2; "), ("", "Python 3.11 or later: python3 is does not run; ")],
)
def test_an_old_python_is_named_with_its_version(machine: FreshMachine, version: str, named: str) -> None:
    """It fails before a syntax error can occur."""
    machine.have_everything()
    machine.have("python3", says=f'case "$2" in *print*) echo {version} ;; *) exit 1 ;; esac' if version else "exit 1")
    (line,) = machine.install("python")
    assert line.startswith(named)


def test_a_python_that_can_get_no_uv_needs_pip(machine: FreshMachine) -> None:
    """Debian's python3 has neither pip nor venv."""
    machine.have_everything()
    machine.lack(["uv"])
    machine.have("python3", says='case "$2" in *pip*) exit 1 ;; esac')
    (line,) = machine.install("python")
    assert line == "commands and files: pip: install the packages of this system that hold them (Debian's: python3-pip)"


def test_a_network_that_is_not_there_is_named_with_what_was_to_be_fetched(machine: FreshMachine) -> None:
    """Both are named, and only while something is left to download."""
    machine.have_everything()
    online = {"UV_OFFLINE": "", "GOPROXY": f"{UNREACHABLE},direct", "PIP_INDEX_URL": f"{UNREACHABLE}/simple"}
    (line,) = machine.install(**online)
    assert line.startswith(f"a network: cannot reach {UNREACHABLE}/simple (")
    assert f", {UNREACHABLE} (" in line
    mirror = machine.checkout / ".config" / "uv" / "uv.toml"
    mirror.parent.mkdir(parents=True)
    mirror.touch()
    assert UNREACHABLE + "/simple" not in machine.install(**online)[0], "a configuration may name another place"
    mirror.unlink()
    (machine.checkout / ".venv").mkdir()
    (machine.checkout / ".venv" / ".synced").touch()
    assert UNREACHABLE + "/simple" not in machine.install(**online)[0]
    assert machine.install("python", **online) == []


def test_root_with_apt_gets_the_packages_and_nobody_else_does(machine: FreshMachine) -> None:
    """Uninstallable parts are reported before anything is installed."""
    machine.have_everything()
    machine.lack(["buildah", "conntrack"])
    machine.have("apt-get", says=f"for each in buildah conntrack; do cp {machine.path}/runc {machine.path}/$each; done")
    (machine.path / "cp").symlink_to(shutil.which("cp") or "cp")
    machine.have("id", says="echo 1000")
    _, tools = machine.install()
    assert tools.endswith("apt-get install --no-install-recommends conntrack buildah")
    machine.have("id", says="echo 0")
    assert len(machine.install(PYTHON="python3.99")) == 2
    assert not [line for line in machine.calls() if line.startswith("apt-get")]
    assert machine.install() == []
    assert "apt-get install -y -qq --no-install-recommends conntrack buildah" in machine.calls()


def test_root_without_its_powers_is_told_so(machine: FreshMachine) -> None:
    """Root of a container without permission for namespaces."""
    machine.have_everything()
    assert machine.install() == []
    machine.have("unshare", says="exit 1")
    (line,) = machine.install()
    assert line.startswith("leave to make namespaces (CAP_SYS_ADMIN)")
