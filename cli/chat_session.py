"""A conversation in the terminal: its messages, the commands between them, and its loop.

It is imported only with a conversation: prompt_toolkit takes longer than all the rest.
"""

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import click

from dflash_local import Model, Result
from dflash_local.chat.pictures import NO_PROJECTOR
from dflash_local.errors import ContextFullError, DflashError, InputError
from dflash_local.pair import open_pair
from dflash_local.target_model.pixels import data_uri, image_file
from dflash_local.text_file import read_text

from . import options as shared
from .answer import write_answer
from .line_editor import LineEditor
from .loading import chosen_files, load_model
from .options import WORDS, Option, generation_arguments, in_options
from .report import stats_page, summary
from .request import answer_limit
from .terminal import Speaker
from .user_files import history_file, tilde

COMMANDS = {
    "/help": "show this",
    "/clear": "forget the conversation so far, as /reset does",
    "/retry": "answer the last message again",
    "/continue": "go on with an answer that was cut or stopped",
    "/edit": "change the last message, and send it again",
    "/undo": "take back the last message and its answer",
    "/set": "show the options of answers; change one: /set temp 0.7",
    "/system": "show the system message; with a text, begin a new conversation under it",
    "/image": "show a picture with the next message: /image FILE",
    "/save": "write the conversation to a file: /save FILE",
    "/load": "go on with the conversation of a file: /load FILE",
    "/model": "show the model; go on with another one: /model TARGET [DRAFT]",
    "/stats": "show statistics of the last answer, the load plan and how exact verification is",
    "/exit": "leave, as Ctrl-D does",
}

_OTHER_NAMES = {"/reset": "/clear", "/?": "/help", "/quit": "/exit", "/bye": "/exit"}

KEYS = (
    "A message that begins with a slash begins with two: //etc is the message /etc.",
    'Enter sends; Alt-Enter, a backslash before Enter, or Enter after """ begins a new line.',
    "Up and down walk through earlier messages.",
    "Esc or Ctrl-C stops an answer; Ctrl-C clears what is typed.",
)

Message = dict[str, Any]

_WORD = re.compile(r"""'(?:[^']|'\\'')*'|"[^"]*"|(?:\\.|[^\s\\])+""")
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")

_OPTIONS = (
    shared.max_tokens(),
    *shared.SAMPLING,
    *shared.ENDING,
    shared.THINKING,
    *shared.REASONING_BUDGET,
)
_SWITCH = {"on": True, "true": True, "off": False, "false": False}
_USUAL = "default"


