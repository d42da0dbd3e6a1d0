"""One run from beginning to end: answers of the target, steps, files, measurement, default."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dflash_local.bench.prompts.case import tokenized
from dflash_local.bench.prompts.prompt import BenchPrompt, built_in
from dflash_local.draft.drafter import Drafter
from dflash_local.errors import DflashError, InputError
from dflash_local.fit.footprint import size_text
from dflash_local.fit.options import LoadOptions, Scaled
from dflash_local.gguf.drafter_spec import DrafterSpec
from dflash_local.gguf.file import GgufFile, file_key
from dflash_local.loading import open_drafter, open_engine
from dflash_local.model import Model
from dflash_local.pair import open_pair
from dflash_local.pairs import tuned
from dflash_local.pairs.defaults import defaults_of
from dflash_local.sampling.params import SamplingParams
from dflash_local_tune.answers import Answer, Answerer, Ring
from dflash_local_tune.card import Card
from dflash_local_tune.comparison import BUILT_IN, OWN, beats_plain, compare, wins
from dflash_local_tune.plan import TunePlan, answer_bytes, free_bytes
from dflash_local_tune.saving import checkpoint_weights, save_checkpoint, save_gguf
from dflash_local_tune.state import (
    SETTINGS,
    STATE,
    alone,
    claim,
    first_line,
    read_state,
    state_told,
    write_state,
)
from dflash_local_tune.texts import Form, Texts, drawn, general, read_texts
from dflash_local_tune.training import CPU_ANCHORS, N_ANCHORS, RATE, WARM_UP, Trainer, is_trained
from dflash_local_tune.weights import dequantize, read_torch_drafter

Say = Callable[[str], None]

_BATCH = 4
"""Answers of a step, at least: the newest, and some of the ring. More where one pass takes more."""
_AHEAD = 8
"""Answers before the first step, so that no step sees one text alone."""
_RING_BYTES = 2 << 30
_WATCHED, _COMPARED = 24, 24
"""On a GPU: answers to held-out prompts that are watched during the training, and prompts of each
kind that are compared in the end. A CPU takes a third of them, as it is so much slower."""
_SAVE_S = 600.0
_PAUSE_S = 0.5
_TURN = 128
"""Answers of a turn, where target and trainer take turns: loading both again takes some seconds."""


@dataclass(frozen=True)
class TuneOptions:
    """The settings of `tune`. `data`: the user's texts, or None for general ones. `name`: a
    server's name for the target, if not its file's. `source`: the name of the drafter to begin
    with, if not its path; the tuned one is used where that one would have been. `checkpoint`: the
    folder that `draft` was converted from, if there is one. `minutes` and `steps` limit the
    training, whichever comes first. `n_ctx`: tokens of a prompt and its answer together; longer
    prompts are left out. `lora` and `control_vectors` as for `load`: with them, the drafter learns
    the adapted target, and becomes no default."""

    target: Path
    draft: Path
    data: Path | None
    output: Path
    name: str | None = None
    source: str | None = None
    checkpoint: Path | None = None
    minutes: float = 60.0
    steps: int = 10000
    n_ctx: int = 2048
    max_tokens: int = 256
    n_seq: int | None = None
    n_gpu_layers: int | None = None
    n_threads: int | None = None
    lora: Sequence[Scaled] = ()
    control_vectors: Sequence[Scaled] = ()
    seed: int = 0

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that must be unchanged for a run to go on."""
        return self.target, self.draft


@dataclass(frozen=True)
class Progress:
    """The progress of the training: `done`, 0 to 1, and the tokens per round on held-out answers
    before and now. `n_tokens`: those of the target's answers so far, in `answers_s` seconds, since
    the run began or went on. `loss`, []: of the last step, on the trainer's device."""

    step: int
    done: float
    seconds_left: float
    length_before: float
    length: float
    n_tokens: int
    answers_s: float
    loss: torch.Tensor


class Interrupted(Exception):
    """The run was asked to stop; its state is kept."""


