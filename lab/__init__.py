"""The maintainers' measuring: no part of the wheel. README.md beside this has the commands."""
