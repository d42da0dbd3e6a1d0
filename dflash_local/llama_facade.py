"""llama-cpp-python's `Llama`, with drafts: a program written for it changes one import.

>>> from dflash_local import Llama  # from llama_cpp import Llama
>>> llm = Llama("target.gguf", draft_model="drafter.gguf")
>>> llm("def add(a, b):", max_tokens=32)["choices"][0]["text"]
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

from gguf import GGMLQuantizationType

from dflash_local.errors import InputError
from dflash_local.fit.options import KV_TYPES, ROPE_NUMBERS
from dflash_local.loading import load
from dflash_local.model import Model
from dflash_local.options import Options
from dflash_local.pairs import gguf_names
from dflash_local.result import Chunk, Result, last_result

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SPLIT_MODES = ("none", "layer", "row", "tensor")
_KV_TYPES = {GGMLQuantizationType[name.upper()].value: name for name in KV_TYPES}
_WITHOUT_EFFECT = {
    "last_n_tokens_size", "logits_all", "n_threads_batch", "n_ubatch", "no_perf", "numa",
    "offload_kqv", "op_offload", "swa_full", "use_mlock", "use_mmap",
}  # fmt: skip
"""Arguments of llama-cpp-python that change no text. They are taken, and do nothing."""
_RANDOM = 0xFFFFFFFF
"""llama.cpp's seed that stands for a random one."""


class Settings(TypedDict, total=False):
    """The settings of completions and chats, by llama-cpp-python's names."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    stop: str | Sequence[str] | None
    seed: int | None
    grammar: Any
    logit_bias: Mapping[int, float] | None


_DEFAULTS: Settings = {
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


_BY_TOKEN = "model.stream gives tokens one by one, with logprobs"
_BY_FILE = "model.target has what is known of the file"
_LACKING = {
    name: instead
    for names, instead in (
        ("create_embedding embed", "dflash_local.load_embedder loads models for that"),
        ("eval generate sample logits_to_logprobs longest_token_prefix", _BY_TOKEN),
        ("n_tokens scores input_ids eval_tokens eval_logits", _BY_TOKEN),
        (
            "save_state load_state set_cache",
            "dflash_local.load keeps prompts with cache_mb and cache_dir",
        ),
        ("create_chat_completion_openai_v1", "create_chat_completion gives the same as a dict"),
        ("token_bos token_eos token_nl tokenizer n_embd pooling_type", _BY_FILE),
        ("metadata", "`dflash-local inspect` shows what a file says"),
        ("chat_format", "chats take the template of the model's file"),
        ("chat_handler", "images are read with the projector beside the model's file"),
    )
    for name in names.split()
}
"""What llama-cpp-python's `Llama` has and this lacks, and its replacement."""


