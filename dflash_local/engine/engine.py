"""Takes requests into slots and runs their rounds to the end. It knows only token ids."""

import time
from contextlib import ExitStack
from dataclasses import replace

from dflash_local.controller.controller import Controller, Policy
from dflash_local.copies.chances import CopyPrior
from dflash_local.copies.copier import Copier
from dflash_local.copies.earlier import MOST_TOKENS, EarlierTexts
from dflash_local.draft.drafter import Drafter
from dflash_local.draft.shape import Chain, DraftShape, Shape, Tree
from dflash_local.engine.meter import Meter
from dflash_local.engine.prefill import Prefill
from dflash_local.engine.prefix_cache import PrefixCache
from dflash_local.engine.request import Request
from dflash_local.engine.round import Round
from dflash_local.engine.sequence import Sequence
from dflash_local.engine.slots import Slot, Slots
from dflash_local.fit.options import MAX_OUTPUT_ROWS
from dflash_local.prefixes.files import SlotFiles
from dflash_local.prefixes.prefix import Wanted
from dflash_local.prefixes.store import PrefixStore
from dflash_local.sampling.grammar import Grammars
from dflash_local.sampling.sampler import Sampler
from dflash_local.stats import Stats
from dflash_local.target_model.images import without_images
from dflash_local.target_model.target import Target

_TREE_ROWS = 32


