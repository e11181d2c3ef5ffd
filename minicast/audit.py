"""Whether answers are the target's own (paper, Appendix D.2).

Methods round differently, since a product over n rows is another sum than one over a single row. So where two
texts differ, or a token is not the target's best, the gap between the scores says whether rounding explains it.
"""

from collections.abc import Sequence

import torch

from minicast.decode import Options
from minicast.figures import Departure
from minicast.sampling import gumbel_noise, shape_logits
from model.transformer import Target

NEAR_TIE = 1e-3  # largest top-two gap that rounding may flip in float32; a departure at a larger one is a bug


def first_departure(
    target: Target, prompt_ids: Sequence[int], reference: list[int], answer: list[int], options: dict
) -> Departure | None:
    """Where `answer` leaves `reference`; `options` tell how tokens were chosen.

    The stochastic verifier draws from the same law, not the same tokens: its samples are not compared.
    """
    params = Options(**options).sampling
    if answer == reference or (not params.greedy and options.get("verifier") == "stochastic"):
        return None
    shared = 0
    while shared < min(len(reference), len(answer)) and reference[shared] == answer[shared]:
        shared += 1
    expected, got = [tokens[shared] if shared < len(tokens) else None for tokens in (reference, answer)]
    prefix = [*prompt_ids, *reference[:shared]]
    scores = target.score(prefix)[0][-1:]  # (1, V)
    if not params.greedy:
        position = torch.tensor([len(prefix)], device=scores.device)
        scores = shape_logits(scores, params) + gumbel_noise(params.seed, position, scores.shape[1])
    best, second = scores[0].float().topk(2).values.tolist()
    return Departure(shared, expected, got, best - second)


def is_failure(departure: Departure | None, dtype: torch.dtype) -> bool:
    """Whether rounding cannot explain this departure. In half precision it explains more: never a failure."""
    return departure is not None and dtype == torch.float32 and departure.gap > NEAR_TIE
