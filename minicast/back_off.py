"""When drafting does not pay after all: pauses, in which AR decodes, for a poor head or a hard text.

The rule of `width` decides once, for all texts, on times that a probe took in a second or two. While an answer is
decoded, it is seen what its rounds commit, and how long they take against AR (`Pace`). From both, `BackOff` makes sure
that an answer loses no more than a few tokens' time.

This file is arithmetic, as `width` is.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from statistics import median

from minicast.width import Decision

COMPARED, COMPARED_LEAST = 9, 3  # the median of the latest comparisons counts; with fewer than 3, the probe's times
COMPARE_FIRST, COMPARE_EVERY = 6, 48  # drafted rounds before AR runs for a comparison: while there are too few, and later


@dataclass
class Pace:
    """How much longer drafted rounds take in use than a probe predicted, relative to AR.

    A probe lasts a second or two. On a shared machine memory and cores gain and lose a tenth or two within seconds.
    AR is bound by memory, drafted rounds more by the cores. Both slow down together, so only rounds that ran next to
    each other can be compared, and the ratio drifts within half a minute or so. Hence all rounds are timed as they
    run, and now and then AR decodes two tokens just for a comparison. The second of them counts: on a CPU the first AR
    round after a drafted one is up to a twentieth slower than those that follow.

    Attributes:
        ratios: at each of the latest changes from drafting to AR, a drafted round's time over AR's, each first divided
            by its prediction
        since: drafted rounds since the latest comparison
    """

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=COMPARED))
    since: int = 0
    _drafted: float | None = None  # excess of this answer's latest drafted round
    _ar_rounds: int = 0  # since then
    _compared: bool = False  # in this answer

    @property
    def due(self) -> bool:
        """Whether AR should run for a comparison."""
        return self.since >= (COMPARE_EVERY if len(self.ratios) >= COMPARED_LEAST else COMPARE_FIRST)

    @property
    def correction(self) -> float:
        """Factor on a drafted round's predicted time, in units of AR's."""
        return median(self.ratios) if len(self.ratios) >= COMPARED_LEAST else 1.0

    def begin(self) -> None:
        """Another answer: its rounds are not neighbours of those before.

        If the last answer compared nothing, the oldest comparison is forgotten. Otherwise one accident could silence
        drafting for good: without drafts there are no new comparisons.
        """
        if self.ratios and not self._compared:
            self.ratios.popleft()
        self._drafted, self._ar_rounds, self._compared = None, 0, False

    def observe(self, drafted: bool, excess: float) -> None:
        """A round took `excess` times its predicted time."""
        if drafted:
            self._drafted, self._ar_rounds = excess, 0
            self.since += 1
            return
        self._ar_rounds += 1
        if self._ar_rounds == 2:
            if self._drafted is not None:
                self.ratios.append(self._drafted / excess)
                self._compared = True
            self.since = 0


BUDGET = 2.0       # time in AR tokens that any answer may lose before drafting pauses: 1.6 % of 128
BANK = 10.0        # most that good rounds save up: with more, a text that turns hard is noticed too late
TRY_SHARE = 0.01   # what the first try after a pause may lose, as a share of the AR time before it
TOLERANCE = 1e-9   # for rounding in sums


@dataclass
class BackOff:
    """Leaves drafting for a while when it does not pay, so that a poor head or a hard text costs little.

    The rule decides for all texts at once; this looks at the text at hand. It keeps a purse, in units of the
    time AR takes for one token. A drafted round earns the R tokens that it commits, and spends its own time. It only
    runs if the purse could pay for it even if nothing were accepted. Otherwise AR decodes k tokens, after which the
    purse has enough for one more try; k doubles with each failure in a row. (A sum that is kept below a cap and raises
    an alarm at a limit is Page's test for a change of mean, the quickest for its rate of false alarms.)

    At worst an answer loses the purse that it began with (or one round, if that is more), and one try a pause. A
    useless head loses this once and then less and less, as pauses double. What good rounds saved stays for the next
    answer, where it makes false alarms rarer. A round is charged its predicted time, corrected by `Pace`, since a
    single measured time may be an accident.

    Attributes:
        price: what one more round like the last would lose if nothing were accepted
        pace: of rounds whose times were predicted by the same costs
    """

    purse: float = BUDGET
    price: float = 0.0
    ar_tokens_left: int = 0
    pace: Pace = field(default_factory=Pace)
    _pauses: int = 0    # since drafting last filled the purse, or since an answer of a pair that pays began

    @property
    def drafting(self) -> bool:
        """Whether the next round should draft."""
        return self.ar_tokens_left == 0 and not self.pace.due

    def begin(self, decision: Decision | None = None) -> None:
        """Another answer. decision: the rule's, with what was recorded of the pair.

        If recorded rounds say that the pair pays, a pause was the text's fault and ends with it; otherwise the head's,
        and it continues.
        """
        self.pace.begin()
        if decision and decision.recorded is not None and decision.recorded > decision.break_even:
            self.ar_tokens_left = self._pauses = 0
        self.purse = max(self.purse, BUDGET)

    def observe(self, drafted: bool, committed: int, seconds: float, *, predicted_ms: float, ar_ms: float) -> None:
        """A round of either kind committed R tokens in `seconds`; predicted_ms, ar_ms: predicted for it, and for AR"""
        self.pace.observe(drafted, 1e3 * seconds / predicted_ms)
        if drafted:
            self.after_draft(committed, predicted_ms / ar_ms * self.pace.correction)
        else:
            self.after_ar(committed)

    def after_draft(self, committed: int, ar_tokens: float) -> None:
        """A drafted round committed R tokens and took the time of `ar_tokens` tokens of AR."""
        self.purse = min(self.purse + committed - ar_tokens, BANK)
        self.price = max(ar_tokens - 1.0, 0.0)
        if self.purse == BANK:
            self._pauses = 0
        if self.purse < self.price - TOLERANCE:
            self.ar_tokens_left = ceil(self.price / TRY_SHARE) << self._pauses
            self._pauses += 1
            self.purse = self.price

    def after_ar(self, tokens: int) -> None:
        """AR emitted `tokens` tokens."""
        self.ar_tokens_left = max(self.ar_tokens_left - tokens, 0)
