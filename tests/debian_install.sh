#!/bin/sh
# Installs packages of Debian: tests/debian_install.sh PACKAGE... Asks for root's rights where it has
# none. Tries again where a mirror has a hiccup, or its lists are older than its packages.
set -eu

if ! command -v apt-get >/dev/null; then
    echo "this is no Debian: install what Debian calls $*, and try again" >&2
    exit 1
fi
as_root=
[ "$(id -u)" = 0 ] || as_root=sudo

apt() {
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y \
        -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@"
}

for pause in 5 20 60 0; do
    if apt update && apt install --no-install-recommends "$@"; then
        exit 0
    fi
    sleep "$pause"
done
exit 1
