"""The Node that runs OpenAI's SDK. `run.sh` names it; `make test` goes without."""

import os

NODE = os.environ.get("DFLASH_LOCAL_NODE")

collect_ignore_glob = [] if NODE else ["test_*.py"]
