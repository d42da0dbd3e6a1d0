"""A drafter from nothing: a run as `tune` makes it, which begins with random weights and lets the
target write all that it learns from, the prompts included."""

import math
import random
import shutil
import time
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dflash_local.bench.prompts.case import tokenized
from dflash_local.bench.prompts.prompt import BenchPrompt, prompt_of, read_lines, text_of
from dflash_local.errors import InputError
from dflash_local.fit.footprint import Footprint, size_text
from dflash_local.fit.options import LoadOptions
from dflash_local.gguf.file import GgufFile
from dflash_local.llama.host import default_threads, host_memory
from dflash_local_tune.answers import LEAST_ANSWER, N_LABELS, Answer, Ring
from dflash_local_tune.beginning import write_beginning
from dflash_local_tune.beside import MOST_FILES, Beside
from dflash_local_tune.card import Card
from dflash_local_tune.fitting import Run, TuneOptions, errors_told, tune
from dflash_local_tune.plan import free_bytes
from dflash_local_tune.saving import save_checkpoint
from dflash_local_tune.texts import Form, Texts, drawn
from dflash_local_tune.training import Trainer, is_trained
from dflash_local_tune.writer import Asked, Text, Writer

T = TypeVar("T")

TEMPERATURES = (0.0, 0.8)
_MOST_AHEAD = 64
"""Answers that wait for their first step."""
_WRITTEN, _CPU_WRITTEN = 256, 8
"""Texts that the target writes at once."""
_HELD_AT_ONCE = 24
"""Texts that the trainer's own process writes, where another one writes the others."""
_BESIDE_BYTES = 3 << 30
"""GPU memory that such a process takes besides the target and its cells."""
_RATE, _RATE_ON = 0.35, 0.175
"""The largest learning rates, of random weights and of those that a run goes on from."""
_WARM_UP = 100
"""On a GPU. A CPU does not come to so many steps."""
_AHEAD = 512
"""Answers before the first step: those that the first steps see again and again are learnt by
heart."""
_USES = 8
"""Steps that learn from an answer, at most, in the mean. With 21, 65,000 steps on 8 million tokens
of answers came to 2.5 tokens a round in 26 minutes; with 8, 35,000 on 14 million to 3.1 in 25."""
_PROCESSES = 3
"""Processes that write, at most. On an H200 one of them writes 6,900 tokens a second, two 12,400,
and four 15,500: a pass waits for the host more than for the GPU."""
_POSITIONS = 256
"""Of one answer's blocks in a step: four times as many taught no more."""
_SAVE_S = 120.0
_GIVEN = 0.3
"""Part of the answers that are to given prompts: questions, or the user's own. The others are to
prompts that the target wrote."""
_TAUGHT = 0.5
"""Part of the answers that are a teacher's, where there is one."""
_PROMPT_TOKENS, _BASE_TOKENS = 96, 48
"""The most tokens of a prompt that the target writes: a user's turn, or the begin of a text."""
_PROMPT_TEMPERATURE = 0.85
"""At 1 a small quantised model's prompts are half nonsense; much lower they are all alike."""
_LEAST_PROMPT = 12
"""Characters."""
_MEASURED, _MOST_MEASURED_S = 0.09, 90.0
"""Part of the time, and seconds at most, for the measurement in the end."""
_SENT = 8
"""Answers that such a process sends at once."""
_WAITING_BYTES = 4 << 30
"""The most that their files take on the disk; more only where one of each process takes more."""
_POSITION_BYTES = 8 + 12 * N_LABELS
"""In them for each token, besides its features: its number, and its labels."""
_FORECAST = (
    "to expect: a target of 135M weights came to 3.1 tokens a round, with trees to 3.5, in 25 "
    "minutes on one H200, which are 35,000 steps on 14 million tokens of answers; larger targets "
    "and smaller GPUs take hours"
)
_TURN_MARK = "PLACE OF THE TURN"
_SYSTEMS = (
    (None, 2),
    ("You help people who program, in many languages. The user asks for code.", 1),
    ("You teach mathematics. The user gives a problem with numbers, to be solved step by step.", 1),
)
"""Texts before a user's turn that the target writes, and their shares."""
_SEEDS = (
    "The", "In", "A", "When", "How", "What", "If", "For", "This", "I", "We", "It", "There", "To",
    "def ", "import ", "class ", "#include <", "function ", "public ", "SELECT ", "# ", "<html>",
    "Question:", "Problem:", "Let ", "Suppose", "Dear", "Once", "1.", "Abstract", "Chapter",
)  # fmt: skip
"""Beginnings of texts, for a target without a chat template."""


