"""How fast engines compute, learnt from what bookings show.

What lives here: the two timing lines of a model, the speed of each rank relative to them, the mean length of outputs,
and how often clients report. What must not: prices (expected_time). The state belongs to one router.

Prefill takes a + b * tokens, a step of decoding c + d * tokens in use. The lines are fitted over all engines of a
model: if each engine had its own, a slow one would get no requests, and its cache would lie idle. The speed of a rank
relative to the line is used for its backlog only. Everything begins with defaults on the slow side, since backlogs that
are too short do harm and those that are too long hardly do.

State: what the policy `expected-time` has learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from streams.core.ids import RankId
from streams.core.loads.observations import Forecast, Observation, OutputObserved, PrefillObserved, Unreported


class Line(NamedTuple):
    """base + slope * x, in ms."""

    base: float
    slope: float

    def at(self, x: float) -> float:
        """The value at x."""
        return self.base + self.slope * x


#: An 8B model on a recent GPU, with a margin: its prompts take about 20 ms and 0.019 ms per token, and a step of
#: decoding 8 ms and 40 ms more with a million tokens in use.
PREFILL_DEFAULT = Line(20.0, 0.03)
DECODE_DEFAULT = Line(8.0, 4e-5)

#: Tokens of output until requests have shown how long they are.
OUTPUT_TOKENS_DEFAULT = 300.0

#: An observation weighs as much as this many later ones together, so that engines that become faster or slower are
#: followed within some hundred requests.
_MEMORY = 300.0

#: How many observations the shape of the default line weighs, so that prompts of one length alone define no slope.
_PRIOR = 2.0

#: x at which the default line is part of the fit.
_PREFILL_AT, _DECODE_AT = (0.0, 16_384.0), (0.0, 1_000_000.0)

#: One observation is at most this many times the line, or this share of it: a request that waited for something else,
#: or that was computed together with another one.
_RATIO_MAX, _RATIO_MIN = 4.0, 0.02

#: Bounds of a rank's speed relative to the line, the weight of one observation, and the tokens from which a prompt
#: shows it. Source: the measurements of docs/quality.md with unequal engines.
_SPEED_MIN, _SPEED_MAX, _SPEED_WEIGHT, _SPEED_TOKENS_MIN = 0.1, 8.0, 0.02, 1024

#: Prompts that are taken together at most: a rank that is always busy would otherwise show nothing.
_TOGETHER_MAX = 5

#: Weight of one request in the mean length of outputs, and how many requests the default weighs.
_OUTPUT_WEIGHT, _OUTPUT_PRIOR = 0.01, 20.0
_OUTPUT_TOKENS_MAX = 1_000_000.0

#: Blocks of output from which a request shows how long a step takes, since its last block is partly filled.
_DECODE_BLOCKS_MIN = 4

#: The least share of the time between two tokens that is taken for decoding.
_DECODE_SHARE_MIN = 0.2

#: Weight of one request in the shares of those that report.
_REPORT_WEIGHT = 0.02

#: How much longer than forecast a booking counts while all clients report. With few reports this approaches 1, so that
#: bookings of silent clients count for no longer than they probably last.
_PREFILL_PATIENCE, _DECODE_PATIENCE = 4.0, 10.0

#: Ranks and models whose speed is kept. Beyond the limit all are forgotten, and learnt anew.
_RANKS_MAX, _MODELS_MAX = 65_536, 1024


class LineFit:
    """A line, fitted to observations with weights that fade.

    Errors are relative, so that long prompts do not decide alone. The default gives the shape until observations of
    several lengths do; its height follows the observations at once.
    """

    __slots__ = ("_default", "_n", "_points", "_ratio", "_sums", "line")

    def __init__(self, default: Line, points: tuple[float, float]) -> None:
        self._default = default
        self._points = points
        self._ratio = 1.0
        self._n = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self.line = default

    def add(self, x: float, y: float, count: int = 1) -> None:
        """Take in one observation: y ms at x. count: of values of the line that y is the sum of, at xs with sum x."""
        base, slope = self.line
        expected = count * base + slope * x
        y = min(max(y, _RATIO_MIN * expected), _RATIO_MAX * expected)
        self._n += count
        # The weight of the first observations is 1/n, so that the mean of few ones counts before there are many.
        weight = max(1.0 / (self._n + _PRIOR), count / _MEMORY)
        default = count * self._default.base + self._default.slope * x
        self._ratio += weight * (y / default - self._ratio)
        # A sum has less noise than its parts have, relative to itself: it weighs as much as all of them.
        keep, scale = 1.0 - count / _MEMORY, count / (expected * expected)
        n, sx, sxx, sy, sxy = (keep * part for part in self._sums)
        # Weights by a line that may still move are good enough; they fade as well.
        self._sums = (
            n + scale * count * count,
            sx + scale * count * x,
            sxx + scale * x * x,
            sy + scale * count * y,
            sxy + scale * x * y,
        )
        n, sx, sxx, sy, sxy = self._sums
        for point in self._points:
            height = self._ratio * self._default.at(point)
            prior = _PRIOR / (height * height)
            n, sx, sxx, sy, sxy = (
                n + prior,
                sx + prior * point,
                sxx + prior * point * point,
                sy + prior * height,
                sxy + prior * point * height,
            )
        determinant = n * sxx - sx * sx
        slope = (n * sxy - sx * sy) / determinant if determinant > 0.0 else 0.0
        lowest = 0.1 * self._ratio
        # Neither part may vanish: noise would otherwise make long prompts, or short ones, free.
        slope = max(slope, lowest * self._default.slope)
        self.line = Line(max((sy - slope * sx) / n, lowest * self._default.base), slope)


class ModelTimings:
    """What is known of one model: its lines, and the mean length of its outputs."""

    __slots__ = ("_decode", "_n_outputs", "_prefill", "output_tokens")

    def __init__(self, prefill: Line, decode: Line) -> None:
        self._prefill = LineFit(prefill, _PREFILL_AT)
        self._decode = LineFit(decode, _DECODE_AT)
        self._n_outputs = 0
        self.output_tokens = OUTPUT_TOKENS_DEFAULT

    @property
    def prefill(self) -> Line:
        """Time of a prompt by its uncached tokens."""
        return self._prefill.line

    @property
    def decode(self) -> Line:
        """Time of one step of decoding by tokens in use."""
        return self._decode.line

    def note_prefills(self, n_tokens: int, took_ms: float, count: int) -> None:
        """So many prompts took this long together."""
        self._prefill.add(n_tokens, took_ms, count)

    def note_step(self, tokens_in_use: float, took_ms: float) -> None:
        """A step of decoding took this long."""
        self._decode.add(tokens_in_use, took_ms)

    def note_output(self, n_tokens: float) -> None:
        """A request had this many tokens of output."""
        self._n_outputs += 1
        weight = max(1.0 / (self._n_outputs + _OUTPUT_PRIOR), _OUTPUT_WEIGHT)
        n_tokens = min(max(1.0, n_tokens), _OUTPUT_TOKENS_MAX)
        self.output_tokens += weight * (n_tokens - self.output_tokens)


class _Prefills:
    """Prompts that one rank computed without a pause.

    An engine computes several prompts in the same steps. So the first one that is complete has the time of all, and
    those after it less than their own: as single observations they would show that short prompts take long and that
    long ones do not. Their sum is right.
    """

    __slots__ = ("count", "model", "n_tokens", "took_ms")

    def __init__(self, model: str) -> None:
        self.model = model
        self.count = self.n_tokens = 0
        self.took_ms = 0.0

    def add(self, n_tokens: int, took_ms: float) -> None:
        """One more of them."""
        self.count += 1
        self.n_tokens += n_tokens
        self.took_ms += took_ms


class Timings:
    """All that one router has learnt about its engines and clients.

    prefills_reported, ends_reported: the shares of requests whose clients report that.
    """

    def __init__(self, prefill: Line = PREFILL_DEFAULT, decode: Line = DECODE_DEFAULT) -> None:
        self._defaults = prefill, decode
        self._models: dict[str, ModelTimings] = {}
        self._speeds: dict[RankId, float] = {}
        self._completing: dict[RankId, _Prefills] = {}  # the last ones of each rank
        self.prefills_reported = self.ends_reported = 1.0

    def of(self, model: str) -> ModelTimings:
        """What is known of a model."""
        timings = self._models.get(model)
        if timings is None:
            if len(self._models) >= _MODELS_MAX:
                self._models.clear()
            timings = self._models[model] = ModelTimings(*self._defaults)
        return timings

    def slowest_prefill(self) -> Line:
        """The line of the model whose tokens take the longest; the default before anything is known."""
        lines = (timings.prefill for timings in self._models.values())
        return max(lines, key=lambda line: line.slope, default=self._defaults[0])

    def speed(self, rank: RankId) -> float:
        """How long a rank takes for a prompt, relative to its model's line."""
        return self._speeds.get(rank, 1.0)

    def forecast(self, rank: RankId, *, wait_ms: float, own_ms: float, load_ms: float, decode_ms: float) -> Forecast:
        """What to expect of a request.

        wait_ms: until the rank begins with it. own_ms: of its prompt by the model's line. load_ms: for blocks that are
        loaded. decode_ms: of its output.
        """
        prefill_ms = self.speed(rank) * own_ms + load_ms
        prefilled_ms = (wait_ms + prefill_ms) * (1.0 + (_PREFILL_PATIENCE - 1.0) * self.prefills_reported)
        patience = 1.0 + (_DECODE_PATIENCE - 1.0) * self.ends_reported
        return Forecast(
            max(1, round(prefill_ms * 1000.0)),
            max(1, round(prefilled_ms)),
            max(1, round(prefilled_ms + decode_ms * patience)),
            round(load_ms * 1000.0),
        )

    def observe(self, observations: Sequence[Observation], block_size_of: Callable[[str], int]) -> None:
        """Learn from observations."""
        for observation in observations:
            match observation:
                case PrefillObserved():
                    self.prefills_reported += _REPORT_WEIGHT * (1.0 - self.prefills_reported)
                    self._observe_prefill(observation)
                case OutputObserved():
                    if observation.ended:
                        self.ends_reported += _REPORT_WEIGHT * (1.0 - self.ends_reported)
                    self._observe_output(observation, block_size_of(observation.model))
                case Unreported(ended=True):
                    self.ends_reported -= _REPORT_WEIGHT * self.ends_reported
                case Unreported():
                    self.prefills_reported -= _REPORT_WEIGHT * self.prefills_reported

    def _observe_prefill(self, observation: PrefillObserved) -> None:
        took_ms = max(observation.took_ms - observation.forecast.load_us / 1000.0, 0.0)
        before = self._completing.get(observation.rank)
        if before is not None:
            if observation.continues and before.model == observation.model and before.count < _TOGETHER_MAX:
                before.add(observation.n_tokens, took_ms)
                return
            self._learn_prefills(observation.rank, before)
        elif len(self._completing) >= _RANKS_MAX:
            self._completing.clear()
        self._completing[observation.rank] = _Prefills(observation.model)
        self._completing[observation.rank].add(observation.n_tokens, took_ms)

    def _learn_prefills(self, rank: RankId, prefills: _Prefills) -> None:
        timings = self.of(prefills.model)
        base, slope = timings.prefill
        expected_ms = prefills.count * base + slope * prefills.n_tokens
        took_ms = max(prefills.took_ms, _RATIO_MIN * expected_ms)
        if prefills.n_tokens >= _SPEED_TOKENS_MIN:
            ratio = min(max(took_ms / expected_ms, _SPEED_MIN), _SPEED_MAX)
            if len(self._speeds) >= _RANKS_MAX and rank not in self._speeds:
                self._speeds.clear()
            speed = self._speeds.get(rank, 1.0)
            self._speeds[rank] = speed + _SPEED_WEIGHT * (ratio - speed)
        timings.note_prefills(prefills.n_tokens, took_ms, prefills.count)

    def _observe_output(self, observation: OutputObserved, block_size: int) -> None:
        timings = self.of(observation.model)
        in_use = observation.active_blocks * block_size
        # The last block is half full on average.
        n_tokens = (observation.output_blocks - 0.5) * block_size
        # What prefills took from it is in their own forecasts. The rest is at least a part of the time, as these err.
        own_ms = max(observation.took_ms - observation.prefills_ms, _DECODE_SHARE_MIN * observation.took_ms)
        if observation.output_blocks >= _DECODE_BLOCKS_MIN and observation.took_ms > 0:
            timings.note_step(in_use, own_ms / n_tokens)
        if not observation.ended:
            return
        if observation.output_blocks:
            timings.note_output(n_tokens)
        elif observation.took_ms > 0:  # its client reports no output: what matters is the product of both
            timings.note_output(own_ms / timings.decode.at(in_use))
