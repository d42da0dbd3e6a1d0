#!/bin/sh
# Tries the server with OpenAI's Node SDK: tests/node/run.sh [pytest's arguments].
# Needs an environment where `make test` works, first on the PATH. Installs the SDK, npm of Debian
# where there is none, and where Node is older than the SDK wants, a Node of its own from npm.
set -eu
cd "$(dirname "$0")"

find_node() {
    for node in "$(command -v node || true)" node_modules/node-linux-*/bin/node; do
        if "$node" -e 'process.exit(parseInt(process.versions.node) < 22 ? 1 : 0)' 2>/dev/null; then
            realpath "$node"
            return
        fi
    done
}

if [ ! node_modules/.package-lock.json -nt package-lock.json ] || [ -z "$(find_node)" ]; then
    if ! command -v npm >/dev/null; then
        ../debian_install.sh ca-certificates nodejs npm
    fi
    rm -rf node_modules
    own=$([ -n "$(find_node)" ] && echo --omit=optional || true)
    npm ci --loglevel=error --fetch-retries=5 $own
fi
node=$(find_node)
if [ -z "$node" ]; then
    echo "OpenAI's SDK needs Node 22 or newer: install one, and try again" >&2
    exit 1
fi
cd ../..
DFLASH_LOCAL_NODE=$node exec python -m pytest tests/node "$@"
