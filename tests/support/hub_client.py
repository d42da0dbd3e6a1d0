"""Users of the hub: processes that fetch by its real client, as each user's settings say."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert_command import online, settings
from dflash_local.convert.files.source import Source
from hub_stand_in import Hub
from ready_command import ReadyRun

# The client reads its settings when it is imported, so each fetch is a process of its own.
SCRIPT = """
import json, sys
from dflash_local.convert.files.source import fetch_drafter
from dflash_local.errors import InputError
repository, options = json.load(sys.stdin)
try:
    found = fetch_drafter(repository, **options)
    answer = {
        "folder": str(found.folder), "name": found.name, "revision": found.revision,
        "card": found.card,
    }
except InputError as error:
    answer = {"error": str(error)}
except KeyboardInterrupt:
    answer = {"interrupted": True}
print(json.dumps(answer))
"""


@dataclass
class Client:
    """A user of the hub, with a cache and an environment of their own."""

    hub: Hub
    home: Path
    environment: dict[str, str] = field(default_factory=dict)
    stderr: str = ""

    def settings(self) -> dict[str, str]:
        return settings(online(self.hub, self.home) | self.environment)

    def start(self, repository: str, **options: Any) -> ReadyRun:
        asked = json.dumps([repository, options]).encode()
        settings = self.settings()
        return ReadyRun("-c", SCRIPT, stdin=asked, environment=settings, folder=self.home)

    def finish(self, run: ReadyRun) -> dict[str, Any]:
        done = run.finish()
        self.stderr = done.stderr.decode()
        assert done.returncode == 0, self.stderr
        answer = json.loads(done.stdout)
        assert isinstance(answer, dict)
        return answer

    def fetch(self, repository: str, **options: Any) -> Source:
        answer = self.finish(self.start(repository, **options))
        assert "error" not in answer, answer
        return Source(Path(answer["folder"]), answer["name"], answer["revision"], answer["card"])

    def refusal(self, repository: str, **options: Any) -> str:
        """The one line that says why nothing was fetched."""
        answer = self.finish(self.start(repository, **options))
        assert "error" in answer, answer
        message = answer["error"]
        assert isinstance(message, str) and "\n" not in message
        return message
