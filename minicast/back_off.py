"""When drafting does not pay after all: pauses, in which AR decodes, for a poor head or a hard text.

The rule of `width` decides once, for all texts, on times that a probe took in a second or two. While an answer is
decoded, two things are learned: how long rounds take against AR (`Pace`), and what they are worth (`Trust`). From
both, `BackOff` makes sure that an answer loses no more than a few tokens' time.

This file is arithmetic, as `width` is.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from statistics import median

from minicast.width import Decision

COMPARED, COMPARED_LEAST = 9, 3  # the median of the latest comparisons counts; with fewer than 3, the probe's times
COMPARE_FIRST, COMPARE_EVERY = 6, 48  # drafted rounds before AR runs for a comparison: while there are too few, and later
NEIGHBOURS = 5  # AR is compared with the median of this many drafted rounds just before it


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
    _drafted: deque[float] = field(default_factory=lambda: deque(maxlen=NEIGHBOURS))  # before the latest AR rounds
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
        self._drafted.clear()
        self._ar_rounds, self._compared = 0, False

    def observe(self, drafted: bool, excess: float) -> None:
        """A round took `excess` times its predicted time."""
        if drafted:
            if self._ar_rounds:
                self._drafted.clear()
            self._drafted.append(excess)
            self._ar_rounds = 0
            self.since += 1
            return
        self._ar_rounds += 1
        if self._ar_rounds == 2:
            if self._drafted:
                self.ratios.append(median(self._drafted) / excess)
                self._compared = True
            self.since = 0


TRUSTED_FROM = 24.0  # tokens that masses must have promised before their worth counts as known
MEMORY = 64          # about how many drafted rounds are remembered: older ones fade
LENT = 4.0           # tokens that an answer may be credited beyond those it committed: 3 % of 128


@dataclass
class Trust:
    """How many tokens a drafted round was worth: by its masses, once it is known what they are worth.

    Two signals tell how hard a text is for the drafter: what its rounds accept, and the sum of their masses, which
    predicts that with less noise. But masses are off by a factor that depends on the head, learned here, and they may
    be wrong about a text. So at most LENT tokens an answer are credited on masses alone.

    Attributes:
        promised, accepted: tokens, summed over recent drafted rounds
        lent: tokens credited in this answer, less those committed
    """

    promised: float = 0.0
    accepted: float = 0.0
    lent: float = 0.0

    @classmethod
    def of(cls, decision: Decision | None) -> "Trust":
        """As recorded for the pair; if it was not, nothing is known yet."""
        if decision is None or decision.recorded is None:
            return cls()
        return cls(MEMORY * (decision.promised - 1.0), MEMORY * (decision.recorded - 1.0))

    def credit(self, committed: int, promised: float) -> float:
        """The R to expect of a round that committed R and whose masses sum to `promised`; learns from both."""
        expected = float(committed)
        if self.promised >= TRUSTED_FROM:
            expected = min(1.0 + promised * self.accepted / self.promised, committed + LENT - self.lent)
        self.promised += promised - self.promised / MEMORY
        self.accepted += committed - 1 - self.accepted / MEMORY
        self.lent += expected - committed
        return expected


BUDGET = 1.0       # time in AR tokens that any answer may lose before drafting pauses: 0.8 % of 128
RECORDED_BUDGET = 2.0  # the same if recorded rounds say that drafting pays, or nearly: texts may begin hard
BANK = 6.0         # most that good rounds save up: with more, a text that turns hard is noticed too late
TRY_SHARE = 0.01   # what the first try after a pause may lose, as a share of the AR time before it
RECORDED_TRY_SHARE = 0.02  # the same if recorded rounds say that drafting pays, or nearly: the alarm may have been false
NEARLY = 0.85      # above this share of the R that pays, many texts do pay, though the average does not
TOLERANCE = 1e-9   # for rounding in sums


@dataclass
class BackOff:
    """Leaves drafting for a while when it does not pay, so that a poor head or a hard text costs little.

    The rule decides for all texts at once; this looks at the text at hand. It keeps a purse, in units of the
    time AR takes for one token. A drafted round earns the R tokens to be expected of it, see `Trust`, and spends its
    own time. It only runs if the purse could pay for it even if nothing were accepted. Otherwise AR decodes k tokens,
    after which the purse has enough for one more try; k doubles with each failure in a row. (A sum that is kept below
    a cap and raises an alarm at a limit is Page's test for a change of mean, the quickest for its rate of false
    alarms.)

    At worst an answer loses the purse that it began with (or one round, if that is more), what `Trust` lent it, and
    one try a pause. A useless head loses this once and then less and less, as pauses double. What good rounds saved
    stays for the next answer, where it makes false alarms rarer. A round is charged its predicted time, corrected by
    `Pace`, since a single measured time may be an accident.

    Attributes:
        price: what one more round like the last would lose if nothing were accepted
        pace: of rounds whose times were predicted by the same costs
        trust: in the masses of the decoder's drafter
        try_share: TRY_SHARE or RECORDED_TRY_SHARE
    """

    purse: float = BUDGET
    price: float = 0.0
    ar_tokens_left: int = 0
    pace: Pace = field(default_factory=Pace)
    trust: Trust = field(default_factory=Trust)
    try_share: float = TRY_SHARE
    _pauses: int = 0    # since drafting last filled the purse, or since an answer of a pair that pays began

    @property
    def drafting(self) -> bool:
        """Whether the next round should draft."""
        return self.ar_tokens_left == 0 and not self.pace.due

    def begin(self, decision: Decision | None = None) -> None:
        """Another answer. decision: the rule's, with what was recorded of the pair.

        If the pair is known to pay, or nearly, a pause was the text's fault and ends with it; otherwise the head's, and it
        continues.
        """
        self.pace.begin()
        if self.trust.promised == 0:
            self.trust = Trust.of(decision)
        self.trust.lent = 0.0
        recorded = decision.recorded if decision else None
        pays = recorded is not None and recorded > NEARLY * decision.break_even * self.pace.correction
        self.try_share = RECORDED_TRY_SHARE if pays else TRY_SHARE
        self.purse = max(self.purse, RECORDED_BUDGET if pays else BUDGET)
        if pays:
            self.ar_tokens_left = self._pauses = 0

    def observe(
        self, drafted: bool, committed: int, seconds: float, *, promised: float, predicted_ms: float, ar_ms: float
    ) -> None:
        """A round of either kind committed R tokens in `seconds`.

        promised: tokens, the sum of its nodes' masses; predicted_ms, ar_ms: predicted for this round, and for AR
        """
        self.pace.observe(drafted, 1e3 * seconds / predicted_ms)
        if drafted:
            self.after_draft(self.trust.credit(committed, promised), predicted_ms / ar_ms * self.pace.correction)
        else:
            self.after_ar(committed)

    def after_draft(self, earned: float, ar_tokens: float) -> None:
        """A drafted round earned so many tokens and took the time of `ar_tokens` tokens of AR."""
        self.purse = min(self.purse + earned - ar_tokens, BANK)
        self.price = max(ar_tokens - 1.0, 0.0)
        if self.purse == BANK:
            self._pauses = 0
        if self.purse < self.price - TOLERANCE:
            self.ar_tokens_left = ceil(self.price / self.try_share) << self._pauses
            self._pauses += 1
            self.purse = self.price

    def after_ar(self, tokens: int) -> None:
        """AR emitted `tokens` tokens."""
        self.ar_tokens_left = max(self.ar_tokens_left - tokens, 0)