class Llama:
    """A model behind llama-cpp-python's methods. `model` is the same model behind ours.

    `model_path` and `draft_model` are as for `dflash_local.load`: the paths of a target and a
    DFlash drafter, or a name. `n_ctx` 0 or None, and `n_gpu_layers` None, take as much as fits the
    memory; both are None by default. `type_k` is the type of the whole KV cache, unless `type_v` is
    given. `flash_attn` None is off, as with llama-cpp-python, except for a quantised cache, which
    needs it. Arguments that change no text, such as `use_mmap`, are taken and do nothing. Raises
    InputError for others, and as `dflash_local.load`.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        draft_model: str | os.PathLike[str] | None = None,
        n_gpu_layers: int | None = None,
        split_mode: int = 1,
        main_gpu: int = 0,
        tensor_split: Sequence[float] | None = None,
        seed: int = _RANDOM,
        n_ctx: int | None = None,
        n_batch: int = 512,
        n_threads: int | None = None,
        flash_attn: bool | None = None,
        type_k: int | None = None,
        type_v: int | None = None,
        kv_overrides: Mapping[str, int | float | bool | str] | None = None,
        lora_path: str | os.PathLike[str] | None = None,
        lora_scale: float = 1.0,
        verbose: bool = True,
        **others: Any,
    ) -> None:
        rope = {name: others.pop(name) for name in ROPE_NUMBERS if name in others}
        for name, value in others.items():
            is_usual = value is None or value is False or value == -1
            if name not in _WITHOUT_EFFECT and not is_usual:
                raise InputError(f"Llama takes no {name} here; leave it out")
        for name, kind in (("type_k", type_k), ("type_v", type_v)):
            if kind is not None and kind not in _KV_TYPES:
                raise InputError(f"{name} is {kind}; give one of {sorted(_KV_TYPES)}")
        if split_mode not in range(len(_SPLIT_MODES)):
            raise InputError(
                f"split_mode is {split_mode}; give 0 (none), 1 (layer), 2 (row) or 3 (tensor)"
            )
        kv_type = "f16" if type_k is None else _KV_TYPES[type_k]
        value_type = kv_type if type_v is None else _KV_TYPES[type_v]
        is_quantised = "q" in kv_type + value_type
        self.model_path = os.fspath(model_path)
        self.model: Model = load(
            model_path,
            draft_model,
            n_ctx=n_ctx or None,
            n_gpu_layers=n_gpu_layers,
            n_threads=n_threads,
            n_batch=n_batch,
            flash_attn=is_quantised if flash_attn is None else flash_attn,
            kv_type=kv_type,
            cache_type_v=value_type,
            override_kv=kv_overrides or {},
            **rope,
            split_mode=_SPLIT_MODES[split_mode],
            main_gpu=main_gpu,
            tensor_split=tensor_split,
            lora=[(lora_path, lora_scale)] if lora_path else [],
            quiet=not verbose,
        )
        self._seed = seed
        self.verbose = verbose

    @classmethod
    def from_pretrained(cls, repo_id: str, filename: str | None = None, **settings: Any) -> Llama:
        """The model of a repository of the hub. `filename` names one of its files, or a pattern, by
        its quantisation: `*Q8_0.gguf`. The other arguments are those of `Llama`.

        Raises InputError for a name without a quantisation, and where nothing is found.
        """
        quant = gguf_names.quantisation(filename.removesuffix(".gguf")) if filename else None
        if filename and quant is None:
            raise InputError(
                f"filename is {filename!r}; give one with its quantisation, such as *Q8_0.gguf"
            )
        return cls(f"{repo_id}:{quant}" if quant else repo_id, **settings)

    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: None = None,
        max_tokens: int | None = 16,
        *,
        echo: bool = False,
        stream: bool = False,
        model: str | None = None,
        **settings: Unpack[Settings],
    ) -> Any:
        """Complete a text: OpenAI's completion as a dict, or with `stream` an iterator of chunks.

        Raises InputError for unknown settings, such as `logprobs`, which `model.generate` has.
        """
        _refuse({"suffix": suffix})
        options = self._options(max_tokens, {"temperature": 0.8, **settings})
        head = self._head("cmpl", "text_completion", model)
        begun = (prompt if isinstance(prompt, str) else self.model.detokenize(prompt)) * echo
        chunks = self.model.stream(prompt, **options)
        if stream:
            return _text_chunks(chunks, head, begun)
        result = last_result(chunks)
        choice = _text_choice(begun + result.text, _finish(result))
        return {**head, "choices": [choice], "usage": _usage(result)}

    __call__ = create_completion

    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        stream: bool = False,
        model: str | None = None,
        **settings: Unpack[Settings],
    ) -> Any:
        """Answer a conversation: OpenAI's chat completion as a dict, or with `stream` an iterator
        of chunks. Raises InputError for unknown settings."""
        options = self._options(max_tokens, {"temperature": 0.2, **settings})
        if schema := _schema(response_format):
            options["json_schema"] = schema
        head = self._head("chatcmpl", "chat.completion", model)
        chunks = self.model.stream_chat(
            messages, tools=tools, tool_choice=_choice(tool_choice), **options
        )
        if stream:
            return _chat_chunks(chunks, {**head, "object": "chat.completion.chunk"})
        result = last_result(chunks)
        choice = {"index": 0, "message": result.message, "logprobs": None}
        choice["finish_reason"] = _chat_finish(result)
        return {**head, "choices": [choice], "usage": _usage(result)}

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of UTF-8 text. Raises InputError for what is no bytes."""
        if not isinstance(text, bytes):
            raise InputError(f"the text is of type {type(text).__name__}; give bytes")
        given = text.decode("utf-8", "replace")
        return self.model.target.vocabulary.tokenize(given, special=special, add_special=add_bos)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: None = None, special: bool = False
    ) -> bytes:
        """The text of `tokens`, with `special` also the names of control tokens."""
        _refuse({"prev_tokens": prev_tokens})
        return self.model.target.vocabulary.detokenize(tokens, special=special).encode()

    def n_ctx(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.model.n_ctx

    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self.model.target.n_vocab

    def set_seed(self, seed: int) -> None:
        """The seed of requests that name none."""
        self._seed = seed

    def reset(self) -> None:
        """Empty the caches."""
        self.model.forget()

    def close(self) -> None:
        """Free everything."""
        self.model.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _LACKING:
                raise AttributeError(f"Llama has no {name} here; {_LACKING[name]}")
            raise AttributeError(f"'Llama' object has no attribute {name!r}")

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Llama {self.model!r}>"

    def _options(self, max_tokens: int | None, settings: Settings) -> Options:
        given: dict[str, Any] = {**_DEFAULTS, **settings}
        _refuse({name: given.pop(name) for name in given.keys() - Settings.__annotations__.keys()})
        seed = self._seed if given.get("seed") is None else given["seed"]
        return cast(
            Options,
            {
                **given,
                "max_tokens": max_tokens if max_tokens is not None and max_tokens > 0 else None,
                "seed": None if seed in (_RANDOM, -1) else seed,
                "stop": given.get("stop") or (),
                "top_k": max(0, given["top_k"]),
                "grammar": _gbnf(given.get("grammar")),
                "logit_bias": dict(given.get("logit_bias") or {}),
            },
        )

    def _head(self, prefix: str, kind: str, model: str | None) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{uuid.uuid4()}",
            "object": kind,
            "created": int(time.time()),
            "model": model or self.model_path,
        }