class ChatSession:
    """A conversation with `model`, which it closes. `opening` are its first messages, `template`
    has the variables of the chat template, `values` those of the command.

    An answer that was stopped stays, as far as it came. A message that cannot be answered, such as
    one that is longer than the context, is taken back.
    """

    def __init__(
        self,
        model: Model,
        opening: Sequence[Message],
        template: Mapping[str, Any] | None,
        values: Mapping[str, Any],
        say: Speaker,
    ) -> None:
        self._model = model
        self._given_thinking = values["thinking"]
        self._usual_thinking = model.thinking
        self._template = template
        self._values = dict(values)
        self._written: tuple[str, list[int]] = ("", [])  # of the last answer, with what it went on
        self._typed = ""  # what the line editor begins with
        self._pictures: list[Message] = []  # those that the next message shows
        self._say = say
        self._opening = list(opening)
        self.messages = list(opening)
        self.last: Result | None = None

    def run(self) -> None:
        """Read and answer messages until `/exit` or Ctrl-D."""
        try:
            editor = LineEditor(COMMANDS)
            self._say("type a message; /help lists commands and keys")
            while True:
                try:
                    typed, self._typed = self._typed, ""
                    message = editor.read(typed)
                    if _OTHER_NAMES.get(message.strip(), message.strip()) == "/exit":
                        return
                    self.take(message)
                except KeyboardInterrupt:
                    continue
                except EOFError:
                    return
        finally:
            self._model.close()

    def take(self, message: str) -> None:
        """Answer one message, or carry out a command."""
        if not message.strip():
            return
        found = re.fullmatch(r"(/(?:[a-zA-Z][\w-]*|\?))(?:\s+(.*))?", message.strip(), re.DOTALL)
        if not found:
            text = message.replace("//", "/", 1) if message.lstrip().startswith("//") else message
            self._send(text)
            return
        name, rest = found[1].lower(), (found[2] or "").strip()
        action = getattr(self, f"do_{_OTHER_NAMES.get(name, name)[1:]}", None)
        try:
            if action is None:
                raise InputError(_no_command(name, rest))
            action(rest)
        except DflashError as error:
            self._say.write(f"error: {in_options(str(error))}")
        except OSError as error:
            self._say.write(f"error: {error.filename}: {error.strerror}")

    def _send(self, text: str) -> None:
        """Answer a message, with the pictures whose paths were pasted into it."""
        if self._model.projector is not None:
            (rest, paths), before = without_paths(text), list(self._pictures)
            try:
                for path in paths:
                    self.do_image(str(path))
            except InputError as error:
                self._say.write(f"error: {in_options(str(error))}")
                self._typed, self._pictures = text, before
                return
            if paths and not rest:
                return
            text = rest if paths else text
        shown = [*self._pictures, {"type": "text", "text": text}] if self._pictures else text
        if self._answer([*self.messages, {"role": "user", "content": shown}]):
            self._pictures = []

    def _answer(self, asked: list[Message], begun: tuple[str, list[int]] = ("", [])) -> bool:
        """Answer, or go on with a `begun` answer, its text and tokens; False if that cannot be."""
        model = self._model
        try:
            arguments = generation_arguments(self._values)
            arguments["max_tokens"] = answer_limit(model, arguments)
            ask = partial(
                model.stream_chat,
                asked,
                begun=begun if begun[1] else None,
                chat_template_kwargs=self._template,
                **arguments,
            )
            result = write_answer(ask, self._say, is_chat=True, ends_line=True)
        except InputError as error:
            hint = "; /clear starts a new conversation" * isinstance(error, ContextFullError)
            self._say.write(f"error: {in_options(str(error))}{hint}")
            return False
        self.messages = [*asked, result.message]
        self.last = result
        self._written = (begun[0] + result.text, [*begun[1], *result.tokens])
        told = summary(result, arguments["max_tokens"])
        can_go_on = result.finish_reason in ("length", "cancelled") and result.tokens
        self._say(f"{told}; /continue goes on" if can_go_on else told)
        if self._values["compare"] and result.finish_reason != "cancelled":
            from .compare import compare

            compare(model, ask, result, arguments.get("draft_width"), self._say)
        return True

    def do_help(self, _: str) -> None:
        width = max(map(len, COMMANDS)) + 2
        lines = [f"{name:{width}s}{text}" for name, text in COMMANDS.items()]
        self._show(
            [
                *lines,
                *KEYS,
                " ".join(WORDS.split()),
                f"Messages are kept in {tilde(history_file())}",
            ]
        )

    def do_clear(self, _: str) -> None:
        self.messages = list(self._opening)
        self.last = None
        self._say("the conversation is forgotten")

    def _asked(self) -> list[Message]:
        """The messages up to the last one of the user. Raises InputError."""
        asked = list(self.messages)
        while asked and asked[-1]["role"] != "user":
            asked.pop()
        if not asked:
            raise InputError("no message was sent yet: type one")
        return asked

    def do_retry(self, _: str) -> None:
        self._answer(self._asked())

    def do_continue(self, _: str) -> None:
        asked = self._asked()
        if self.last is None or not self._written[1]:
            raise InputError("there is no answer of this session to go on with; /retry writes one")
        if self.last.finish_reason not in ("length", "cancelled"):
            raise InputError("the answer is complete; /retry writes another one")
        self._answer(asked, self._written)

    def do_edit(self, _: str) -> None:
        self._typed = self._take_back()

    def do_undo(self, _: str) -> None:
        text = self._take_back().strip().partition("\n")[0]
        self._say(f"taken back: {text if len(text) <= 60 else text[:59] + '…'}")

    def _take_back(self) -> str:
        """Take back the last message and its answer; its text. Its pictures are shown again."""
        *self.messages, message = self._asked()
        self.last = None
        content = message["content"]
        if isinstance(content, str):
            return content
        self._pictures = [part for part in content if part["type"] != "text"]
        return "\n".join(part["text"] for part in content if part["type"] == "text")

    def do_image(self, name: str) -> None:
        path = _path(name, "/image")
        if self._model.projector is None:
            raise InputError(NO_PROJECTOR)
        data = image_file(path)
        self._model.projector.read(data)  # refuses it now, if it is none
        self._pictures.append({"type": "image_url", "image_url": {"url": data_uri(data)}})
        self._say(f"{path} goes with the next message; images: {len(self._pictures)}")

    def do_set(self, text: str) -> None:
        if not text:
            limit = answer_limit(self._model, {})
            self._show(option_lines(self._values, self._model, limit))
            return
        self._say(set_option(self._values, text))
        self._set_thinking()

    def _set_thinking(self) -> None:
        chosen = self._values["thinking"]
        self._model.thinking = self._usual_thinking if chosen is None else chosen

    def do_system(self, text: str) -> None:
        if text:
            self._opening = [{"role": "system", "content": text}]
            self.messages, self.last = list(self._opening), None
            self._say("a new conversation begins, under this system message")
            return
        told = [str(m["content"]) for m in self._opening if m["role"] == "system"]
        self._show(told or ["no system message; /system TEXT sets one"])

    def do_save(self, name: str) -> None:
        path = _path(name, "/save")
        path.write_text(json.dumps({"messages": self.messages}, indent=1) + "\n", encoding="utf-8")
        self._say(f"saved in {path}, messages: {len(self.messages)}")

    def do_load(self, name: str) -> None:
        path = _path(name, "/load")
        self.messages = _read_messages(path)
        self._opening = [m for m in self.messages[:1] if m["role"] == "system"]
        self._say(f"read from {path}, messages: {len(self.messages)}")

    def do_model(self, names: str) -> None:
        if names:
            target, _, draft = names.partition(" ")
            values = {**self._values, "target": target, "draft": draft.strip() or None}
            files = chosen_files(values, self._say)
            open_pair(files.target, files.draft)  # refuses files that do not fit
            # Both models may not fit the memory at once. If the new one cannot be loaded, the old
            # one is loaded again.
            self._model.close()
            try:
                self._model = self._loaded(values)
            except (DflashError, OSError) as error:
                self._say.write(f"error: {in_options(str(error))}")
                self._model = self._loaded(self._values)
            else:
                self._values = values
            self._usual_thinking = self._model.thinking
            self._set_thinking()
        model = self._model
        target = model.plan.target_name if model.plan else model.target.path.name
        drafter = model.plan.drafter_name if model.plan else None
        self._show(
            [f"target   {target}, {model.n_ctx} tokens of context", f"drafter  {drafter or 'none'}"]
        )

    def _loaded(self, values: Mapping[str, Any]) -> Model:
        return load_model({**values, "thinking": self._given_thinking}, self._say)

    def do_stats(self, _: str) -> None:
        self._show(stats_page(self._model, self.last))

    def _show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._say.write(line)


