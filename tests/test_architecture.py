"""The claims of docs/architecture.md: imports go one way, and the map shows all packages."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
MAP = PAGE.split("```")[1]
FOLDERS = {
    "dflash_local": ROOT / "dflash_local",
    "dflash_local.cli": ROOT / "cli",
    "dflash_local.convert": ROOT / "convert",
    "dflash_local_tune": ROOT / "tune" / "dflash_local_tune",
}


def modules() -> dict[str, Path]:
    """Every module by its name, a package by its own."""
    return {
        ".".join([name, *path.relative_to(folder).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): path
        for name, folder in FOLDERS.items()
        for path in folder.rglob("*.py")
    }


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def imported(name: str, known: dict[str, Path]) -> set[str]:
    """The modules that one imports anywhere: at its top, in functions, for types."""
    package = name if known[name].stem == "__init__" else name.rpartition(".")[0]
    names: set[str] = set()
    for node in nodes(known[name]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = ".".join(filter(None, [package if node.level else "", node.module]))
            inner = {f"{source}.{alias.name}" for alias in node.names}
            names |= inner & known.keys() or {source}
    return (names & known.keys()) - {name}


def test_no_module_imports_itself_by_a_detour() -> None:
    known = modules()
    graph = {name: imported(name, known) for name in known}
    graph["dflash_local.llama.native"].discard("dflash_local")  # for the extension in it
    assert len(list(TopologicalSorter(graph).static_order())) == len(known) > 300


def test_no_module_imports_what_may_be_missing() -> None:
    """The lab is in no wheel, and that of tune/ is another one."""
    for name, path in modules().items():
        apart = {"lab", "dflash_local_tune"} - {name.split(".")[0]}
        for node in nodes(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not [each for each in names if each.split(".")[0] in apart], path


def test_no_module_imports_from_a_layer_above_its_own() -> None:
    """The layers are the boxes of the map, from the top down; modules of all layers are in none."""
    boxes = re.split(".*┌.*", MAP)
    level = {
        name: n for n, box in enumerate(boxes) for name in re.findall(r"(\w+)(?:/|\.py)\s", box)
    }
    known = modules()

    def layer(module: str) -> int | None:
        package, _, inner = module.partition(".")
        return level.get("tune" if package == "dflash_local_tune" else inner.partition(".")[0])

    upward = [
        f"{name} imports {other}"
        for name in known
        for other in imported(name, known)
        if (own := layer(name)) is not None and (its := layer(other)) is not None and its < own
    ]
    assert upward == []
    assert len(level) > 20


def test_the_map_has_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "dflash_local").glob("*/__init__.py")}
    drawn = MAP + PAGE.split("```")[2]
    assert {name for name in packages if f"{name}/" not in drawn} == set()


def test_every_file_that_the_map_names_is_there() -> None:
    names = set(re.findall(r"`([\w/]+\.(?:py|cpp|h|toml))`", PAGE))
    folders = [*FOLDERS.values(), ROOT / "native"]
    files = {path.as_posix() for folder in folders for path in folder.rglob("*.*")}
    missing = {name for name in names if not any(file.endswith(f"/{name}") for file in files)}
    assert {name for name in missing if not (ROOT / name).exists()} == set()
    assert len(names) > 50


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """A clause ("What is known of …") hides the thing itself."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    clauses = re.compile(r"(What|Which|Who|Where|When|Why|How)\b")
    for path in modules().values():
        for node in nodes(path):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            assert not text or not clauses.match(text), f"{path}: {text}"
