#!/bin/sh
# Installs packages of Debian: tests/debian_install.sh PACKAGE... Asks for root's rights where it has
# none. Tries again where a mirror has a hiccup, or its lists are older than its packages.
set -eu

as_root=
[ "$(id -u)" = 0 ] || as_root=sudo
for command in apt-get $as_root; do
    if ! command -v "$command" >/dev/null; then
        echo "no $command here: install what Debian calls $*, and try again" >&2
        exit 1
    fi
done

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
