"""Approximate a convolution by what attention layers can compute."""
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LowRank(NamedTuple):
    """Groups of kernels as sums of a few products.

    Attributes:
        left (Tensor): (groups, outputs per group, taps, rank).
        right (Tensor): (groups, rank, Cin), orthonormal rows.
        error (float): Norm of what is left out, relative to the kernels.
    """
    left: Tensor
    right: Tensor
    error: float


def low_rank_groups(weight: Tensor, groups: int, rank: int) -> LowRank:
    """Best approximation of the kernels of each group by a truncated SVD.

    Args:
        weight (Tensor): Kernels, (Cout, Cin, kh, kw); consecutive output
            channels form a group.
        groups (int): Groups, a divisor of Cout.
        rank (int): Products for each group.

    Returns:
        LowRank: Factors in the type of ``weight``.
    """
    # a row for every output and tap
    rows = weight.double().flatten(2).transpose(1, 2).unflatten(
        0, (groups, -1))  # (groups, outputs, taps, Cin)
    u, s, v = torch.linalg.svd(rows.flatten(1, 2), full_matrices=False)
    error = s[:, rank:].square().sum().sqrt() / s.square().sum().sqrt()
    kept = min(rank, s.shape[1])
    left = weight.new_zeros(*rows.shape[:3], rank)
    right = weight.new_zeros(groups, rank, weight.shape[1])
    left[..., :kept] = (u * s[:, None])[..., :kept].unflatten(
        1, rows.shape[1:3]).to(weight)
    right[:, :kept] = v[:, :kept].to(weight)
    return LowRank(left, right, float(error))


class SeparableFit(NamedTuple):
    """Kernels of each head as one map times weights of rows and columns.

    Attributes:
        value (Tensor): Pointwise weights, (Cout, Cin).
        rows (Tensor): Weights of the rows, (heads, kh), not negative, sum 1.
        cols (Tensor): Weights of the columns, (heads, kw), likewise.
        error (float): Norm of what is left out, relative to the kernels.
    """
    value: Tensor
    rows: Tensor
    cols: Tensor
    error: float


def separable_fit(weight: Tensor, heads: int,
                  iterations: int = 50) -> SeparableFit:
    """Approximate kernels by one attention map for each head.

    Minimizes :math:`|w_{o,c,y,x} - v_{o,c} \\, rows_{n,y} \\, cols_{n,x}|`
    over v and non-negative rows and cols, n the head of channel o, by
    projected power iterations from a start at every tap and one in the middle
    of them.

    Args:
        weight (Tensor): Kernels, (Cout, Cin, kh, kw); consecutive output
            channels form a head.
        heads (int): Heads, a divisor of Cout.
        iterations (int): Steps of the iteration. Defaults to 50.

    Returns:
        SeparableFit: Factors in the type of ``weight``.
    """
    kh, kw = weight.shape[2:]
    kernels = weight.double().flatten(2).unflatten(0, (heads, -1)).flatten(
        1, 2)  # (heads, pairs of channels, taps)
    gram = kernels.transpose(1, 2) @ kernels
    gram = gram.unflatten(2, (kh, kw)).unflatten(1, (kh, kw))
    starts = torch.eye(kh * kw, dtype=gram.dtype, device=gram.device)
    starts = torch.cat([starts + 0.1, torch.ones_like(starts[:1])])
    starts = starts.unflatten(1, (kh, kw))
    rows = starts.sum(2).expand(heads, -1, -1)  # (heads, starts, kh)
    cols = starts.sum(1).expand(heads, -1, -1)

    def unit(x: Tensor) -> Tensor:
        x = x.clamp(min=0)
        return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-30)

    rows, cols = unit(rows), unit(cols)
    for _ in range(iterations):
        rows = unit(
            torch.einsum('nyxab,nsx,nsa,nsb->nsy', gram, cols, rows, cols))
        cols = unit(
            torch.einsum('nyxab,nsy,nsa,nsb->nsx', gram, rows, rows, cols))
    explained = torch.einsum('nyxab,nsy,nsx,nsa,nsb->ns', gram, rows, cols,
                             rows, cols)
    best = explained.argmax(1)[:, None, None]
    rows = rows.take_along_dim(best, 1)[:, 0]
    cols = cols.take_along_dim(best, 1)[:, 0]
    total = kernels.square().sum()
    left_out = total - explained.max(1).values.sum()
    value = torch.einsum('npyx,ny,nx->np', kernels.unflatten(2, (kh, kw)),
                         rows, cols)
    # the sum of a softmax is 1
    sums = rows.sum(1) * cols.sum(1)
    value = (value * sums[:, None]).reshape(weight.shape[:2])
    rows, cols = (x / x.sum(1, keepdim=True).clamp(min=1e-30)
                  for x in (rows, cols))
    error = (left_out.clamp(min=0) / total).sqrt()
    return SeparableFit(*(x.to(weight) for x in (value, rows, cols)),
                        float(error))


def expected_relu(mean: Tensor, std: Tensor) -> Tensor:
    """Mean of a rectified normal variable.

    Args:
        mean (Tensor): Mean before the ReLU.
        std (Tensor): Standard deviation before it, same shape.

    Returns:
        Tensor: Same shape.
    """
    normal = torch.distributions.Normal(torch.zeros_like(mean), 1.)
    ratio = mean / std.clamp(min=1e-6)
    return mean * normal.cdf(ratio) + std * normal.log_prob(ratio).exp()


def padded_log(weights: Tensor, size: int, floor: float) -> Tensor:
    """Logits whose softmax is ``weights`` in the middle of ``size`` places.

    Args:
        weights (Tensor): (heads, k), not negative.
        size (int): Places, at least k, with the same parity.
        floor (float): Least weight, relative to the largest; the places
            outside have it too.

    Returns:
        Tensor: (heads, size), the largest of each head is 0.
    """
    top = weights.amax(1, keepdim=True)
    logits = (weights / top).clamp(min=floor).log()
    margin = (size - weights.shape[1]) // 2
    return F.pad(logits, (margin, margin), value=math.log(floor))
