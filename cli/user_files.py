"""The places of the user's own files: settings, and what was typed in conversations."""

import os
from pathlib import Path

import platformdirs

CONFIG = "DFLASH_LOCAL_CONFIG"


def settings_file() -> Path:
    """The settings: the file of `DFLASH_LOCAL_CONFIG`, else that of the platform."""
    chosen = os.environ.get(CONFIG)
    if chosen:
        return Path(chosen)
    return platformdirs.user_config_path("dflash-local", appauthor=False) / "config.toml"


def history_file() -> Path:
    return platformdirs.user_state_path("dflash-local", appauthor=False) / "chat_history"


def tilde(path: Path) -> str:
    """The path as a user writes it, without the name of the home folder."""
    home = os.path.expanduser("~")
    text = str(path)
    return f"~{text[len(home) :]}" if text.startswith(home + os.sep) else text
