"""What a custom method may return: a tree that can be packed and verified.

A wrong depth would give wrong positions, and silently another text. Built-in methods cannot make these mistakes, so
they are not checked.
"""

import torch

from minicast.tree import Tree
from minicast.width import MAX_WIDTH
from model.errors import UsageError


def check_tree(tree, vocabulary: int) -> None:
    """UsageError, in one line, unless it is a tree of at most MAX_WIDTH nodes over `vocabulary` tokens."""
    if not isinstance(tree, Tree):
        raise UsageError(f"a method returns a Tree (see minicast.tree), got {type(tree).__name__}")
    if problem := fault(tree, vocabulary):
        raise UsageError(f"the tree that the method returned cannot be verified: {problem}")


def fault(tree: Tree, vocabulary: int) -> str | None:
    """What is wrong with a tree, in words; None if nothing is."""
    fields = (tree.tokens, tree.parents, tree.depths, tree.log_mass)
    if not all(isinstance(values, torch.Tensor) and values.dim() == 1 for values in fields):
        return "its fields must be tensors of one dimension"
    if all(len(values) == 0 for values in fields):
        return None  # of whatever type: torch.tensor([]) has floats
    if any(values.dtype not in (torch.int32, torch.int64) for values in fields[:3]):
        return "tokens, parents and depths must be whole numbers, of 32 or 64 bits"
    N = tree.width
    if any(len(values) != N for values in (tree.parents, tree.depths, tree.log_mass)):
        return "its fields have different lengths"
    if N > MAX_WIDTH:
        return f"it has {N} nodes, {MAX_WIDTH} at most can be packed"
    if bool(((tree.parents < -1) | (tree.parents >= torch.arange(N, device=tree.parents.device))).any()):
        return "a parent must come before its children; -1 is the root"
    above = torch.where(tree.parents < 0, 0, tree.depths[tree.parents.clamp(min=0)])
    if bool((tree.depths != above + 1).any()):
        return "a node's depth must be its parent's plus one, 1 below the root"
    if not tree.log_mass.is_floating_point():
        return "log_mass must be of floating point"
    log_mass = tree.log_mass.float()  # as it is packed
    if bool((log_mass.isnan() | log_mass.isposinf()).any()):  # NaN would later be blamed on the drafter
        return "a log mass is not a number, or infinite in float32"
    real = tree.log_mass > -torch.inf  # `pack` leaves out what a builder of fixed shape adds when candidates run out
    children = list(zip(tree.parents[real].tolist(), tree.tokens[real].tolist()))
    if len(set(children)) < len(children):  # Theorem 3 needs different ones
        return "two children of a node carry the same token"
    if bool(((tree.tokens < 0) | (tree.tokens >= vocabulary)).any()):
        return f"a token is outside the vocabulary of {vocabulary}"
    return None