def _refuse(others: Mapping[str, Any]) -> None:
    """Refuse arguments that would change the text, unless they have the value that does not."""
    harmless = {"tfs_z": 1.0, "mirostat_mode": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1}
    for name, value in others.items():
        if value is not None and value is not False and value != harmless.get(name):
            raise InputError(f"{name} is not known here; leave it out")


def _gbnf(grammar: Any) -> str | None:
    """The text of a grammar, or of llama-cpp-python's `LlamaGrammar`."""
    text = getattr(grammar, "_grammar", grammar)
    if not (text is None or isinstance(text, str)):
        raise InputError(f"grammar is {grammar!r}; give a text in GBNF, or a LlamaGrammar")
    return text


def _schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    given = response_format or {"type": "text"}
    kind = given.get("type")
    if kind == "text":
        return None
    schema = given.get("schema")
    if kind == "json_schema":
        schema = given.get("json_schema", {}).get("schema")
    if kind not in ("json_object", "json_schema"):
        raise InputError(f"response_format is {dict(given)!r}; give text or json_object")
    return schema or {"type": "object"}


def _choice(given: str | Mapping[str, Any] | None) -> str:
    if given is None or isinstance(given, str):
        return given or "auto"
    return str(given.get("function", {}).get("name"))


def _finish(result: Result) -> str:
    return "length" if result.finish_reason == "length" else "stop"


def _chat_finish(result: Result) -> str:
    return "tool_calls" if result.tool_calls else _finish(result)


def _usage(result: Result) -> dict[str, int]:
    n_prompt, n = result.stats.prompt_tokens, len(result.tokens)
    return {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}


def _text_choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": 0, "logprobs": None, "finish_reason": finish_reason}


def _text_chunks(
    chunks: Iterator[Chunk], head: Mapping[str, Any], begun: str
) -> Iterator[dict[str, Any]]:
    for chunk in chunks:
        if begun + chunk.text:
            yield {**head, "choices": [_text_choice(begun + chunk.text, None)]}
        begun = ""
        if chunk.result is not None:
            yield {**head, "choices": [_text_choice("", _finish(chunk.result))]}


def _chat_chunks(chunks: Iterator[Chunk], head: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    def piece(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**head, "choices": [choice]}

    yield piece({"role": "assistant"})
    for chunk in chunks:
        if chunk.reasoning:
            yield piece({"reasoning_content": chunk.reasoning})
        if chunk.content:
            yield piece({"content": chunk.content})
        if chunk.result is not None:
            for index, call in enumerate(chunk.result.tool_calls):
                yield piece({"tool_calls": [{"index": index, **call}]})
            yield piece({}, _chat_finish(chunk.result))