@dataclass(frozen=True)
class TrainOptions(TuneOptions):
    """The settings of `train`. The run puts the weights it begins with at `draft` and `checkpoint`.
    `begin`: the folder of a checkpoint to begin with instead. `minutes` limits all of the run.
    `teacher_text`: a JSON Lines file of prompts with answers, which half of the training learns.
    `n_written`: texts that the target writes at once."""

    begin: Path | None = None
    teacher_text: Path | None = None
    block_size: int | None = None
    n_layer: int | None = None
    n_written: int | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.target,)


def options_for(target: Path, output: Path, **more: Any) -> TrainOptions:
    """The options of a run that writes to `output`. Raises InputError."""
    if more.get("begin") and more.get("n_layer"):
        raise InputError("--from has its own layers; leave out --layers")
    # The drafter's name, too. Nothing is to be written to a folder that has none, such as ".".
    folder = output.parent / f"{output.name}.partial" / output.name
    given = {"data": None, "source": "trained from nothing", "n_ctx": 768} | more
    return TrainOptions(target, folder / "drafter.gguf", output=output, checkpoint=folder, **given)


def train(options: TrainOptions, **more: Any) -> Card:
    """Train a drafter into the folder `options.output`; everything else as for `tune`."""
    return tune(options, kind=NewRun, **more)


