#!/bin/sh
# Tries the page at `/` in a real browser: tests/browser/run.sh [pytest's arguments].
# Needs an environment where `make test` works, first on the PATH. Installs Playwright there and,
# unless CHROMIUM names one or there is one, Debian's Chromium.
set -eu
cd "$(dirname "$0")/../.."

for name in chromium chromium-browser google-chrome; do
    CHROMIUM=${CHROMIUM:-$(command -v "$name" || true)}
done
if [ -z "$CHROMIUM" ]; then
    as_root=
    [ "$(id -u)" = 0 ] || as_root=sudo
    $as_root apt-get update
    $as_root apt-get install -y --no-install-recommends chromium fonts-dejavu-core
    CHROMIUM=$(command -v chromium)
fi
# The package alone: it drives the browser that there is, and downloads none.
python -c 'import playwright' 2>/dev/null || python -m pip install --quiet 'playwright>=1.50,<2'
DFLASH_LOCAL_BROWSER=$CHROMIUM exec python -m pytest tests/browser "$@"
