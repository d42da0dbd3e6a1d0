"""`dflash-local serve`: the HTTP server."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dflash_local.errors import DflashError, FileError, InputError
from dflash_local.fit.options import AUTO, NONE, LoadOptions
from dflash_local.server.http.settings import ServerSettings
from dflash_local.server.models.keep_alive import DEFAULT_S
from dflash_local.text_file import read_text

from . import interrupt
from . import options as shared
from .loading import check_files, chosen_files, tell_missing_drafter
from .models_file import NamedModel, check_names, named_model, read_models
from .options import READABLE, Option, SectionedCommand
from .settings import FROM_ELSEWHERE
from .terminal import Speaker
from .values import WholeText, api_key, host_name, idle_time, number, url_prefix, web_origin, whole

if TYPE_CHECKING:
    from dflash_local.llama.runtime import Device
    from dflash_local.server.models.recorder import Recorder
    from dflash_local.server.models.source import ModelSource

_BODY_WITH_IMAGES = 32 << 20
"""The most bytes of a request where a model reads images: some photos in base64."""

_LOADING_PER_MODEL = (
    *("n_ctx", "n_gpu_layers", "n_cpu_moe", "override_tensor", "kv_type"),
    *("cache_type_k", "cache_type_v"),
    *("draft_window", "draft_shape", "mmproj"),
)

SEVERAL = (
    Option(
        "--model named_models NAME=TARGET[,DRAFT]",
        "A model to serve by this name, with its drafter, in place of --target and --draft; "
        "may be repeated. Both are what --target and --draft take. It is loaded at the first "
        "request for it.",
        type=named_model,
        multiple=True,
    ),
    Option(
        "--models models_file",
        "A TOML file of such models: a table for each, with target, draft, and values of its "
        "own for --ctx, --parallel, --draft-width and others.",
        type=READABLE,
    ),
    Option(
        "--keep-alive keep_alive_s TIME",
        "Unload a model after this time without requests, such as 5m or 1h; 0 unloads it at "
        "once, -1 never. It is unloaded earlier where another model needs its memory.",
        type=idle_time,
        show_default="5m; the model of --target stays",
    ),
)

EMBEDDING = (
    Option(
        "--embedding-model embedding_models MODEL",
        "An embedding model or a reranker to serve beside the model of --target: a GGUF file, "
        "a folder, or a hub repository; may be repeated.",
        type=WholeText(),
        multiple=True,
    ),
    shared.POOLING,
)

LISTENING = (
    Option(
        "--host ADDRESS",
        "Address to listen on; a path that ends with .sock is a UNIX socket. An address that "
        "other machines can reach needs a key.",
        type=host_name,
        default="127.0.0.1",
    ),
    Option(
        "--port",
        "Port to listen on, llama-server's by default; 0 takes a free one.",
        type=whole(0, 65535),
        default=8080,
    ),
    Option(
        "--api-prefix /PREFIX",
        "What all paths begin with, for a proxy that serves more than this.",
        type=url_prefix,
    ),
    Option("--ssl-key-file", "A PEM file with the private key for HTTPS.", type=READABLE),
    Option("--ssl-cert-file", "A PEM file with the certificate for HTTPS.", type=READABLE),
)

ACCESS = (
    Option(
        "--api-key api_keys KEY",
        "A key that requests must have; may be repeated. Other users of this machine can see "
        "command lines: the environment variable or a file is safer.",
        type=api_key,
        multiple=True,
    ),
    Option("--api-key-file", "A file of keys, one per line.", type=READABLE),
    Option(
        "--cors-origin cors_origins ORIGIN",
        "A web origin whose pages may use this server, such as https://chat.example, besides "
        "this machine's own; may be repeated.",
        type=web_origin,
        multiple=True,
    ),
    Option(
        "--allowed-host allowed_hosts NAME",
        "A name by which this server may be called, besides localhost and --host; may be repeated.",
        type=host_name,
        multiple=True,
    ),
)

PARALLEL = Option(
    "-np --parallel n_seq",
    "Requests that a model answers at once, 4; they share its context. With --exact 1, or as "
    "many as are given here, each with an equal part of the context.",
    type=whole(1, 64),
)

STRICT = Option(
    "--strict",
    "Refuse requests with unknown fields, or for a model of another name; without it the log "
    "tells of each once.",
)

SHOWN = (
    Option("--slots/--no-slots", "Tell at /slots which slots are busy.", default=True),
    Option("--metrics/--no-metrics", "Give figures for Prometheus at /metrics.", default=True),
    Option("--page/--no-page", "Serve the page to chat.", default=True),
    Option(
        "--reasoning-format",
        "Where OpenAI's chats have thoughts: none leaves them in the content, with their "
        "marks; the others put them into reasoning_content.",
        type=click.Choice(["auto", "none", "deepseek"]),
        default="auto",
    ),
    Option(
        "--verbose", "Tell in the answers of chats the prompt that the chat template has written."
    ),
)

SHIFTING = (
    Option(
        "--context-shift/--no-context-shift",
        "Go on with an answer where the context is full: leave out the older half of the text "
        "and decode the rest again.",
        default=False,
    ),
    Option(
        "--keep n_keep N",
        "Tokens at the beginning of a text that are not left out then; -1 is the prompt.",
        type=whole(-1),
        default=0,
    ),
)

REMOTE = Option(
    "--allow-remote-images remote_images",
    "Fetch pictures from the web addresses in OpenAI's image parts; else only those are read "
    "that come with the request.",
)

SERVING = (
    PARALLEL,
    Option(
        "--queue max_queue",
        "Requests that may wait for their turn; further ones are answered 429.",
        type=whole(0, 100_000),
        default=64,
    ),
    Option(
        "--queue-timeout queue_timeout_s SECONDS",
        "Requests that wait longer are answered 503.",
        type=number(0, 86400, above=True),
        default=300.0,
    ),
    Option(
        "-a --alias NAME[,NAME...]",
        "The model's name in answers; its file's by default. Of several names, by each of "
        "which requests may call it, the first in the alphabet.",
        type=WholeText(),
    ),
    Option(
        "--tags TAG[,TAG...]",
        "What /v1/models tells of the model beside, for programs that choose by it.",
        type=WholeText(),
    ),
    shared.DRAFT_WIDTH,
    shared.THINKING,
    *shared.REASONING_BUDGET,
    *SHIFTING,
    REMOTE,
    Option(
        "--chat-template",
        "A common template for chats, for a model that has none or a wrong one.",
        type=click.Choice(["chatml", "llama3"]),
    ),
    Option(
        "--chat-template-file",
        "A file with a Jinja template for chats, in place of the model's own.",
        type=READABLE,
    ),
)

USUAL_SAMPLING = (
    *(each for each in shared.SAMPLING if each.name != "logit_bias"),
    shared.max_tokens(
        show_default="what fits the context",
        help="The most tokens of an answer, whatever a request asks for.",
    ),
)

RECORD = Option(
    "--record",
    "Add the prompt of each request to this file, for `dflash-local tune --data`. It stays on "
    "this machine, readable by this user alone.",
    type=click.Path(dir_okay=False, path_type=Path),
)

SETTINGS_PER_MODEL = (
    *(each for each in shared.LOADING if each.name in _LOADING_PER_MODEL),
    PARALLEL,
    shared.DRAFT_WIDTH,
    shared.POOLING,
    *USUAL_SAMPLING,
    *(each for each in SEVERAL if each.name == "keep_alive_s"),
)
"""The options that each model of --models may set for itself."""

SECTIONS = {
    "Model": shared.FILES,
    "Several models": SEVERAL,
    "Embeddings and reranking": EMBEDDING,
    "Address": LISTENING,
    "Access": ACCESS,
    "Requests": (*SERVING, STRICT),
    "Shown": SHOWN,
    "Sampling, where a request does not say": USUAL_SAMPLING,
    "Cache": shared.CACHE,
    "Recording": (RECORD,),
    "Machine": shared.LOADING,
}


USUAL_OPTIONS = (
    *("target", "draft", "named_models", "models_file", "host", "port", "api_keys", "cors_origins"),
    *("n_seq", "alias", "thinking", "n_ctx", "n_gpu_layers", "kv_type", "exact", "mmproj"),
)
"""Those that people set; -h shows no others."""

_OF_ONE_MODEL = ("target", "alias", "tags", "chat_template", "chat_template_file", "pooling")
_OF_ITS_FILES = (
    *("lora", "control_vectors", "override_kv", "mmproj"),
    *("chat_template", "chat_template_file", "pooling"),
)
"""Options that fit the models of the command line, and none that a client pulls."""


@click.command(cls=SectionedCommand, sections=SECTIONS, usual=USUAL_OPTIONS)
@click.pass_context
def serve(ctx: click.Context, /, **values: Any) -> int:
    """Answer editors and programs over HTTP.

    It speaks the APIs of OpenAI, llama-server, Anthropic and Ollama, and has a page to chat.
    Without options it serves smollm2-135m, to this machine alone. --model or --models serve
    several models, and requests name theirs. SIGTERM lets running answers finish; Ctrl-C ends at
    once.
    """
    _choose(ctx, values)
    _check_choice(values)
    say = Speaker(False)
    from dflash_local.model import Model
    from dflash_local.server import lifecycle
    from dflash_local.server.http.security import check_exposure
    from dflash_local.server.models.pool import ModelPool

    models = _models(values)
    settings = _settings(values, say)
    check_exposure(settings)
    # Before the model is loaded, which may take a minute: a bad address is reported at once.
    with lifecycle.bind(settings) as bound:
        recorder = _recorder(values["record"], say)
        sources = [_source(model, values, say, recorder) for model in models]
        at_once = [] if sources else _at_once(values, say, recorder)
        if any(map(_sees, at_once or sources)):
            settings = replace(settings, max_body=_BODY_WITH_IMAGES)
        keep_alive = values["keep_alive_s"]
        pool = ModelPool(
            at_once or sources,
            keep_alive_s=DEFAULT_S if sources and keep_alive is None else keep_alive,
            queue_timeout_s=values["queue_timeout_s"],
            further=lambda name, tell, devices: _source(
                NamedModel(name, name),
                {**values, **dict.fromkeys(_OF_ITS_FILES)},
                tell,
                recorder,
                devices,
            ),
        )
        for source in reversed(at_once):  # what is smaller comes first, and the rest is planned
            with interrupt.ending():
                model = source.load()
                pool.adopt(source.name, model)
            if isinstance(model, Model):
                tell_missing_drafter(source.draft, model, say)
        return lifecycle.serve(pool, settings, bound, say)


def _choose(ctx: click.Context, values: dict[str, Any]) -> None:
    """Let what was typed, one model or several, take the place of the other in the settings file
    and the environment. There alone, several models come first."""

    def leave_out(names: Sequence[str]) -> None:
        for name in names:
            if ctx.get_parameter_source(name) in FROM_ELSEWHERE:
                values[name] = () if isinstance(values[name], tuple) else None

    several = ("named_models", "models_file")
    if ctx.get_parameter_source("target") is ParameterSource.COMMANDLINE:
        leave_out(several)
    if any(values[name] for name in several):
        leave_out(("draft", "embedding_models", *_OF_ONE_MODEL))


def _check_choice(values: Mapping[str, Any]) -> None:
    """Refuse options of one model together with those of several. Raises click.UsageError."""
    check_files(values)
    if values["chat_template"] and values["chat_template_file"]:
        raise click.UsageError("--chat-template and --chat-template-file are both given")
    if not values["named_models"] and values["models_file"] is None:
        return
    for name in _OF_ONE_MODEL:
        if values[name] is not None:
            option = name.replace("_", "-")
            raise click.UsageError(
                f"--{option} is for a server of one model: leave it out, or leave out --model and "
                "--models."
            )
    if values["embedding_models"]:
        raise click.UsageError(
            "--embedding-model is for a server of one other model: name it with --model, too."
        )


def _at_once(
    values: Mapping[str, Any], say: Speaker, recorder: Recorder | None
) -> list[ModelSource]:
    """The model of --target, and those of --embedding-model, which have the --pooling then."""
    from dflash_local.gguf.file import GgufFile

    given = values["embedding_models"]
    # --ctx and --draft-width are the target's.
    theirs = {**values, "n_ctx": None, "draft_width": None}
    models = [NamedModel(_usual_name(each), each, NONE) for each in given]
    sources = [_source(model, theirs, say, recorder) for model in models]
    for source in sources:
        if source.use == "chat":
            GgufFile.open(source.target)  # what is wrong with a file that cannot be read
            raise InputError(
                f"--embedding-model {source.name} writes text: give an embedding model, or add "
                "--pooling last"
            )
    first = _single({**values, "pooling": None} if given else values, say, recorder)
    check_names([NamedModel(first.name, first.target), *models])
    return [first, *sources]


def _usual_name(given: str) -> str:
    """Of a file its name, else what was given."""
    path = Path(os.path.expanduser(given))
    return path.stem if path.is_file() else given


def _models(values: Mapping[str, Any]) -> list[NamedModel]:
    """The models of --model and --models; none where there is neither."""
    models = list(values["named_models"])
    if values["models_file"] is not None:
        models += read_models(Path(values["models_file"]), SETTINGS_PER_MODEL)
    check_names(models)
    return models


def _recorder(path: Path | None, say: Speaker) -> Recorder | None:
    """The store for the prompts of requests, if that was asked for; the user is told."""
    if path is None:
        return None
    from dflash_local.server.models.recorder import Recorder

    recorder = Recorder(path, say)
    say(f"recording: the prompt of every request is added to {path}, which only this user can read")
    return recorder


def _single(values: Mapping[str, Any], say: Speaker, recorder: Recorder | None) -> ModelSource:
    """The one model of --target, or else the usual one."""
    from dflash_local.pairs.address import NamedPair, read_address
    from dflash_local.pairs.registry import USUAL

    files = chosen_files(values, say, LoadOptions(**_load_arguments(values)))
    word = values["target"] or USUAL
    given = read_address(word)
    if isinstance(given, Path) and given != Path(os.path.expanduser(word)):
        usual = str(word)  # another program's name for it
    else:
        usual = str(given) if isinstance(given, NamedPair) else files.target.stem
    aliases, tags = _listed(values["alias"]), _listed(values["tags"])
    name = aliases[0] if aliases else usual
    source = _source(NamedModel(name, files.target, files.draft), values, say, recorder)
    return replace(source, aliases=aliases, tags=tags, is_found=files.is_found)


def _listed(given: str | None) -> tuple[str, ...]:
    """The names in a list with commas, sorted as llama-server has them."""
    names = {name.strip() for name in (given or "").split(",")}
    return tuple(sorted(names - {""}))


def _source(
    model: NamedModel,
    values: Mapping[str, Any],
    say: Callable[[str], None],
    recorder: Recorder | None,
    devices: Sequence[Device] | None = None,
) -> ModelSource:
    """The way to load it. What is missing of its files is fetched, if it fits `devices`."""
    from dflash_local.controller import calibration
    from dflash_local.fit.pairing import pooling_of
    from dflash_local.gguf.file import GgufFile
    from dflash_local.pairs.find import find_pair
    from dflash_local.server.models.source import ModelSource

    if model.draft is not None:
        calibration.budget_s()  # checked now: it is a request that may load the model
    values = {**values, **model.settings}
    files = find_pair(
        model.target,
        model.draft,
        say=say,
        options=LoadOptions(**_load_arguments(values)),
        devices=devices,
        bars=devices is None,
    )
    pooling = values["pooling"]
    if pooling is None:
        with suppress(FileError):  # requests will be told
            pooling = pooling_of(GgufFile.open(files.target))
    sampling = shared.values_of(USUAL_SAMPLING, values)
    longest = sampling.pop("max_tokens", None)
    return ModelSource(
        model.name,
        files.target,
        files.draft,
        {
            **_load_arguments(values),
            "thinking": values["thinking"],
            "sampling": sampling,
            "chat_template": _chat_template(values),
        },
        values["max_queue"],
        model.settings.get("keep_alive_s"),
        longest,
        recorder,
        usual=shared.values_of((*shared.REASONING_BUDGET, *SHIFTING, REMOTE), values),
        pooling=pooling,
        is_found=files.is_found,
    )


def _sees(source: ModelSource) -> bool:
    """Whether a model reads images, with a projector that was given or lies beside it."""
    from dflash_local.pairs.projector import find_projector

    given = source.options.get("mmproj")
    with suppress(DflashError):  # its load says what is wrong
        return given == AUTO or find_projector(source.target, given, lambda _: None) is not None
    return False


def _chat_template(values: Mapping[str, Any]) -> str | None:
    from dflash_local.llama.runtime import named_template

    if file := values["chat_template_file"]:
        return read_text(file)
    return named_template(name) if (name := values["chat_template"]) else None


def _load_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    n_seq = values["n_seq"] or (1 if values["exact"] else 4)
    section = (*shared.LOADING, *shared.CACHE, shared.DRAFT_WIDTH)
    return {**shared.values_of(section, values), "n_seq": n_seq}


def _settings(values: Mapping[str, Any], say: Speaker) -> ServerSettings:
    given = shared.values_of((*LISTENING, *ACCESS, *SHOWN, STRICT), values)
    keys = list(given.pop("api_keys"))
    path = given.pop("api_key_file", None)
    if path is not None:
        lines = read_text(path).lstrip("\ufeff").splitlines()
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise InputError(f"--api-key-file {path} holds no key: write one per line")
        keys += map(api_key, found)
        if os.name == "posix" and Path(path).stat().st_mode & 0o077:
            say(f"warning: other users may read {path}, which holds keys: chmod 600 it")
    return ServerSettings(api_keys=tuple(keys), **given)