class NewRun(Run):
    _options: TrainOptions
    _answerer: Writer  # type: ignore[assignment]
    _from_nothing = True
    _ends_early = False
    """The last part, with a small rate, gains most."""
    _room = 0
    """GPU memory that is left beside target, trainer and writers. It is counted, not measured: the
    writers may still be loading."""
    _stride = 1
    """One prompt of so many is asked for; the others are another process's."""
    _beside: Beside | None = None
    _keep_on = "cpu"

    def __init__(self, options: TrainOptions, *rest: Any) -> None:
        self._begun = time.monotonic()
        self._taught = _answered(options.teacher_text) if options.teacher_text else []
        self._teacher: list[Asked] = []
        folder = options.draft.parent
        if not options.draft.exists():
            shutil.rmtree(folder, ignore_errors=True)
            write_beginning(
                folder,
                options.target,
                begin=options.begin,
                block_size=options.block_size,
                n_layer=options.n_layer,
                seed=options.seed,
            )
        # A drafter that is trained further must not learn the texts of its first training again.
        self._text_seed = options.seed
        if options.begin is not None:
            self._text_seed += zlib.crc32(np.memmap(options.draft, mode="r").data)
        super().__init__(options, *rest)
        on_gpu = self._device == "cuda"
        self._before = None
        self._n_batch = max(2048 if on_gpu else 512, options.n_ctx)
        n_block = GgufFile.open(options.draft).require("dflash.block_size", int)
        self._n_anchors = max(1, _POSITIONS // n_block)
        self._rate = _RATE_ON if options.begin else _RATE
        if on_gpu:
            self._warm_up, self._n_owed = _WARM_UP, _AHEAD
        self._greedy: set[tuple[int, ...]] = set()
        self._save_s = _SAVE_S
        self._measured_every = 300 if on_gpu else 150
        self._n_compared = 8 if on_gpu else 12
        self._queue: deque[tuple[list[int], float]] = deque()
        self._known: set[str] = set()
        self._openings: list[tuple[list[int], str, str]] = []
        self._limit_s = 60 * options.minutes

    # The target's texts

    def _open_answerer(self, n: int | None = None) -> Writer:  # type: ignore[override]
        options = self._options
        n = n or options.n_written or self._most_written()
        self._say(f"the target writes {n} texts at once")
        writer = Writer(
            self._target,
            n,
            options.n_ctx,
            max(options.max_tokens, _PROMPT_TOKENS),
            self._dtype,
            self._device,
            self._on_prompt,
            seed=self._text_seed + self._n_asked,
        )
        self._loaded.callback(writer.close)
        return writer

    def _most_written(self) -> int:
        """As many texts at once as a quarter of the memory beside the target has cells for."""
        free = free_bytes(self._device)
        if free is None:
            return _CPU_WRITTEN
        return max(1, min(_WRITTEN, free // 4 // self._cells_bytes()))

    def _cells_bytes(self) -> int:
        """The bytes of the cells of one text."""
        files = Footprint(self._target_file, None, None, LoadOptions())
        return files.kv(self._options.n_ctx, range(files.n_blocks))

    def _read_texts(self, forms: Sequence[Form]) -> Texts:
        """The prompts: chats if the target chats, except for a user's own."""
        texts = super()._read_texts(forms)
        if "chat" not in forms or self._options.data is not None:
            return texts

        def draw(rng: random.Random) -> BenchPrompt:
            while not (found := texts.draw(rng)).messages:
                pass
            return found

        parts = ([p for p in part if p.messages] for part in (texts.tune, texts.watch, texts.test))
        kept, watch, test = parts
        return Texts(kept, draw, watch, test)

    def _prompts(self) -> tuple[Texts, dict[str, list[list[int]]]]:
        texts, cases = super()._prompts()
        held = [*texts.watch, *texts.test]
        self._known |= {_plain(_said(p.messages[-1])) for p in held if p.messages}
        if not self._openings:
            self._openings = self._all_openings()
            self._teacher = self._given_answers()
        return texts, cases

    def _given_answers(self) -> list[Asked]:
        room = self._model.n_ctx - self._options.n_ctx + LEAST_ANSWER
        cases, _ = tokenized(self._model, self._taught, room=room)
        found = [Asked(each.tokens, answer=each.answer) for each in cases if each.answer]
        if self._taught and not found:
            raise InputError(
                f"{self._options.teacher_text}: no answer fits {self._options.n_ctx} tokens with "
                "its prompt; set --ctx higher"
            )
        return found

    def _all_openings(self) -> list[tuple[list[int], str, str]]:
        """Tokens after which the target writes a prompt; and the text around one that it wrote,
        when it is to be answered."""
        tokenize = self._target.vocabulary.tokenize
        if self._target.chat_template is None:
            return [(tokenize(seed, add_special=True), seed, "") for seed in _SEEDS]
        render = self._model.prepare_chat().render
        turn = {"role": "user", "content": _TURN_MARK}
        parts = render([turn], enable_thinking=False).split(_TURN_MARK)
        if len(parts) != 2 or not parts[0]:
            raise InputError(
                f"{self._options.target}: its chat template must write something before the text "
                "of a user, and that text once: else the model cannot write one; take a file with "
                "another template"
            )
        before, after = parts
        found = []
        for system, n in _SYSTEMS:
            first = [{"role": "system", "content": system}] if system else []
            opening = render([*first, turn], False).partition(_TURN_MARK)[0]
            tokens = tokenize(opening, special=True, add_special=False)
            found += [(tokens, before, after)] * n
        return found

    def _asked(self, texts: Texts) -> Iterator[Asked]:  # type: ignore[override]
        """Without an end: given prompts, those that the target wrote, and new ones to write."""
        while True:
            i = self._n_asked
            self._n_asked += self._stride
            rng = random.Random(f"{self._text_seed} {i}")
            if self._teacher and rng.random() < _TAUGHT:
                yield rng.choice(self._teacher)
            elif rng.random() < _GIVEN:
                for tokens in self._tokens([drawn(texts, self._general, rng)]):
                    asked, key = self._ask(tokens, i // self._stride), tuple(tokens)
                    if key in self._greedy:  # it would be the same answer
                        asked = replace(asked, temperature=TEMPERATURES[1])
                    elif not asked.temperature:
                        self._greedy.add(key)
                    yield asked
            elif self._queue:
                prompt, temperature = self._queue.popleft()
                yield Asked(prompt, temperature, self._options.max_tokens)
            else:
                opening = rng.choice(self._openings)[0]
                n = _BASE_TOKENS if self._target.chat_template is None else _PROMPT_TOKENS
                yield Asked(opening, _PROMPT_TEMPERATURE, n, is_prompt=True)

    def _answers(self, trainer: Trainer, asked: Iterator[Any]) -> Generator[Answer]:
        """Beside a trainer on a GPU that has no room for a second process, a thread writes."""
        answers = super()._answers(trainer, asked)
        beside = self._device == "cuda" and not self._plan.by_turns
        return ahead(answers, _MOST_AHEAD) if beside and not self._beside else answers

    def _new(self, answers: Iterator[Answer]) -> Iterator[Answer]:
        if self._beside is None:
            yield from super()._new(answers)
            return
        taken = self._beside.take(self._n_owed, self._keep_on, self._check_stopped)
        self._n_owed += self._n_new
        for n_asked, found in taken:  # file by file, as the ring makes room for each
            self._n_owed -= len(found)
            self._n_asked = max(self._n_asked, n_asked)
            yield from found

    def _ask(self, prompt: list[int], i: int, *, fixed: bool = False) -> Asked:
        return Asked(prompt, TEMPERATURES[i % 2], self._options.max_tokens)

    def _on_prompt(self, text: Text) -> None:
        """A prompt that the target wrote: answered at each temperature, if it is a new one."""
        vocabulary, opening = self._target.vocabulary, text.asked.prompt
        chats = self._target.chat_template is not None
        if chats and not text.has_ended:
            return
        written = text.tokens[len(opening) : -1 if text.has_ended else None]
        words = vocabulary.detokenize(written).strip()
        plain = _plain(words)
        if len(words) < _LEAST_PROMPT or plain in self._known:
            return
        self._known.add(plain)
        _, before, after = next(each for each in self._openings if each[0] == opening)
        if chats:
            prompt = vocabulary.tokenize(before + words + after, special=True, add_special=False)
        else:
            prompt = [*opening, *written]
        if len(prompt) <= self._options.n_ctx // 2:
            self._queue.extend((prompt, temperature) for temperature in TEMPERATURES)

    # The training

    def _make_plan(self, state: Mapping[str, Any]) -> None:
        each = self._spec.n_features * self._dtype.itemsize + _POSITION_BYTES
        file_bytes, unread = _SENT * self._options.n_ctx * each, _PROCESSES + 1
        self._n_files = max(1, min(MOST_FILES, _WAITING_BYTES // file_bytes - unread))
        self._waiting_bytes = (self._n_files + unread) * file_bytes
        super()._make_plan(state)
        self._n_new = math.ceil(self._n_learnt / _USES)
        self._say(_FORECAST)
        free = free_bytes(self._device)
        if free is not None and not self._plan.by_turns:
            self._room = free - self._plan.bytes
            self._write_beside(state.get("n_asked", 0))

    def _train(self, trainer: Trainer, held: list[Answer], texts: Texts) -> None:
        if not trainer.history:  # a run that goes on has the scale in its state
            trainer.scale_taps(held, keep_products=self._options.begin is not None)
        super()._train(trainer, held, texts)

    def _write_beside(self, n_asked: int) -> None:
        """Begin the processes that write, if the GPU has room for one beside the trainer."""
        options, each = self._options, self._cells_bytes()
        own = _BESIDE_BYTES + options.target.stat().st_size
        left = self._room - own
        n = options.n_written or min(_WRITTEN, left // 2 // each)
        if n < _HELD_AT_ONCE or n * each > left:
            return
        many = 1
        if n == _WRITTEN:
            more = (left // 2 - n * each) // (own + n * each)
            many = max(1, min(_PROCESSES, 1 + more, default_threads() // 2))
        self._room -= many * (own + n * each)
        self._answerer.close()
        self._answerer = self._open_answerer(_HELD_AT_ONCE)
        processes = "a process" if many == 1 else f"{many} processes"
        self._say(f"{processes} beside the trainer: {many * n} texts are written at once")
        given = replace(options, n_written=n), self._part, n_asked, many
        self._beside = Beside(
            self._part / "answers", written, *given, n=many, n_files=self._n_files
        )
        self._loaded.callback(self._beside.close)

    def _time_told(self) -> str:
        return f"{self._options.minutes:g} minutes in all, the measurement in the end included"

    def _open_ring(self) -> Ring:
        """On the GPU where it has the room: else each step waits for a copy. Without an end to its
        answers, a run of some hours keeps the latest ones."""
        if self._room // 2 > 2 << 30:
            self._keep_on = self._answerer.keep_on = self._device
            most = self._room // 2
        else:
            most = max(1 << 30, host_memory()[0] // 4)
        self._say(f"the latest answers: up to {size_text(most)} on {self._keep_on}")
        measured = min(_MOST_MEASURED_S, _MEASURED * 60 * self._options.minutes)
        left = 60 * self._options.minutes - (time.monotonic() - self._begun) - measured
        self._limit_s = max(1.0, left)
        return Ring(most)

    def _done(self, trainer: Trainer) -> float:
        return max(trainer.step_number / self._options.steps, self._spent_s / self._limit_s)

    def _keep(self, trainer: Trainer) -> None:
        """The state, and the best weights as a checkpoint that another machine can go on from."""
        super()._keep(trainer)
        weights, folder = trainer.weights(best=True), self._options.draft.parent
        names = set(filter(is_trained, weights))
        save_checkpoint(self._part, folder, weights, names, self._options.target)

    def _finish(self, card: Card) -> None:
        shutil.rmtree(self._options.draft.parent)
        super()._finish(card)


def written(
    options: TrainOptions, part: Path, n_asked: int, many: int, i: int
) -> Iterator[tuple[int, list[Answer]]]:
    """The answers that process `i` of `many` beside the trainer writes, from prompt `n_asked`
    on."""
    with errors_told(options), ExitStack() as stack:
        run = NewRun(options, part, lambda _: None, None, None, None, stack)
        run._n_asked, run._stride = n_asked + i, many
        run._load()
        texts, _ = run._prompts()
        answers = run._answerer.answers(run._asked(texts))
        while found := list(islice(answers, _SENT)):
            yield run._n_asked, found


def ahead(items: Generator[T], n: int) -> Generator[T]:
    """The same items, up to `n` of them made ahead by a thread, which ends when this is closed. Its
    errors are raised here."""
    pool = ThreadPoolExecutor(1, "answers")
    made = deque(pool.submit(next, items, None) for _ in range(n))
    try:
        while (item := made.popleft().result()) is not None:
            made.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)
        items.close()


def _answered(path: Path) -> list[BenchPrompt]:
    """Prompts and their answers. Raises InputError."""

    def parse(raw: Any, _: int) -> list[BenchPrompt]:
        return [replace(prompt_of(raw), answer=text_of(raw, "answer"))]

    found = [prompt for line in read_lines(path, parse) for prompt in line]
    if not found:
        raise InputError(f"{path}: no answers; expected lines with prompt or messages, and answer")
    return found


def _said(message: Mapping[str, Any]) -> str:
    """The text of a message, whole or of its parts; "" if it has none."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(part.get("text") or "" for part in content)


def _plain(text: str) -> str:
    """The key by which two prompts are the same one."""
    return " ".join(text.lower().split())[:80]
