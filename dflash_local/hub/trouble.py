"""Errors of the hub, each as one line with a remedy."""

from collections.abc import Iterator
from contextlib import contextmanager

from dflash_local.errors import InputError


def transfer_errors() -> tuple[type[Exception], ...]:
    """The client's errors when a transfer fails: those of its HTTP library, and OSError."""
    from huggingface_hub.errors import HfHubHTTPError

    # versions of the client have different HTTP libraries: this base class is the library's
    return (OSError, HfHubHTTPError.__bases__[0])


def why_unreachable(error: BaseException) -> str:
    """The reason why nothing came from the hub, in words that go on from its name."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "offline, as HF_HUB_OFFLINE asks (unset it to download)"
    return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)})"


OTHERWISE = (
    "give a GGUF file of your own, or set HF_ENDPOINT to a mirror; `dflash-local list --here` "
    "shows what is on this disk"
)


@contextmanager
def one_line(repo: str, revision: str | None) -> Iterator[None]:
    """Turn the client's errors into one line with a remedy."""
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    at = f"{constants.ENDPOINT}/{repo}"
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    try:
        yield
    except InputError:
        raise
    except errors.GatedRepoError:
        if hub.get_token() is None:
            message = f"gated: accept its terms at {at}, then {log_in}"
        else:
            message = f"gated, and the token in use has no access: accept its terms at {at}"
    except errors.RepositoryNotFoundError:
        message = f"no such repository at {at}, or a private one: check the id, or {log_in}"
    except errors.RevisionNotFoundError:
        message = f"has no revision {revision}: see {at}/commits"
    except errors.HFValidationError:
        message = "no hub id, expected one such as owner/name"
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            message = f"the hub refused the token in use ({status}): {log_in}"
        elif status == 429:
            message = f"the hub takes no more requests now (429): wait, or {log_in}"
        else:
            message = f"the hub answered {status}: try again later ({_first_line(error)})"
    except transfer_errors() as error:
        if constants.HF_HUB_OFFLINE:
            message = f"{why_unreachable(error)}, and not everything that is needed is cached"
        elif isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
            cache = constants.HF_HUB_CACHE
            message = f"{error.strerror} in the cache {cache}: make room, or set HF_HOME elsewhere"
        else:
            message = f"the transfer failed ({_first_line(error)}): run it again to resume it"
    else:
        return
    raise InputError(f"{repo}: {message}")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
