#!/bin/sh
# Tries the server and the package with programs and libraries written for others that are too heavy
# for every test run: tests/clients/run.sh [pytest's arguments].
# Needs an environment where `make test` works, first on the PATH. They are installed from PyPI into a
# folder of their own, build/clients, so that they change no version of that environment.
set -eu
cd "$(dirname "$0")/../.."
site=$PWD/build/clients/site
if [ ! "$site/.complete" -nt tests/clients/requirements.txt ]; then
    rm -rf "$site"
    # pip before 24 may search for versions that fit each other for longer than anybody waits.
    python -m pip install --quiet uv
    python -m uv pip install --quiet --python "$(command -v python)" --target "$site" -r tests/clients/requirements.txt
    touch "$site/.complete"
fi
PYTHONPATH="$site" exec python -m pytest tests/clients "$@"