class Engine:
    """Slots of a target and, if there is one, a drafter. One thread owns it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        n_seq: int = 1,
        controller: Controller | None = None,
        *,
        store: PrefixStore | None = None,
        exact: bool = False,
        copies: CopyPrior | None = None,
        learns: bool = True,
    ) -> None:
        """`controller` decides for requests of width "auto"; without one they decode plainly.
        `store` keeps prefixes that leave their slots. `exact`: answers reuse only rows of earlier
        requests that they would compute to the same bits. `copies`: the record of drafts from a
        text's own repetitions; None: there are none. `learns`: whether its records of drafts and
        costs are kept for later loads."""
        self.target = target
        self.drafter = drafter
        self.copies = copies
        self.offers_copies = True
        """Whether requests that begin now get copies. `bench` measures their gain."""
        self.learns = learns
        self.exact = exact
        self.slots = Slots(target, drafter, n_seq, least=target.n_batch if exact else 1)
        self.prefix_cache = PrefixCache(self.slots, store or PrefixStore(0))
        self.slot_files: SlotFiles | None = None
        """The slots that users save under names of their own."""
        self.grammars = Grammars(target.vocabulary)
        self.usual_shape: DraftShape = "chain"
        """The draft shape of requests that name none."""
        self.copy_from: list[int] = []
        """Text that all answers may copy from, besides their own."""
        self.earlier = EarlierTexts()
        """Texts that answers to the same owner may copy from."""
        self.plain_because: str | None = None
        """One line on why there is no drafter although one was named: all requests are decoded
        plainly then. Else None."""
        on_gpu = target.options.n_gpu_layers != 0
        self._chain = Chain(max(self.max_width - 1, 0), few_counts=on_gpu)
        self._tree: Tree | None = None
        if self.takes_trees:
            n_branches = target.options.n_branches
            self._tree = Tree(most_nodes(n_branches, self.max_width), n_branches)
        self._n_steps = 0
        self._scales: tuple[float, ...] | None = None  # of the adapters in the last step
        self._round_s = 0.0
        self.meter = Meter(self.slots)
        self.control(controller)

    def control(self, controller: Controller | None) -> None:
        """Let `controller` decide from now on. Call it before the first request."""
        self.controller = controller if self.drafter or self.copies else None
        self.meter.controller = self.controller
        self._round = Round(self.slots, self.prefix_cache, self.meter)
        self._prefill = Prefill(self.slots, self.prefix_cache, self._round)

    def decode_plainly(self, why: str) -> None:
        """Do without drafts from now on; `why` is one line. Call it before the first request."""
        if self.drafter is not None:
            self.drafter.close()
        self.drafter = self.slots.drafter = self.copies = None
        self.plain_because = why
        self.control(None)

    @property
    def max_width(self) -> int:
        """The widest verify pass of chains: the drafter's block, as far as the target can take it
        back. Without a drafter it is that of copies; 0 without these, too."""
        if self.drafter:
            return min(self.drafter.block_size, self.target.max_width)
        return self.target.max_width if self.copies else 0

    def widest(self, shape: DraftShape) -> int:
        """The widest verify pass for drafts of that shape."""
        return MAX_OUTPUT_ROWS if self.takes_trees and shape != "chain" else self.max_width

    def limit(self, shape: DraftShape) -> str:
        """The limit that sets `widest`, in words."""
        if self.takes_trees and shape != "chain":
            return "a draft tree"
        most = self.drafter.block_size if self.drafter else MAX_OUTPUT_ROWS
        if self.max_width < most and self.target.way_back.kind == "snapshots":
            return "the room for snapshots of the target's recurrent state"
        if self.max_width < most and self.target.is_recurrent:
            return "what a batch can take out of the target's recurrent state"
        return "this drafter's block" if self.drafter else "a verify pass"

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may be trees: the target was loaded with branches."""
        drafts = self.drafter is not None or self.copies is not None
        return drafts and self.target.options.n_branches > 1

    @property
    def chains_because(self) -> str | None:
        """One line on why all drafts are chains, whatever requests ask for. None if trees are
        possible, and None without a drafter."""
        if self.drafter is None or self.takes_trees:
            return None
        if self.target.is_recurrent:
            return "drafts are chains: the target has recurrent layers, which know no branches"
        if not self.drafter.gives_candidates:
            return "drafts are chains: this drafter gives only one token for each position"
        return (
            "drafts are chains: the model was loaded for chains, or for so many slots that "
            "llama.cpp has too few sequence ids for trees"
        )

    def check(self, request: Request) -> None:
        """Raises InputError or ContextFullError for a request that cannot begin."""
        shape, target = request.draft_shape, self.target
        most = MAX_OUTPUT_ROWS if self.plain_because else self.widest(shape)
        request.check(target.n_vocab, target.n_ctx, most, self.limit(shape))

    # A sequence's life

    def begin(self, request: Request) -> Sequence:
        """Take a free slot, if possible one whose caches have the beginning of the prompt.

        Raises as `check` and `Sampler`, and InputError when no slot is free.
        """
        begun_at = time.perf_counter()
        self.meter.tell()
        self.check(request)
        reason = self.plain_because if request.drafts else None
        if reason:
            request = replace(request, draft_width=0)
        sampler = Sampler(
            request.sampling,
            self.target.n_vocab,
            n_ctx=self.target.n_ctx,
            constraint=request.constraint or self.grammars.constraint(request.sampling),
            vocabulary=self.target.vocabulary,
        )
        sampler.accept_prompt(without_images(request.prompt))
        shapes = self._shapes(request.draft_shape)
        policy = None
        if self.controller is not None and request.draft_width == "auto":
            policy = self.controller.open(
                self.slots.depth, greedy=request.sampling.greedy, shapes=shapes
            )
        slot = self._take(request, request.prompt, policy)
        stats = Stats(prompt_tokens=request.n_cells, cached_tokens=self.slots.n_cells(slot))
        stats.drafting = reason
        stats.drafter = self.drafter.name if self.drafter else None
        return Sequence(
            request,
            slot,
            sampler,
            stats,
            shapes[-1],
            policy,
            self._copier(request),
            last_prefill_step=self._n_steps,
            begun_at=begun_at,
        )

    def _copier(self, request: Request) -> Copier | None:
        if self.copies is None or not (self.offers_copies and request.drafts):
            return None
        # An exact answer uses nothing of earlier requests.
        earlier = [] if self.exact else self.earlier.of(request.owner)
        prior = self.copies.of(greedy=request.sampling.greedy)
        return Copier(prior, self.copy_from, earlier)

    def _shapes(self, wanted: DraftShape) -> list[Shape]:
        """The shapes that a request's drafts may have. At a fixed width it is the last one."""
        if self._tree is None or wanted == "chain":
            return [self._chain]
        return [self._tree] if wanted == "tree" else [self._chain, self._tree]

    def is_at_hand(self, request: Request, text: list[int]) -> bool:
        """Whether a sequence with this text can begin without waiting for a prefix on disk. If not,
        a thread reads it: ask again."""
        return self.prefix_cache.is_at_hand(self._wanted(request, text), request.id_slot)

    def _wanted(self, request: Request, text: list[int]) -> Wanted:
        """The beginning of a text that may be taken from caches."""
        controller = self.controller if request.draft_width == "auto" else None
        # If drafting does not pay, a prompt is not decoded again only to try it once more.
        may_draft = controller is None or controller.may_draft
        return Wanted(
            list(text if request.cache_prompt else text[:1]),
            request.drafts and may_draft and self.slots.drafter is not None,
            unless_gave_up=controller is not None,
            owner=self._cache_owner(request),
        )

    def _take(self, request: Request, text: list[int], policy: Policy | None) -> Slot:
        self.slots.try_drafter_again()
        slot, n_cached = self.prefix_cache.take(self._wanted(request, text), request.id_slot)
        drafter = self.slots.drafter
        if policy is not None and drafter is not None:
            policy.off = policy.off or drafter.length(slot.seq) < n_cached
        return slot

    def _lora(self, request: Request) -> tuple[float, ...]:
        return self.target.usual_lora if request.lora is None else request.lora

    def _cache_owner(self, request: Request) -> str:
        """The owner of the prefixes it may use: its own, if computed with the same adapters."""
        scales = self._lora(request)
        return f"{request.owner or ''}\0{scales}" if scales else request.owner or ""

    @staticmethod
    def owner_of(slot: Slot) -> str:
        """The owner of a slot's text, with any adapters; "" for none in particular."""
        return slot.owner.partition("\0")[0]

    def end(self, sequence: Sequence) -> None:
        """Give the slot back, with both caches at the same token. Safe to call again."""
        self.meter.tell()
        sequence.sampler.close()
        if sequence.finish_reason is None:
            sequence.finish_reason = "cancelled"
        if sequence.policy is not None:
            sequence.stats.drafting = sequence.policy.reason
            sequence.stats.warning = sequence.policy.warning
        request, chains = sequence.request, self.chains_because
        slots = self.slots
        if request.drafts and (
            sequence.drafter_lost_text or (self.drafter and slots.drafter is None)
        ):
            sequence.stats.warning = f"drafting is off for a while: {slots.failure}"
        if chains and request.drafts and request.draft_shape == "tree":
            parts = sequence.stats.drafting, chains
            sequence.stats.drafting = "; ".join(part for part in parts if part)
        self.suspend(sequence)
        copier, sequence.copier = sequence.copier, None
        is_short = len(request.prompt) + len(sequence.tokens) <= MOST_TOKENS
        if copier is not None and request.owner is not None and is_short:
            text = copier.ended(request.spoken, sequence.tokens)
            if text is not None:
                self.earlier.keep(request.owner, text)

    def suspend(self, sequence: Sequence) -> None:
        """Give the slot back for now; the answer is kept."""
        if not sequence.has_slot:
            return
        self.meter.tell()
        sequence.has_slot = False
        policy = sequence.policy
        gave_up = policy is not None and (policy.off or policy.nearly_off)
        self.prefix_cache.give_back(sequence.slot, gave_up=gave_up)
        if self.exact:
            # Rows of answers are computed in passes of other widths than those of a prompt.
            n = min(len(sequence.request.prompt), sequence.slot.n_read)
            n = min(n, sequence.n_kept) if sequence.n_left_out else n
            self.slots.roll_back(sequence.slot, n, for_drafts=False)

    def resume(self, sequence: Sequence) -> None:
        """Give a suspended sequence a free slot. The part of its text that the caches have lost is
        decoded again like a prompt. Raises InputError if no slot is free."""
        sequence.slot = self._take(sequence.request, sequence.text, sequence.policy)
        sequence.has_slot, sequence.drafter_lost_text = True, False
        sequence.last_prefill_step = self._n_steps

    # Steps of all sequences

    def has_room(self, sequences: list[Sequence]) -> bool:
        """Whether there are enough cells for the next token of each sequence.

        Each needs the rest of its prompt, or a cell for its anchor. Empties free slots if needed.
        A sequence with cells of its own takes none from others.
        """
        n = sum(sequence.n_cells_left or 1 for sequence in sequences)
        self.prefix_cache.make_room(n)
        return self.slots.free_cells >= n or self.target.options.has_streams

    def step(self, sequences: list[Sequence]) -> None:
        """One chunk of the prompts that are not yet decoded, then one round of the others.

        Sequences whose adapters act in unlike ways take turns, a step for each group: one may use
        all free cells, so `has_room` is to be asked before the next.

        An exception in one sequence's sampler or `on_token` ends that sequence alone and becomes
        its `error`. Any other exception is raised, ends all sequences and empties their caches.
        """
        try:
            for sequence in sequences:
                if sequence.cancelled.is_set() and sequence.finish_reason is None:
                    sequence.finish_reason = "cancelled"
            unfinished = [s for s in sequences if s.finish_reason is None]
            groups = list({self._lora(s.request): None for s in unfinished})
            if groups:
                before = groups.index(self._scales) if self._scales in groups else -1
                self._scales = scales = groups[(before + 1) % len(groups)]
                self.target.adapt(scales)
                self._step_of([s for s in unfinished if self._lora(s.request) == scales])
            self._n_steps += 1
        except BaseException:
            for sequence in sequences:
                self.slots.forget(sequence.slot)
                sequence.finish_reason = sequence.finish_reason or "cancelled"
            if self.target.is_recurrent:
                # A pass moves the states of other sequences, too, and may not have come so far.
                self.slots.forget_all()
            raise

    def _step_of(self, unfinished: list[Sequence]) -> None:
        answering = [s for s in unfinished if not s.in_prompt]
        if len(answering) < len(unfinished):
            self.meter.tell()  # who waits for tokens does not wait for others' prompts
        self._prefill.run(unfinished, self._n_steps, self._round_s)
        # A sequence that ends its prompt here has its first round in the next step.
        start = time.perf_counter()
        self._round.run(answering)
        if answering:
            self._round_s += (time.perf_counter() - start - self._round_s) / 4

    def forget(self) -> None:
        """Empty all free slots, and the store and texts of earlier requests."""
        self.prefix_cache.clear()
        self.earlier = EarlierTexts()

    def run(self, sequences: list[Sequence]) -> None:
        """Step until all have finished, and give their slots back. Raises the first error."""
        with ExitStack() as stack:
            for sequence in sequences:
                stack.callback(self.end, sequence)
            while any(sequence.finish_reason is None for sequence in sequences):
                self.step(sequences)
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error


def most_nodes(n_branches: int, block_size: int) -> int:
    """The most nodes of a tree whose width is chosen. Each row needs a branch of its own: a wider
    tree would need a new graph in each round. More rows cost more host time than they bring: with
    64, played rounds of 216 machines and texts were slower by 0.1 %, without that time."""
    return max(min(n_branches, _TREE_ROWS), block_size) - 1