def tune(
    options: TuneOptions,
    *,
    say: Say,
    progress: Callable[[Progress], None] | None = None,
    stopped: Callable[[], bool] | None = None,
    busy: Callable[[], bool] | None = None,
    kind: type[Run] | None = None,
) -> Card:
    """Tune a drafter into the folder `options.output`, which appears at the end, whole.

    `stopped` is asked often; when it says so, the state is kept beside the output, and the same
    call goes on from there: Interrupted is raised. While `busy` says so, the machine is left to
    others. Raises InputError for files that cannot be read, written or do not fit, and as `load`;
    then everything is as it was. `kind`: another kind of run than one that begins with a drafter.
    """
    if os.path.lexists(options.output):  # a link to nowhere is in the way, too
        raise InputError(f"{options.output}: exists already; choose another folder with -o")
    _texts(options, ("continue",))  # what is wrong is told at once
    general(("continue",))
    part = options.output.with_name(f"{options.output.name}.partial")
    resumed = claim(part, _settings(options))
    with alone(part):
        try:
            with errors_told(options), ExitStack() as stack:
                return (kind or Run)(options, part, say, progress, stopped, busy, stack).run()
        except Interrupted:
            raise
        except BaseException:
            if not resumed and not (part / STATE).exists():
                shutil.rmtree(part, ignore_errors=True)
            raise


def _texts(options: TuneOptions, forms: Sequence[Form]) -> Texts:
    if options.data is None:
        return general(forms, seed=options.seed)
    names = [name for name in (options.name, options.target.stem) if name]
    return read_texts(options.data, forms, names=names, seed=options.seed)


def _settings(options: TuneOptions) -> dict[str, Any]:
    """The settings that must be equal for a run to go on. Its limits may change."""
    values = {name: str(value) for name, value in asdict(options).items()}
    for name in ("minutes", "steps", "n_threads", "output"):
        del values[name]
    return values | {"files": [file_key(path) for path in options.files]}


