"""A target with its drafter as users see it: text in, text out."""

from __future__ import annotations

import asyncio
import atexit
import math
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import numpy as np

from dflash_local import records
from dflash_local.chat.dialect import Dialect
from dflash_local.chat.families import dialect_of
from dflash_local.chat.lark import either, json_rule
from dflash_local.chat.pictures import Pictures
from dflash_local.chat.quoting import quoted
from dflash_local.chat.reader import ChatReader, called_by
from dflash_local.chat.template import ChatTemplate
from dflash_local.chat.tool import Tool
from dflash_local.draft.drafter import Drafter
from dflash_local.draft.shape import DraftShape, checked_shape
from dflash_local.engine.engine import Engine
from dflash_local.engine.request import Request
from dflash_local.engine.slots import Slot
from dflash_local.errors import InputError
from dflash_local.fit.plan import Plan
from dflash_local.options import (
    ChatOptions,
    Options,
    cancel_of,
    check_options,
    lora_of,
    names_a_grammar,
    owner_of,
    sampling_of,
    seconds_of,
    texts_of,
    token_ids,
)
from dflash_local.pairs.defaults import CHAT_SAMPLING
from dflash_local.prefixes.files import SlotFiles
from dflash_local.prefixes.prefix import SavedSequence
from dflash_local.result import Chunk, ModelStatus, Result, SlotStatus, last_result
from dflash_local.sampling.params import SamplingParams
from dflash_local.sampling.thinking import ThinkingBudget
from dflash_local.stats import Stats
from dflash_local.target_model.exactness import Exactness, measure_exactness, with_isolation_note
from dflash_local.target_model.images import Prompt, without_images
from dflash_local.target_model.projector import Projector
from dflash_local.worker.async_chunks import AsyncChunks
from dflash_local.worker.job import TextRequest
from dflash_local.worker.text import TextStream
from dflash_local.worker.worker import Worker

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TOLD = (
    *("prompt_tokens", "cached_tokens", "emitted", "rounds", "drafted", "accepted", "copied"),
    *("copied_accepted", "prompt_s", "decode_s"),
)
"""Totals that a status has as they are."""
_LATEST = 16
"""How many rows `largest_hidden_state` looks at: fewer than are kept."""


