#!/bin/sh
# Tries the page at `/` in a real browser: tests/browser/run.sh [pytest's arguments].
# Needs an environment where `make test` works, first on the PATH. Installs Playwright there and,
# unless CHROMIUM names one or there is one, Debian's Chromium.
set -eu
cd "$(dirname "$0")/../.."

find_chromium() {
    for name in chromium chromium-browser google-chrome; do
        command -v "$name" && return
    done
}

CHROMIUM=${CHROMIUM:-$(find_chromium || true)}
if [ -z "$CHROMIUM" ]; then
    # Playwright's own Node wants libatomic1, which compilers bring as well.
    tests/debian_install.sh chromium fonts-dejavu-core libatomic1
    CHROMIUM=$(find_chromium)
fi
# The package alone: it drives the browser that there is, and downloads none.
python -c 'import playwright' 2>/dev/null || python -m pip install --quiet 'playwright>=1.50,<2'
DFLASH_LOCAL_BROWSER=$CHROMIUM exec python -m pytest tests/browser "$@"
