"""The names that `import dflash_local` offers."""

import pkgutil
import pydoc

import dflash_local
from dflash_local import errors


def test_the_package_lists_what_is_its_own_and_no_more() -> None:
    """`help(dflash_local)` shows these, also where the package is installed for development."""
    names = {module.name for module in pkgutil.iter_modules(dflash_local.__path__)}
    assert {"model", "loading"} <= names
    assert not names & {"bootstrap", "dflash_local", "tests"}


def test_what_it_lists_is_there_and_called() -> None:
    """`dir` and `help` leave out what is not called: errors and options."""
    listed, offered = dir(dflash_local), set(dflash_local.__all__)
    assert all(hasattr(dflash_local, name) for name in offered)
    assert dflash_local.PromptTooLongError is errors.PromptTooLongError
    assert {name for name in listed if not name.startswith("__")} <= offered
    assert {"load", "Model", "ChatResult"} & offered <= set(listed)
    assert "import_module" not in listed


def test_help_is_about_what_most_programs_use() -> None:
    told = pydoc.render_doc(dflash_local, renderer=pydoc.plaintext)
    assert "class Model(" in told and "load(target" in told
    assert "class InputError(" not in told and len(told.splitlines()) < 800