def without_paths(message: str) -> tuple[str, list[Path]]:
    """A message without the absolute paths of pictures in it, and these: as terminals write files
    that are dropped on them, in quotes, with backslashes, or as file: addresses."""
    paths: list[Path] = []

    def taken(found: re.Match[str]) -> str:
        word = found[0]
        if word[0] == word[-1] and word[0] in "\"'" and len(word) > 1:
            word = word[1:-1].replace(r"'\''", "'")
        elif os.name != "nt":
            word = re.sub(r"\\(.)", r"\1", word)
        if word.startswith("file://"):
            word = url2pathname(urlsplit(word).path)
        path = Path(os.path.expanduser(word)) if word.startswith("~/") else Path(word)
        is_picture = path.is_absolute() and path.suffix.lower() in _PICTURES
        if not is_picture or not os.path.isfile(path):
            return found[0]
        paths.append(path)
        return ""

    return _WORD.sub(taken, message).strip(), paths


def _no_command(name: str, rest: str) -> str:
    if name[1:].replace("_", "-") in option_names():
        return f"no command {name}; /set {name[1:]} {rest or 'VALUE'} sets that option"
    return f"no command {name}; /help lists them, and // sends a message that begins with a slash"


def _path(name: str, command: str) -> Path:
    if not name:
        raise InputError(f"{command} needs the name of a file: {command} FILE")
    return Path(os.path.expanduser(name))


def _read_messages(path: Path) -> list[Message]:
    """The messages of a file that `/save` wrote. Raises InputError, OSError."""
    try:
        messages = json.loads(read_text(path))["messages"]
        if messages and all(_is_message(message) for message in messages):
            return list(messages)
    except (ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{path} is no saved conversation: give a file that /save wrote")


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list)
    )


def option_lines(values: Mapping[str, Any], model: Model, answer_length: int) -> list[str]:
    """Each option and its value; those that were not set have what holds then."""
    usual = {
        **model.chat_sampling(None),
        "max_tokens": answer_length,
        "draft_width": model.draft_width,
    }
    width = max(len(each.long_name) for each in _OPTIONS) + 2
    lines = []
    for option in _OPTIONS:
        value = values.get(str(option.name))
        if value in (None, ()):
            known = option.name in usual
            value = f"{usual[str(option.name)]} ({_USUAL})" if known else _USUAL
        lines.append(f"{option.long_name:{width}s}{value}")
    return lines


def set_option(values: dict[str, Any], text: str) -> str:
    """Take `NAME VALUE` into the values of the command; what was set, in words. Raises
    InputError."""
    name, _, value = text.replace("=", " ", 1).partition(" ")
    option, value = _named(name), value.strip()
    assert option.name is not None
    if not value:
        raise InputError(f"/set {option.long_name} needs a value: {option.help}")
    if value == _USUAL:
        values[option.name] = () if option.multiple else None
        return f"{option.long_name} is as usual again"
    found = _read(option, value)
    values[option.name] = (found,) if option.multiple else found
    return f"{option.long_name} is {value}"


def option_names() -> dict[str, Option]:
    """All names of the options, with - between words."""
    return {name.lstrip("-"): each for each in _OPTIONS for name in each.opts}


def _named(text: str) -> Option:
    name = text.lstrip("-").replace("_", "-").lower()
    known = option_names()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else "/set alone lists them"
    raise InputError(f"no option {text}; {hint}")


def _read(option: Option, value: str) -> Any:
    if option.is_bool_flag:
        if value.lower() not in _SWITCH:
            raise InputError(f"{option.long_name} is on or off, not {value}")
        return _SWITCH[value.lower()]
    try:
        return option.type(value, option, None)
    except click.BadParameter as error:
        raise InputError(f"{option.long_name}: {error.message.removesuffix('.')}") from None