class Run:
    _rate = RATE
    _warm_up = WARM_UP
    _n_new = 1
    """Answers that come before each step but the first."""
    _save_s = _SAVE_S
    _ends_early = True
    """Whether it ends once held-out answers gain nothing more."""
    _from_nothing = False
    """Whether the drafter began with random weights: it has a recipe of its own."""
    _waiting_bytes = 0
    """Of files with answers that wait for the trainer, at most."""
    _measured_every = 50
    _n_compared = _COMPARED
    _general: Texts | None = None
    _n_asked = _n_tokens = 0
    _spent_s = _waited_s = _answers_s = 0.0

    def __init__(
        self,
        options: TuneOptions,
        part: Path,
        say: Say,
        progress: Callable[[Progress], None] | None,
        stopped: Callable[[], bool] | None,
        busy: Callable[[], bool] | None,
        stack: ExitStack,
    ) -> None:
        self._options = options
        self._part = part
        self._say = say
        self._progress = progress or (lambda _: None)
        self._stopped = stopped or (lambda: False)
        self._busy = busy or (lambda: False)
        self._loaded = stack.enter_context(ExitStack())
        self._target_file = GgufFile.open(options.target)
        self._draft_file = GgufFile.open(options.draft)
        on_gpu = torch.cuda.is_available() and options.n_gpu_layers != 0
        self._device = "cuda" if on_gpu else "cpu"
        self._dtype = torch.bfloat16 if on_gpu else torch.float32
        if on_gpu:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # idle ones spin, and steps wait for the core of this one
        self._n_seq = options.n_seq or (8 if on_gpu else 4)
        self._n_batch = LoadOptions.n_batch
        self._n_anchors = N_ANCHORS if on_gpu else CPU_ANCHORS
        self._n_owed = _AHEAD
        """Answers that come before the next step."""
        self._before: Path | None = options.draft
        """The rival of the new drafter; None: plain decoding."""

    def run(self) -> Card:
        place = self._part / STATE
        state = read_state(place) if place.exists() else {}  # first, as it may be damaged
        self._load(self._say)
        texts, cases = self._prompts()
        self._make_plan(state)
        held = self._held_answers(cases["watch"])
        if self._plan.by_turns:
            self._unload()
        trainer = self._open_trainer()
        if state:
            self._resume(trainer, state)
        self._train(trainer, held, texts)
        trainer.use_best()
        weights, n_steps, history = trainer.weights(), trainer.step_number, trainer.history
        kind = "low-rank additions to all matrices" if trainer.low_rank else "all weights"
        best = trainer.best.step
        del trainer
        torch.cuda.empty_cache()
        path = self._save(weights)
        # Loaded again, as users load it: with trees where they are drafted by default.
        if not self._plan.by_turns:
            self._unload()
        self._load(draft_shape=None)
        rows = self._compare(path, {OWN: cases["test"], BUILT_IN: cases["built-in"]})
        won, reason = wins(rows) if self._before else beats_plain(rows)
        options = self._options
        card = Card(
            target=options.target,
            before=self._before,
            after=options.output / path.name,
            data=options.data,
            n_prompts=len(texts.tune),
            n_held_out=len(texts.watch) + len(texts.test),
            n_asked=self._n_asked,
            n_tokens=self._n_tokens,
            n_steps=n_steps,
            best_step=best,
            seconds=self._spent_s,
            trained=kind,
            lengths=[(each.step, each.length) for each in history],
            rows=rows,
            won=won,
            is_default=won and not (options.lora or options.control_vectors),
            reason=reason,
        )
        self._finish(card)
        return card

    # Before the training

    def _load(self, say: Say = lambda _: None, draft_shape: str | None = "chain") -> None:
        options = self._options
        pair = open_pair(options.target, options.draft)
        if not isinstance(pair.spec, DrafterSpec):
            raise InputError(f"{options.draft}: a language model, no DFlash drafter to be tuned")
        loading = LoadOptions(
            n_ctx=self._n_seq * options.n_ctx,
            n_seq=self._n_seq,
            n_gpu_layers=options.n_gpu_layers,
            n_threads=options.n_threads,
            lora=options.lora,
            control_vectors=options.control_vectors,
            draft_shape=draft_shape,
            draft_width=2,
            n_batch=self._n_batch,
        )
        engine, plan = open_engine(pair, loading, say=say)
        self._model = self._loaded.enter_context(Model(engine, plan))
        self._target = engine.target
        if engine.drafter is None:
            raise InputError(f"{options.target}: cannot be drafted for: {engine.plain_because}")
        self._drafter, self._spec = engine.drafter, pair.spec
        known = defaults_of(self._target_file, self._draft_file).sampling
        self._samplings = [SamplingParams(), SamplingParams(temperature=0.8)]
        if known:
            self._samplings = [SamplingParams(**dict(known))]  # type: ignore[arg-type]
        self._answerer = self._open_answerer()

    def _open_answerer(self) -> Answerer:
        n = self._options.max_tokens
        return Answerer(self._target, self._drafter, self._n_seq, n, self._dtype)

    def _prompts(self) -> tuple[Texts, dict[str, list[list[int]]]]:
        """The texts, and all prompts as the model reads them, by their use."""
        forms: list[Form] = ["continue"]
        if self._target.vocabulary.infill is not None:
            forms.append("infill")
        if self._target.chat_template is not None:
            forms.append("chat")
        texts = self._read_texts(forms)
        if self._options.data is not None:
            self._general = general(forms, seed=self._options.seed)
        parts = {
            "tune": texts.tune,
            "watch": texts.watch[:_WATCHED],
            "test": texts.test[: self._part_of(self._n_compared)],
            "built-in": built_in(
                ("chat", "code", "fim"), limit=self._part_of(self._n_compared) // 3
            ),
        }
        cases = {name: self._tokens(prompts) for name, prompts in parts.items()}
        for name in ("tune", "watch", "test"):
            if not cases[name]:
                raise InputError(
                    f"{self._options.data or 'general texts'}: no prompt is left that fits "
                    f"{self._options.n_ctx} tokens with its answer; set --ctx higher"
                )
        left_out = len(texts.tune) - len(cases["tune"])
        more = f", {left_out} too long and left out" if left_out else ""
        self._say(
            f"prompts: {len(cases['tune'])} to learn from{more}; held out "
            f"{len(texts.watch) + len(texts.test)}"
        )
        return texts, cases

    def _read_texts(self, forms: Sequence[Form]) -> Texts:
        return _texts(self._options, forms)

    def _part_of(self, n: int) -> int:
        return n if self._device == "cuda" else n // 3

    def _tokens(self, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
        room = self._model.n_ctx - self._options.n_ctx + self._options.max_tokens
        cases, _ = tokenized(self._model, prompts, room=room)
        return [case.tokens for case in cases]

    def _unload(self) -> None:
        """Free the models that `_load` loaded."""
        self._answerer.pause()
        self._loaded.close()

    def _make_plan(self, state: Mapping[str, Any]) -> None:
        options = self._options
        free = free_bytes(self._device)
        each = answer_bytes(self._spec, options.n_ctx, self._n_anchors)
        self._plan = plan = TunePlan.of(
            self._draft_file,
            state,
            free,
            each,
            from_nothing=self._from_nothing,
            waiting_bytes=self._waiting_bytes,
        )
        for line in plan.lines(free):
            self._say(line)
        needed, stay = plan.disk_bytes, (3 if options.checkpoint else 1) * plan.n_weights
        room = shutil.disk_usage(self._part).free
        self._say(f"disk: {size_text(needed)} during the run, {size_text(stay)} of it stay")
        self._say(f"time: at most {self._time_told()}, or {options.steps} steps")
        if room < needed:
            raise InputError(
                f"{self._part}: {size_text(needed)} are needed there, and {size_text(room)} are "
                "free; choose another folder with -o"
            )

    def _time_told(self) -> str:
        return f"{self._options.minutes:g} minutes of training"

    def _open_trainer(self) -> Trainer:
        options, low_rank = self._options, self._plan.low_rank
        drafter = read_torch_drafter(
            options.draft,
            options.target,
            dtype=self._dtype if low_rank else torch.float32,
            head_dtype=self._dtype,
            device=self._device,
        )
        if options.checkpoint is not None:
            for name, value in checkpoint_weights(options.checkpoint, options.target).items():
                if is_trained(name):
                    old = drafter.weights[name]
                    drafter.weights[name] = value.to(old.device, old.dtype)
        return Trainer(
            drafter,
            low_rank=low_rank,
            n_packed=self._plan.n_packed,
            rate=self._rate,
            n_anchors=self._n_anchors,
            warm_up=self._warm_up,
            n_ctx=options.n_ctx,
            seed=options.seed,
            from_nothing=self._from_nothing,
        )

    def _held_answers(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """Answers to watch the training by: the same ones in every run."""
        n, many = self._part_of(_WATCHED), len(prompts)
        self._say(f"{n} answers to held-out prompts")
        asked = iter([self._ask(prompts[i % many], i + i // many, fixed=True) for i in range(n)])
        held = []
        for answer in self._answerer.answers(asked):
            self._check_stopped()
            self._wait_for_others()
            held.append(answer)
        if not held:
            raise InputError("the answers to the held-out prompts are too short to learn from")
        return held

    # The training

    def _train(self, trainer: Trainer, held: list[Answer], texts: Texts) -> None:
        options = self._options
        if not trainer.history:
            trainer.measure(held)
        before = trainer.history[0].length
        self._say(f"held-out answers: {before:.2f} tokens per round before")
        every = max(5, min(self._measured_every, options.steps // 10))
        with closing(self._answers(trainer, self._asked(texts))) as answers:
            try:
                self._steps(trainer, held, answers, every)
            except Interrupted:
                self._keep(trainer)
                raise
        if trainer.step_number % every:
            trainer.measure(held)
        self._keep(trainer)  # what follows may fail, or be interrupted
        found = trainer.best
        self._say(
            f"held-out answers: {before:.2f} tokens per round before, {found.length:.2f} after "
            f"{found.step} of {trainer.step_number} steps"
        )

    def _steps(
        self, trainer: Trainer, held: list[Answer], answers: Iterator[Answer], every: int
    ) -> None:
        """Steps to the end of the training, with a measurement after so many."""
        ring, rng = self._open_ring(), random.Random(f"{self._options.seed} {trainer.step_number}")
        begun, spent = time.monotonic(), self._spent_s + self._waited_s
        saved = begun
        while (done := self._done(trainer)) < 1:
            if self._ends_early and trainer.is_flat(done):
                break
            asked_at, n_new = time.monotonic(), 0
            for answer in self._new(answers):
                self._n_tokens += len(answer.tokens) - answer.n_prompt
                ring.add(answer)
                n_new += 1
                self._check_stopped()  # the others may take minutes
            self._answers_s += time.monotonic() - asked_at
            batch = ring.batch(n_new, self._n_learnt, rng)
            loss = trainer.step(batch, self._done(trainer))
            now = time.monotonic()
            self._spent_s = spent + now - begun - self._waited_s
            self._wait_for_others()
            if trainer.step_number % every == 0:
                trainer.measure(held)
            self._progress(self._state_of(trainer, loss))
            if now - saved > self._save_s:
                self._keep(trainer)
                saved = now
            self._check_stopped()

    @property
    def _n_learnt(self) -> int:
        """Answers of a step, at most."""
        return max(_BATCH, self._plan.n_packed)

    def _open_ring(self) -> Ring:
        return Ring(_RING_BYTES)

    def _new(self, answers: Iterator[Answer]) -> Iterator[Answer]:
        """Those that come before the next step."""
        n, self._n_owed = self._n_owed, self._n_new
        return islice(answers, n)

    def _answers(
        self, trainer: Trainer, asked: Iterator[tuple[list[int], SamplingParams]]
    ) -> Generator[Answer]:
        """Answers without an end, from a target beside the trainer, or by turns with it."""
        while not self._plan.by_turns:
            yield from self._answerer.answers(asked)
        while True:
            trainer.move("cpu")
            torch.cuda.empty_cache()
            self._load()
            turn = Ring(_RING_BYTES)
            for answer in self._answerer.answers(asked):
                turn.add(answer)
                self._check_stopped()
                self._wait_for_others()
                if len(turn) == _TURN or turn.n_bytes > _RING_BYTES // 2:
                    break
            self._unload()
            trainer.move(self._device)
            yield from turn

    def _asked(self, texts: Texts) -> Iterator[tuple[list[int], SamplingParams]]:
        """Prompts without an end: the user's own and general ones."""
        while True:
            i = self._n_asked
            self._n_asked += 1
            rng = random.Random(f"{self._options.seed} {i}")
            for tokens in self._tokens([drawn(texts, self._general, rng)]):  # none if too long
                yield self._ask(tokens, i)

    def _ask(self, prompt: list[int], i: int, *, fixed: bool = False) -> Any:
        """A prompt with its sampling, as the answerer takes it: as people use the pair; where
        nothing is known, greedy and at 0.8 by turns."""
        seed = (1 << 30) + i if fixed else i
        return prompt, replace(self._samplings[i % len(self._samplings)], seed=seed)

    def _done(self, trainer: Trainer) -> float:
        by_time = self._spent_s / (60 * self._options.minutes)
        return max(trainer.step_number / self._options.steps, by_time)

    def _wait_for_others(self) -> None:
        """Leave the machine to others while they need it."""
        begun = time.monotonic()
        while self._busy() and not self._stopped():
            time.sleep(_PAUSE_S)
        self._waited_s += time.monotonic() - begun

    def _state_of(self, trainer: Trainer, loss: torch.Tensor) -> Progress:
        done = min(1.0, self._done(trainer))
        left = self._spent_s * (1 - done) / done if done else 0.0
        return Progress(
            trainer.step_number,
            done,
            left,
            trainer.history[0].length,
            trainer.history[-1].length,
            self._n_tokens,
            self._answers_s,
            loss,
        )

    def _say_unless_stopped(self, line: str) -> None:
        self._check_stopped()
        self._say(line)

    def _check_stopped(self) -> None:
        if self._stopped():
            raise Interrupted

    def _keep(self, trainer: Trainer) -> None:
        """Keep the state, completely or not at all."""
        state = trainer.state() | {
            "n_asked": self._n_asked,
            "n_tokens": self._n_tokens,
            "seconds": self._spent_s,
        }
        write_state(state, self._part / STATE)

    def _resume(self, trainer: Trainer, state: dict[str, Any]) -> None:
        with state_told(self._part / STATE):
            trainer.restore(state)
            self._n_asked, self._spent_s = state["n_asked"], state["seconds"]
            self._n_tokens = state["n_tokens"]
        self._say(f"going on after step {trainer.step_number}")

    # After the training

    def _save(self, weights: dict[str, torch.Tensor]) -> Path:
        options = self._options
        own = set(self._draft_file.tensors)
        for name in own - weights.keys():  # embeddings of its own
            weights[name] = dequantize(self._draft_file, name, torch.float32, "cpu")
        weights = {name: weights[name] for name in self._draft_file.tensors}
        path = self._part / f"{options.output.name}.gguf"
        save_gguf(path, self._draft_file, weights, self._target_file)
        if options.checkpoint is not None:
            trained = set(filter(is_trained, weights))
            save_checkpoint(self._part, options.checkpoint, weights, trained, options.target)
        return path

    def _compare(self, path: Path, prompts: dict[str, list[list[int]]]) -> Any:
        self._answerer.pause()
        self._model.forget()
        after = self._opened_as_before(path)
        n = min(self._options.max_tokens, 128)
        before = self._drafter if self._before else None
        rows = compare(self._target, before, after, prompts, n, self._say_unless_stopped)
        after.close()
        return rows

    def _opened_as_before(self, path: Path) -> Drafter:
        """The tuned drafter with all that the old one was opened with: else the two are no
        comparison."""
        window = self._model.plan.draft_window if self._model.plan else 0
        return open_drafter(
            path,
            self._target,
            n_seq=self._n_seq,
            n_ctx=self._target.n_ctx,
            draft_window=window,
            for_trees=self._target.options.n_branches > 1,
        )

    def _finish(self, card: Card) -> None:
        if card.is_default:
            tuned.tuned_drafter(self._options.target)  # a damaged list is told before the card is
        place = self._part / "README.md"
        place.write_text(card.markdown(), encoding="utf-8", errors="replace")  # names of files
        text = json.dumps(card.as_dict(), indent=1)
        (self._part / "tune.json").write_text(text + "\n", encoding="utf-8")
        options = self._options
        try:
            os.rename(self._part, options.output)
        except OSError as error:
            raise InputError(
                f"{options.output}: cannot be written: {error.strerror}; once nothing is there, "
                "the same command goes on"
            ) from None
        for name in (STATE, SETTINGS):  # not before, or nothing could go on
            (options.output / name).unlink(missing_ok=True)
        if card.is_default:
            source = options.source or str(options.draft.resolve())
            tuned.make_default(options.target, card.after, source)


@contextmanager
def errors_told(options: TuneOptions) -> Iterator[None]:
    """Raise errors of PyTorch and safetensors as InputError with advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"the GPU has too little memory: {first_line(error)}; end other programs on it, or "
            f"set --ctx lower than {options.n_ctx}"
        ) from None
    except RuntimeError as error:
        if isinstance(error, DflashError) or not _is_of_torch(error):
            raise
        raise InputError(
            f"PyTorch failed: {first_line(error)}; see what else uses the device and its memory, "
            "then repeat the command"
        ) from None
    except SafetensorError as error:
        raise InputError(
            f"the safetensors of {options.checkpoint or options.output} cannot be read or written: "
            f"{first_line(error)}; check the files and the room on the disk"
        ) from None


def _is_of_torch(error: BaseException) -> bool:
    """Whether PyTorch raised it. Its C++ has no frames, so the last one may be that of our call."""
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(("torch.", "dflash_local_tune."))