class Model:
    """A loaded target with its drafter, which generates text for callers on any thread.

    Each slot runs one request at a time; others wait. Close the model, or use it as a context
    manager. One that is left open is closed when Python exits.
    """

    def __init__(
        self, engine: Engine, plan: Plan | None = None, *, say: Callable[[str], None] | None = None
    ) -> None:
        """`say` gets the lines that a user should see about drafting, each of them once."""
        target = engine.target
        self.plan = plan
        self.engine = engine
        """What runs the requests. During a request it belongs to the model's thread."""
        self.projector: Projector | None = None
        """What reads images for the target, if it was loaded with one."""
        self.target = target
        drafts = engine.drafter or engine.plain_because or engine.copies is not None
        self.draft_width: int | Literal["auto"] = "auto" if drafts else 0
        """Verify width of requests that name none."""
        self.sampling: Mapping[str, Any] = {}
        """Options that hold where a request does not give them, such as `temperature`."""
        self.sampling_by_thinking: Mapping[bool, Mapping[str, Any]] = {}
        """What takes the place of `sampling` in chats that say `enable_thinking`."""
        self.lora: Sequence[float] = target.usual_lora
        """How strongly each of the target's adapters acts for requests that do not say."""
        self.thinking: bool | None = None
        """What chats ask the template for, unless they say `enable_thinking` or an effort. None
        leaves it to the template."""
        self.reasoning_budget: int | None = None
        """After how many tokens the thoughts of chats are ended that do not say; None: never."""
        self.reasoning_budget_message = ""
        """What is written before such an end."""
        self.remote_images = False
        """Whether a server fetches pictures from addresses of the web."""
        self.context_shift = False
        """Whether answers go on where the context is full, for requests that do not say."""
        self.n_keep = 0
        """How many tokens of their text stay then."""
        self.answer_length: int | None = None
        """`max_tokens` of chats that do not give it; None: the default of all requests, 256."""
        self._vocabulary = target.vocabulary
        self._say = say
        self._said: set[str] = set()
        self._worker = Worker(engine, f"dflash-local {target.path.name}")
        # Threads of their own, so that a slow grammar delays only other grammars.
        self._compilers = ThreadPoolExecutor(2, f"dflash-local grammars {target.path.name}")
        self._template: ChatTemplate | None = None
        _open_models.add(self)
        # A model without references is freed, and its thread ends then.
        weakref.finalize(self, self._worker.stop).atexit = False

    @property
    def drafter(self) -> Drafter | None:
        """The drafter of the target; None without one."""
        return self.engine.drafter

    # Text and tokens

    @property
    def draft_shape(self) -> DraftShape:
        """The draft shape of requests that name none."""
        return self.engine.usual_shape

    @draft_shape.setter
    def draft_shape(self, shape: DraftShape) -> None:
        self.engine.usual_shape = checked_shape(shape)

    @property
    def n_ctx(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.target.n_ctx

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self.target.n_vocab

    @property
    def max_queue(self) -> int | None:
        """The number of requests that may wait for a slot. One more is refused with QueueFullError.
        None, the default: any number."""
        return self._worker.max_queue

    @max_queue.setter
    def max_queue(self, n: int | None) -> None:
        if n is not None and (not isinstance(n, int) or n < 0):
            raise InputError(f"max_queue is {n!r}; expected a whole number, 0 or more, or None")
        self._worker.max_queue = n

    def status(self) -> ModelStatus:
        """The model's present work, and totals since it was loaded. Never waits for the model."""
        requests, totals = self._worker.totals()
        own, cache = self.engine.slots, self.engine.prefix_cache
        slots = tuple(SlotStatus(slot.seq, slot.busy, own.n_cells(slot)) for slot in own)
        summed: dict[str, Any] = {name: getattr(totals, name) for name in _TOLD}
        return ModelStatus(
            **summed,
            n_slots=len(slots),
            n_busy=sum(slot.busy for slot in slots),
            n_waiting=self._worker.n_waiting,
            slots=slots,
            n_ctx=self.target.n_ctx_all,
            cells_used=self.target.n_ctx_all - own.free_cells,
            longest=own.longest,
            requests=requests,
            position_drafted=tuple(totals.position_drafted),
            position_accepted=tuple(totals.position_accepted),
            cache_bytes=cache.store.n_bytes,
            cache_hits=cache.reused["memory"] + cache.reused["disk"],
            passes=own.n_passes,
            slots_in_passes=own.n_in_passes,
        )

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a prompt. With `special`, names of special tokens become those tokens."""
        return self._vocabulary.tokenize(text, special=special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without control tokens."""
        return self._vocabulary.detokenize(tokens)

    @cached_property
    def dialect(self) -> Dialect:
        """The form of this model's reasoning and tool calls, learned from its chat template."""
        return dialect_of(self.target.chat_template, self._vocabulary.control_names)

    def is_token(self, name: str) -> bool:
        """Whether `name` is the name of a single control or user-defined token."""
        return self._vocabulary.is_token(name)

    def thinking_open(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt of `chat_prompt` ends inside a reasoning part."""
        return self.dialect.is_thinking(self.end_of(prompt))

    def bindings(
        self,
        prompt: Sequence[int],
        *,
        tools: Sequence[Tool] = (),
        required: bool = False,
        parallel: bool = True,
        schema: Mapping[str, Any] | bool | None = None,
    ) -> dict[str, Any]:
        """The options that bind the answer to a prompt of `chat_prompt`, or what comes after the
        reasoning, where the model may reason: to a call of one of `tools` if that is `required`; to
        a JSON `schema`, True for any object; to either of the two if it may be both. `parallel`
        allows several calls. Raises InputError for a model that cannot be bound so."""
        dialect, is_token = self.dialect, self.is_token
        thinking_open = self.thinking_open(prompt)
        if not required and schema is None:
            return {}
        call = None
        if tools:
            call = dialect.call_grammar(
                tools, parallel=parallel, is_token=is_token, thinking_open=thinking_open
            )
        if required:
            if call is None:
                raise InputError(
                    "this model's chat template has no tool calls, or none in a form that is known "
                    "here, so none can be asked for; leave tool_choice out, or take another model"
                )
            return {"lark": call}
        known = schema if isinstance(schema, Mapping) else {"type": "object"}
        answer = None
        if not dialect.has_thought(self.end_of(prompt)):
            answer = dialect.answer_grammar(known, is_token=is_token, thinking_open=thinking_open)
        if call is None:
            return {"json_schema": schema} if answer is None else {"lark": answer}
        if dialect.calls_are_json:
            raise InputError(
                "this model writes calls as JSON, so tools and a JSON schema cannot be told apart; "
                'give one of the two, or tool_choice "none"'
            )
        answer = answer or json_rule("start", known, lenient=False)
        return {"lark": either(call, answer)}

    def end_of(self, prompt: Sequence[int]) -> str:
        """The last tokens of a prompt by their names."""
        return "".join(map(self._vocabulary.name, without_images(prompt[-16:])))

    def thinking_budget(
        self,
        n_tokens: int | None = None,
        message: str | None = None,
        *,
        thinking_open: bool,
        begun: Sequence[int] = (),
    ) -> ThinkingBudget | None:
        """The budget for the thoughts of an answer, in tokens; None where there is no limit, or
        where the model has no thoughts.

        `message` is written before the forced end; None is the model's own, as it is for
        `n_tokens`. -1 is no limit. `begun`: tokens of the answer that are in the prompt. Raises
        InputError.
        """
        n_tokens = self.reasoning_budget if n_tokens is None else n_tokens
        message = self.reasoning_budget_message if message is None else message
        if n_tokens is not None and not (type(n_tokens) is int and n_tokens >= -1):
            raise InputError(
                f"reasoning_budget is {n_tokens!r}; give a whole number, 0 or more, or -1"
            )
        marks = self.dialect.thinking
        if n_tokens in (None, -1) or marks is None:
            return None
        opening, closing = (mark.strip() for mark in marks)
        end = self._vocabulary.tokenize(message, special=False, add_special=False)
        end += self._vocabulary.tokenize(closing, special=True, add_special=False)
        texts = opening.encode(), closing.encode()
        return ThinkingBudget(n_tokens, texts, tuple(end), thinking_open, tuple(begun))

    def prepare_chat(self) -> ChatTemplate:
        """Start what renders chats now, so that the first need not wait for it. Raises InputError
        where the model file has no chat template, or a bad one."""
        if self._template is None:
            self._template = ChatTemplate(
                self.target.chat_template, bos=self._vocabulary.bos, eos=self._vocabulary.eos
            )
        return self._template

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any] | Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        begin_answer: bool = True,
    ) -> list[int]:
        """Token ids of a conversation, rendered by the model's own chat template.

        `tools` are what the model may call, in OpenAI's shape. Without `begin_answer` the prompt
        ends with the last message. Images in messages are `{"type": "image_url", "image_url":
        {"url": "data:..."}}`, or `{"type": "image", "image": ...}` with bytes or the path of a
        file. Names of control tokens in messages and tools are text.
        """
        pictures = Pictures(self.projector)
        text = self.rendered_chat(
            messages, tools, chat_template_kwargs, begin_answer=begin_answer, pictures=pictures
        )
        return pictures.tokenized(text, self._vocabulary, self.n_ctx)

    def rendered_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any] | Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        begin_answer: bool = True,
        pictures: Pictures,
    ) -> str:
        """The text of `chat_prompt`, with the marks of `chat.quoting`, and those of `pictures`,
        which are taken out of the messages."""
        messages = pictures.taken_from(messages)
        template = self.prepare_chat()
        variables = dict(chat_template_kwargs or {})
        if self.thinking is not None and "reasoning_effort" not in variables:
            variables.setdefault("enable_thinking", self.thinking)
        if tools is not None:
            variables["tools"] = quoted(tools, self._vocabulary)
        return template.render(quoted(messages, self._vocabulary), begin_answer, **variables)

    def chat_sampling(self, chat_template_kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The defaults of sampling for a chat: what the model's makers advise, who may do so for
        answers with thoughts and without, and else llama.cpp's."""
        variables = chat_template_kwargs or {}
        # Templates think by default; of an effort, "none" alone says not to.
        effort = variables.get("reasoning_effort")
        usual_thinking = effort != "none" if effort else self.thinking
        asked = variables.get("enable_thinking", usual_thinking)
        found = self.sampling_by_thinking.get(asked) if isinstance(asked, bool) else None
        if found is None:
            return {**CHAT_SAMPLING, **self.sampling}
        usual = {name: getattr(SamplingParams, name) for name in self.sampling}
        return {**CHAT_SAMPLING, **usual, **found}

    # Generating

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Result:
        """Complete a prompt, a text or token ids. Keyword arguments: see `options.Options`."""
        return last_result(self.stream(prompt, **options))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Iterator[Chunk]:
        """`generate`, chunk by chunk. The request begins with the first `next`. Closing the
        iterator cancels it."""
        return self._worker.stream(self._text_request(prompt, options))

    async def asubmit(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> AsyncChunks:
        """Queue a request and return its chunks, which are still to come.

        Raises here what is wrong with the request, and QueueFullError. Cancel the chunks to give
        the request up.
        """
        # Compiling a grammar or tokenising a text may take long. Known grammars wait for no others.
        loop, hands = asyncio.get_running_loop(), None
        if names_a_grammar(options) and not await loop.run_in_executor(None, self._knows, options):
            hands = self._compilers
        wanted = await loop.run_in_executor(hands, self._text_request, prompt, options)
        return AsyncChunks(partial(self._worker.submit, wanted))

    async def astream(
        self, prompt: str | Sequence[int], **options: Unpack[Options]
    ) -> AsyncIterator[Chunk]:
        """`stream` for asynchronous callers. Leaving the loop cancels the request."""
        chunks = await self.asubmit(prompt, **options)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            chunks.cancel()

    async def agenerate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Result:
        """`generate` for asynchronous callers."""
        return last_result([chunk async for chunk in self.astream(prompt, **options)])

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Result:
        """Answer a conversation: messages with `role` and `content`, the last one from the user.

        The result has the answer's `content`, its `reasoning` and its `tool_calls`. Keyword
        arguments: `tools`, `tool_choice`, `chat_template_kwargs`, and those of `generate`; see
        `options.ChatOptions`.
        """
        return last_result(self.stream_chat(messages, **options))

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> Iterator[Chunk]:
        """`chat`, chunk by chunk, each with its part of `content` and `reasoning`."""
        prompt, reader, rest = self._chat(messages, options)
        return reader.read(self.stream(prompt, **rest))

    async def achat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> Result:
        """`chat` for asynchronous callers."""
        return last_result([chunk async for chunk in self.astream_chat(messages, **options)])

    def astream_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> AsyncIterator[Chunk]:
        """`stream_chat` for asynchronous callers."""
        prompt, reader, rest = self._chat(messages, options)
        return reader.aread(self.astream(prompt, **rest))

    def _chat(
        self, messages: Sequence[Mapping[str, Any]], given: ChatOptions
    ) -> tuple[list[int], ChatReader, Options]:
        """The prompt of a chat, what reads its answer, and the options of the request."""
        offered, choice = given.pop("tools", None), given.pop("tool_choice", "auto")
        template = given.pop("chat_template_kwargs", None)
        begun = given.pop("begun", None)
        budget = given.pop("reasoning_budget", None), given.pop("reasoning_budget_message", None)
        options = cast(Options, given)
        asked = () if choice == "none" else offered or ()
        tools = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in asked]
        called, required = called_by(choice, tools), choice not in ("auto", "none")
        prompt = self.chat_prompt(messages, tools or None, template)
        thinking = self.thinking_open(prompt)
        schema, rest = options.get("json_schema"), {**options, "json_schema": None}
        is_alone = begun is None and not required and not names_a_grammar(rest)
        if is_alone and (schema is True or isinstance(schema, Mapping)):
            options = cast(Options, rest)
        else:
            schema = None
        options |= self.bindings(prompt, tools=called, required=required, schema=schema)  # type: ignore[typeddict-item]
        if self.answer_length is not None:
            options.setdefault("max_tokens", self.answer_length)
        for name, value in self.chat_sampling(template).items():
            options.setdefault(name, value)  # type: ignore[misc]
        if self.dialect.special:
            options["special"] = True
        reader = ChatReader(self.dialect.parser(tools, thinking_open=thinking))
        text, tokens = begun or ("", ())
        limit = self.thinking_budget(*budget, thinking_open=thinking, begun=tokens)
        if limit is not None:
            options["thinking_budget"] = limit
        if begun is not None:
            reader.take(Chunk(text, []))
            prompt += tokens
        return prompt, reader, options

    def exactness(self) -> Exactness:
        """The difference of verifying from plain decoding on this machine, in some random rows, and
        whether other requests change an answer.

        It is measured once, in about two seconds, which empties the caches. Then it is kept.
        """
        found = self._worker.run(
            lambda: measure_exactness(self.target, before=self.engine.slots.forget_all)
        )
        return with_isolation_note(found, self.target, exact=self.engine.exact)

    def largest_hidden_state(self) -> float | None:
        """The largest magnitude among the latest hidden states that the drafter reads, without
        those of the last pass; None without a drafter, and if it reads none. Waits for running
        requests."""
        if self.drafter is None or not self.target.n_features:
            return None

        def largest() -> float:
            end = self.target.native.first_stored
            states = self.target.stored(range(max(0, end - _LATEST), end))
            return float(np.abs(states).max(initial=0.0))

        return self._worker.run(largest)

    def forget(self) -> None:
        """Empty the caches, so that the next request begins cold. Waits for running requests."""
        self._worker.run(self.engine.forget)

    def save_slot(self, index: int, name: str, *, owner: str = "") -> tuple[int, int]:
        """Save what slot `index` has, in a file of that name in the folder `slot_save_path`; how
        many tokens and bytes that is. Waits for running requests. Raises InputError, also for a
        slot that has nothing of the `owner`, as requests name one, whose files these are."""
        files, slot = self._slot_files(), self._slot(index)

        def saved() -> SavedSequence:
            if self.engine.owner_of(slot) != owner:
                raise InputError(f"slot {index} has nothing that can be saved")
            return self.engine.prefix_cache.saved(slot)

        entry = self._worker.run(saved)
        return entry.n_cells, files.write(name, entry, owner)

    def restore_slot(self, index: int, name: str, *, owner: str = "") -> tuple[int, int]:
        """Give slot `index` what `save_slot` has saved under that name; as `save_slot`."""
        slot = self._slot(index)
        entry, n_bytes = self._slot_files().read(name, owner)
        self._worker.run(lambda: self.engine.prefix_cache.put_back(slot, entry))
        return entry.n_cells, n_bytes

    def erase_slot(self, index: int, *, owner: str = "") -> int:
        """Empty slot `index` if it has a text of the `owner`; how many tokens it had. Waits for
        running requests. Raises InputError."""
        slot = self._slot(index)

        def erase() -> int:
            slots = self.engine.slots
            n = slots.n_cells(slot) if self.engine.owner_of(slot) == owner else 0
            if n:
                slots.forget(slot)
            return n

        return self._worker.run(erase)

    def _slot(self, index: int) -> Slot:
        slots = self.engine.slots
        if not 0 <= index < len(slots):
            raise InputError(f"there is no slot {index}; there are 0 to {len(slots) - 1}")
        return slots[index]

    def _slot_files(self) -> SlotFiles:
        if self.engine.slot_files is None:
            raise InputError("no folder was given for saved slots; load with slot_save_path")
        return self.engine.slot_files

    def close(self) -> None:
        """End all requests and free everything. Safe to call again."""
        self._worker.close()
        if not self._worker.is_here:
            return  # a fork has the memory, but neither the threads nor the device
        with ExitStack() as stack:  # what fails keeps nothing else from being freed
            stack.callback(self.target.close)
            if self.drafter:
                stack.callback(self.drafter.close)
            stack.callback(self._keep_costs)
            stack.callback(self.engine.prefix_cache.close)

    def _keep_costs(self) -> None:
        """Keep what was learnt while decoding."""
        engine = self.engine
        if engine.controller and engine.learns and self.target.is_open:
            known = engine.controller.known
            records.keep(
                self.target,
                self.drafter,
                engine.controller.costs,
                (known[True], known[False]) if self.drafter else None,
                engine.copies,
            )

    def __repr__(self) -> str:
        drafter = self.plan.drafter_name if self.plan else None
        drafts = f" with {drafter}" if self.drafter and drafter else ""
        state = "" if self.target.is_open else ", closed"
        return f"<Model {self.target.path.name}{drafts}, {self.n_ctx} tokens of context{state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loaded model cannot be copied or pickled; load it in each process")

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _knows(self, options: Options) -> bool:
        """Whether the grammar that a request names is compiled already."""
        return self.engine.grammars.knows(self._sampling(options))

    def _text_request(self, prompt: str | Sequence[int], options: Options) -> TextRequest:
        """Check a request before it is queued, so that bad ones fail at the call."""
        sampling = self._sampling(options)
        if isinstance(prompt, str):
            tokens = self._vocabulary.tokenize(prompt, n_ctx=self.n_ctx)
        else:
            tokens = token_ids(prompt)
        images = prompt.images if isinstance(prompt, Prompt) else {}
        # Compiled here: on the model's thread all other requests would wait for it.
        constraint = self.engine.grammars.constraint(sampling)
        if never := self._never(options):
            biases = {**sampling.logit_bias, **dict.fromkeys(never, -math.inf)}
            sampling = replace(sampling, logit_bias=biases)
        width, shape = options.get("draft_width"), options.get("draft_shape")
        special = bool(options.get("special"))
        shifts = options.get("context_shift", self.context_shift)
        piece = partial(self._vocabulary.piece, special=special)
        text = TextStream(piece, texts_of(options, "stop"), texts_of(options, "stop_kept"))
        request = Request(
            tokens,
            sampling,
            options.get("max_tokens", 256),
            self.draft_width if width is None else width,
            text.push,
            options.get("cache_prompt", True) and options.get("prompt_logprobs") is None,
            constraint,
            checked_shape(self.draft_shape if shape is None else shape),
            owner_of(options),
            options.get("prompt_logprobs"),
            lora_of(options, self.lora),
            options.get("id_slot"),
            # Images are where they are: a text with some is not shifted.
            options.get("n_keep", self.n_keep) if shifts and not images else None,
            options.get("n_discard", 0),
            images,
        )
        self.engine.check(request)
        return TextRequest(
            request,
            text,
            cancel_of(options),
            seconds_of("queue_timeout", options),
            seconds_of("deadline_s", options),
            self._tell,
            bool(options.get("prompt_progress")),
        )

    def _sampling(self, options: Options) -> SamplingParams:
        """The checked sampling parameters of a request."""
        check_options(options)
        sampling = self._with_token_ids(sampling_of({**self.sampling, **options}))
        sampling.validate(self.target.n_vocab)
        return sampling

    def _never(self, options: Options) -> set[int]:
        """The tokens that no answer to a request may have. Raises InputError."""
        never = set(self._vocabulary.ends) if options.get("ignore_eos") else set()
        if allowed := set(token_ids(options.get("allowed_token_ids") or (), "allowed_token_ids")):
            every = set(range(self.target.n_vocab))
            if wrong := allowed - every:
                raise InputError(f"allowed_token_ids has {min(wrong)}, which is no token")
            never |= every - allowed
        for word in texts_of(options, "bad_words"):
            alone, spaced = (
                self._vocabulary.tokenize(text, special=True, add_special=False)
                for text in (word, f" {word}")
            )
            never |= {tokens[0] for tokens in (alone, spaced) if len(tokens) == 1}
            if never.isdisjoint(alone) or never.isdisjoint(spaced):
                raise InputError(
                    f"bad_words has {word[:40]!r}, which this model writes in several tokens: only "
                    "words of one token can be forbidden"
                )
        return never

    def _with_token_ids(self, sampling: SamplingParams) -> SamplingParams:
        """With the tokens of texts in `logit_bias` in their place."""
        given: object = sampling.logit_bias
        if not isinstance(given, Mapping) or not any(isinstance(key, str) for key in given):
            return sampling
        biases: dict[int, float] = {}
        for key, bias in given.items():
            ids = [key]
            if isinstance(key, str):
                ids = self._vocabulary.tokenize(key, special=True, add_special=False)
            biases |= dict.fromkeys(ids, bias)
        return replace(sampling, logit_bias=biases)

    def _tell(self, stats: Stats) -> None:
        """Tell the user, once each, that drafting does not pay here and what may be wrong."""
        off = stats.drafting if self.drafter and stats.drafting and not stats.drafted else None
        for kind, line in (("off", off), ("warning", stats.warning)):
            if line and self._say and kind not in self._said:
                self._said.add(kind)
                self._say(line)


_open_models: weakref.WeakSet[Model] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Free models before Python unloads llama.cpp and its devices."""
    with ExitStack() as stack:  # a model that fails to close keeps no other one open
        for model in list(_open_models):
            stack.callback(model.close)
