"""Prompts that match nothing: their counts, and a warning about models whose prompts have never matched any block.

What lives here: counting decisions by model until the first match, and the warning, once per model. What must not: the
matching itself (core.index), and how far an answer can be trusted (trust): the overlap of 0 in such an answer is right
by what the router was given, but the prompt was hashed differently from the blocks that the engines report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set

from streams.core.ids import RankId
from streams.core.index.interface import PrefixScores

log = logging.getLogger(__name__)

#: A model is reported after this many decisions without a match, made while its ranks held blocks. Requests of one
#: application mostly share the start of a prompt, so that a fleet with blocks usually matches one of the first few.
UNMATCHED_DECISIONS = 100

#: How often it is checked whether a model's ranks hold blocks, in decisions: the check takes 10 us for 64 ranks.
_CHECK_EVERY = 20

#: Models that are followed. Beyond this limit, further models are not.
MODELS_MAX = 256


class PromptMatches:
    """Counts of one router. n_without_blocks: decisions whose prompt has no full block, so that it can match nothing.

    Decisions of several threads may be counted as one; nothing depends on the exact number.
    """

    def __init__(self, blocks_of_model: Callable[[str], Mapping[RankId, int]]) -> None:
        """blocks_of_model: every rank that serves a model, with the number of blocks that it holds."""
        self._blocks_of_model = blocks_of_model
        self.n_without_blocks = 0
        self._matched: set[str] = set()  # models with a match; nothing more is done for them
        self._n_unmatched: dict[str, int] = {}  # decisions of the other models while their ranks held blocks
        self._n_short: dict[str, int] = {}  # those of them whose prompt has no full block
        self._reported: set[str] = set()

    def note(
        self, model: str, n_full_blocks: int, scores: PrefixScores, predicted: Set[RankId], *, pooled: bool
    ) -> None:
        """Count a decision that read the index.

        scores: of every rank in the index. predicted: ranks whose score is a prediction; it proves nothing, because
        the router hashes both the prediction and the prompt. pooled: whether the prompt matched blocks in a CXL pool.
        """
        if not n_full_blocks:
            self.n_without_blocks += 1
        if model not in self._matched:
            self._note_first(model, n_full_blocks, scores.scores.keys() - predicted, pooled=pooled)

    def unmatched(self) -> dict[str, int]:
        """Decisions of each model that was reported and has not matched since."""
        return {model: self._n_unmatched.get(model, 0) for model in sorted(self._reported)}

    def _note_first(self, model: str, n_full_blocks: int, matching: Set[RankId], *, pooled: bool) -> None:
        n_before = self._n_unmatched.get(model)
        if n_before is None and len(self._matched) + len(self._n_unmatched) >= MODELS_MAX:
            return
        n_decisions = (n_before or 0) + 1
        self._n_unmatched[model] = n_decisions
        self._n_short[model] = self._n_short.get(model, 0) + (not n_full_blocks)
        if not matching and not pooled and n_decisions % _CHECK_EVERY:
            return
        blocks = self._blocks_of_model(model)
        if pooled or not blocks.keys().isdisjoint(matching):  # the ranks may serve another model
            self._note_match(model)
        elif not any(blocks.values()):
            self._n_unmatched[model] = self._n_short[model] = 0  # nothing could match
        elif n_decisions >= UNMATCHED_DECISIONS and model not in self._reported:
            self._reported.add(model)
            log.warning(
                "None of %d prompts for model %r has matched a block, although its ranks hold %d blocks. The prompts "
                "are probably not hashed like the engines' blocks. Likely causes: token ids of another tokenizer or "
                "without the chat template, another block size, another hash seed, or a lora_name or namespace that "
                "only one side uses. %d of these prompts are shorter than one block and cannot match",
                n_decisions,
                model,
                sum(blocks.values()),
                self._n_short[model],
            )

    def _note_match(self, model: str) -> None:
        if model in self._reported:
            self._reported.discard(model)
            log.info("A prompt for model %r has matched blocks, for the first time", model)
        self._matched.add(model)
        self._n_unmatched.pop(model, None)
        self._n_short.pop(model, None)
