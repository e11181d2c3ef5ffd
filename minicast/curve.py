"""The mass curve of a target/draft pair: what its candidates weigh, best first (paper, §3.3).

`replay` records it; a head ships with it as curve.json; `probe` reads that, or learns the curve from the rounds
decoded; `width` decides by it. All use one format: a JSON object with the fields of `MassCurve`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minicast.width import MAX_WIDTH
from model.errors import UserError

PROVENANCE = ("target", "draft", "rank_cap")


@dataclass
class MassCurve:
    """Mean prefix masses of a target/draft pair's rounds.

    Attributes:
        masses: (MAX_WIDTH,) by rank, best first; chain_masses: (L,) of the top-1 prefix by depth
        accepted, chain_accepted: likewise, the share of rounds in which the target took that candidate; empty:
            unknown
        rounds: how many rounds these are means of
        target, draft, rank_cap: what replay recorded them with, for people; None if they were learned
    """

    masses: list[float]
    chain_masses: list[float]
    accepted: list[float]
    chain_accepted: list[float]
    rounds: int = 0
    target: str | None = None
    draft: str | None = None
    rank_cap: int | None = None

    @classmethod
    def empty(cls, depth: int) -> "MassCurve":
        return cls([0.0] * MAX_WIDTH, [0.0] * depth, [], [])

    @classmethod
    def read(cls, path: Path, depth: int) -> "MassCurve":
        """From a JSON object with these fields; those of what was accepted may be missing. ValueError for anything else."""
        try:
            values = {"accepted": [], "chain_accepted": []} | json.loads(path.read_text(encoding="utf-8"))
            names = ("masses", "chain_masses", "accepted", "chain_accepted")
            curve = cls(*([float(share) for share in values[name]] for name in names))
            curve.rounds = int(values["rounds"])
            curve.target, curve.draft, curve.rank_cap = (values.get(name) for name in PROVENANCE)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{error} is missing or of another kind") from error
        except (OverflowError, RecursionError) as error:  # a number too large, or lists nested too deep
            raise ValueError(str(error)) from error
        if curve.rounds < 0:
            raise ValueError(f"means of {curve.rounds} rounds are none")
        if len(curve.masses) > MAX_WIDTH:
            raise ValueError(f"it has {len(curve.masses)} masses, and no tree is wider than {MAX_WIDTH}")
        if len(curve.chain_masses) != depth:
            raise ValueError(f"it is of a block of {len(curve.chain_masses) + 1}, the head's is {depth + 1}")
        if curve.accepted and len(curve.accepted) != len(curve.masses):
            raise ValueError(f"it has {len(curve.masses)} masses and {len(curve.accepted)} shares accepted")
        if curve.chain_accepted and len(curve.chain_accepted) != depth:
            raise ValueError(f"it has {depth} masses of the chain and {len(curve.chain_accepted)} shares accepted")
        shares = curve.masses + curve.chain_masses + curve.accepted + curve.chain_accepted
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError("masses and shares lie between 0 and 1")
        return curve

    def add(self, masses: Sequence[float], depths: Sequence[int]) -> None:
        """Add a round by the nodes (N,) of its widest tree, best first. A depth's best node is the chain's."""
        by_depth: dict[int, float] = {}
        for mass, depth in zip(masses, depths):
            by_depth.setdefault(depth, mass)
        self.rounds += 1
        for rank, mean in enumerate(self.masses):
            self.masses[rank] += ((masses[rank] if rank < len(masses) else 0.0) - mean) / self.rounds
        for index, mean in enumerate(self.chain_masses):
            self.chain_masses[index] += (by_depth.get(index + 1, 0.0) - mean) / self.rounds


def read_shipped(file: Path, depth: int, otherwise: str) -> MassCurve:
    """The curve beside a head. UserError if it is invalid; otherwise: what happens without the file, for its message"""
    try:
        return MassCurve.read(file, depth)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot use {file}: {error}; delete it, and {otherwise}") from error
