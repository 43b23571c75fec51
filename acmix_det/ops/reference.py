"""Definition of local attention, written to be read.

Keys and values are unfolded (k * k copies in memory), as the equations say.
Every other backend is judged by this one.
"""
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor


def can_use(query: Tensor) -> Optional[str]:
    """Return why this backend cannot run, None if it can."""
    return None


def _bounce(size: int, before: int, after: int) -> Tensor:
    """Indices ``-before .. size + after - 1`` reflected into ``0 .. size-1``.

    Reflection does not repeat the border; it goes back and forth with period
    ``2 * size - 2``, so that any ``before`` and ``after`` are defined.
    """
    period = max(2 * size - 2, 1)
    indices = torch.arange(-before, size + after) % period
    return torch.where(indices < size, indices, period - indices)


def _neighborhoods(x: Tensor, kernel: int, stride: int, dilation: int,
                   padding_mode: str) -> Tensor:
    """Unfold (B, N, D, H, W) to (B, N, D, k * k, out_h, out_w)."""
    b, n, d, h, w = x.shape
    pad = dilation * (kernel // 2)
    if padding_mode == 'reflect':
        x = x[..., _bounce(h, pad, pad).to(x.device), :]
        x = x[..., _bounce(w, pad, pad).to(x.device)]
    else:
        x = F.pad(x, (pad, pad, pad, pad))
    out_h, out_w = -(-h // stride), -(-w // stride)
    x = F.unfold(
        x.reshape(b * n, d, h + 2 * pad, w + 2 * pad), kernel,
        dilation=dilation, stride=stride)
    return x.reshape(b, n, d, kernel * kernel, out_h, out_w)


def local_attention(query: Tensor, key: Optional[Tensor], value: Tensor,
                    rel_pos_h: Optional[Tensor], rel_pos_w: Optional[Tensor],
                    attn_kernel_size: int, scale: float, stride: int,
                    dilation: int, padding_mode: str) -> Tensor:
    """See :func:`acmix_det.ops.local_attention`; arguments are checked."""
    b, n, d, h, w = query.shape
    k = attn_kernel_size
    dtype = query.dtype
    out_h, out_w = -(-h // stride), -(-w // stride)
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value, rel_pos_h, rel_pos_w = (
            x if x is None else x.float()
            for x in (query, key, value, rel_pos_h, rel_pos_w))

    q = query[..., ::stride, ::stride]  # (B, N, D, out_h, out_w)
    logits = q.new_zeros(b, n, k * k, out_h, out_w)
    if key is not None:
        keys = _neighborhoods(key, k, stride, dilation, padding_mode)
        logits = logits + torch.einsum('bndhw,bndohw->bnohw', q, keys)
    if rel_pos_h is not None:
        rel_pos = torch.cat([
            rel_pos_h[..., :, None].expand(-1, -1, k, k),
            rel_pos_w[..., None, :].expand(-1, -1, k, k)
        ], 1).flatten(2)  # (N, D, k * k)
        logits = logits + torch.einsum('bndhw,ndo->bnohw', q, rel_pos)
    logits = scale * logits
    if padding_mode == 'mask':
        inside = _neighborhoods(
            q.new_ones(1, 1, 1, h, w), k, stride, dilation, 'zeros')
        logits = logits.masked_fill(inside[:, :, 0] == 0, float('-inf'))
    attn = logits.softmax(2)
    values = _neighborhoods(value, k, stride, dilation, padding_mode)
    return torch.einsum('bnohw,bndohw->bndhw', attn, values).to(dtype)
