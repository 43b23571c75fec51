"""Portable local attention: a loop over the k * k offsets in plain PyTorch.

Runs wherever PyTorch runs. The largest intermediate is the map of logits,
(B, N, k * k, out_h, out_w); keys and values are never unfolded. ``backward``
recomputes that map instead of keeping it.
"""
from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of the products made for one offset and one tile of rows; they stay
# in a CPU's cache. Other devices take the whole map at once.
_TILE_ELEMENTS = 1 << 18


def can_use(query: Tensor) -> Optional[str]:
    """Return why this backend cannot run, None if it can."""
    return None


class _Geometry(NamedTuple):
    kernel: int
    scale: float
    stride: int
    dilation: int
    padding_mode: str

    @property
    def pad(self) -> int:
        return self.dilation * (self.kernel // 2)

    def out_size(self, size: int) -> int:
        return (size + self.stride - 1) // self.stride

    def offsets(self) -> Iterator[Tuple[int, int]]:
        for dy in range(self.kernel):
            for dx in range(self.kernel):
                yield dy, dx


def _reflected(size: int, pad: int, device: torch.device) -> Tensor:
    """Indices of the padded axis, bouncing with period ``2 * size - 2``."""
    last = size - 1
    # at size 1 the period is 0: every index is 0, whatever the divisor
    period = max(2 * last, 1)
    indices = torch.arange(-pad, size + pad, device=device)
    return last - (last - indices % period).abs()


def _pad(x: Tensor, geo: _Geometry) -> Tensor:
    if geo.pad == 0:
        return x
    if geo.padding_mode == 'reflect':
        x = x.index_select(-2, _reflected(x.shape[-2], geo.pad, x.device))
        return x.index_select(-1, _reflected(x.shape[-1], geo.pad, x.device))
    return F.pad(x, (geo.pad, ) * 4)


def _unpad_grad(grad: Tensor, h: int, w: int, geo: _Geometry) -> Tensor:
    """Transpose of :func:`_pad`."""
    if geo.pad == 0:
        return grad
    if geo.padding_mode == 'reflect':
        rows = grad.new_zeros(*grad.shape[:-2], h, grad.shape[-1])
        rows.index_add_(-2, _reflected(h, geo.pad, grad.device), grad)
        cols = grad.new_zeros(*grad.shape[:-2], h, w)
        return cols.index_add_(-1, _reflected(w, geo.pad, grad.device), rows)
    return grad[..., geo.pad:geo.pad + h, geo.pad:geo.pad + w]


def _shifted(padded: Tensor, dy: int, dx: int, top: int, rows: int, cols: int,
             geo: _Geometry) -> Tensor:
    """View of the neighbors at one offset for ``rows`` output rows."""
    y = top * geo.stride + dy * geo.dilation
    x = dx * geo.dilation
    return padded[..., y:y + (rows - 1) * geo.stride + 1:geo.stride,
                  x:x + (cols - 1) * geo.stride + 1:geo.stride]


def _outside(size: int, geo: _Geometry, device: torch.device) -> Tensor:
    """Bool (k, out_size): is the neighbor of this output outside the axis?"""
    centers = torch.arange(geo.out_size(size), device=device) * geo.stride
    steps = torch.arange(geo.kernel, device=device) - geo.kernel // 2
    neighbors = centers + (steps * geo.dilation)[:, None]
    return (neighbors < 0) | (neighbors >= size)


def _attention(q: Tensor, k_pad: Optional[Tensor], rel_h: Optional[Tensor],
               rel_w: Optional[Tensor], outside: Optional[Tuple[Tensor,
                                                                Tensor]],
               top: int, geo: _Geometry) -> Tensor:
    """Softmax weights (B, N, k, k, rows, out_w) of a tile of query rows."""
    b, n, _, rows, cols = q.shape
    k = geo.kernel
    if k_pad is None:
        logits = q.new_zeros(b, n, k, k, rows, cols)
    else:
        logits = torch.stack([
            (q * _shifted(k_pad, dy, dx, top, rows, cols, geo)).sum(2)
            for dy, dx in geo.offsets()
        ], 2).unflatten(2, (k, k))
    if rel_h is not None:
        # q.r separates: k maps for the rows and k maps for the columns
        half = rel_h.shape[1]
        along_h = torch.einsum('bndhw,ndk->bnkhw', q[:, :, :half], rel_h)
        along_w = torch.einsum('bndhw,ndk->bnkhw', q[:, :, half:], rel_w)
        logits = logits + along_h.unsqueeze(3) + along_w.unsqueeze(2)
    logits = logits * geo.scale
    if outside is not None:
        outside_h, outside_w = outside
        mask = (outside_h[:, None, top:top + rows, None]
                | outside_w[None, :, None])
        logits = logits.masked_fill(mask, float('-inf'))
    return logits.flatten(2, 3).softmax(2).unflatten(2, (k, k))


def _prepare(query, key, rel_pos_h, rel_pos_w, geo: _Geometry):
    """What forward and backward share; sums run in float32 at least."""
    h, w = query.shape[-2:]
    compute = torch.promote_types(query.dtype, torch.float32)
    q = query[..., ::geo.stride, ::geo.stride].to(compute)
    k_pad = None if key is None else _pad(key.to(compute), geo)
    if rel_pos_h is not None:
        rel_pos_h, rel_pos_w = rel_pos_h.to(compute), rel_pos_w.to(compute)
    outside = None
    if geo.padding_mode == 'mask':
        outside = (_outside(h, geo, q.device), _outside(w, geo, q.device))
    return q, k_pad, rel_pos_h, rel_pos_w, outside


def _tiles(q: Tensor, value: Tensor) -> List[Tuple[int, int]]:
    """(first row, rows) of each tile of output rows."""
    b, n, d, rows, cols = q.shape
    if q.device.type != 'cpu':
        return [(0, rows)]
    per_row = max(b * n * max(d, value.shape[2]) * cols, 1)
    step = max(_TILE_ELEMENTS // per_row, 1)
    return [(top, min(step, rows - top)) for top in range(0, rows, step)]


def local_attention(query: Tensor, key: Optional[Tensor], value: Tensor,
                    rel_pos_h: Optional[Tensor], rel_pos_w: Optional[Tensor],
                    attn_kernel_size: int, scale: float, stride: int,
                    dilation: int, padding_mode: str) -> Tensor:
    """See :func:`acmix_det.ops.local_attention`; arguments are checked."""
    geo = _Geometry(attn_kernel_size, scale, stride, dilation, padding_mode)
    q, k_pad, rel_h, rel_w, outside = _prepare(query, key, rel_pos_h,
                                               rel_pos_w, geo)
    v_pad = _pad(value.to(q.dtype), geo)
    cols = q.shape[-1]
    outs = []
    for top, rows in _tiles(q, value):
        attn = _attention(q[..., top:top + rows, :], k_pad, rel_h, rel_w,
                          outside, top, geo)
        out = 0
        for dy, dx in geo.offsets():
            v = _shifted(v_pad, dy, dx, top, rows, cols, geo)
            weight = attn[:, :, dy, dx].unsqueeze(2)
            # in place after the first offset: no new map for each one
            out = out.addcmul_(weight, v) if dy or dx else weight * v
        outs.append(out)
    return torch.cat(outs, -2).to(query.dtype)


def local_attention_backward(
        grad: Tensor, query: Tensor, key: Optional[Tensor], value: Tensor,
        rel_pos_h: Optional[Tensor], rel_pos_w: Optional[Tensor],
        attn_kernel_size: int, scale: float, stride: int, dilation: int,
        padding_mode: str) -> List[Optional[Tensor]]:
    """Gradients of query, key, value, rel_pos_h and rel_pos_w.

    Those of arguments that are None are None.
    """
    geo = _Geometry(attn_kernel_size, scale, stride, dilation, padding_mode)
    h, w = query.shape[-2:]
    q, k_pad, rel_h, rel_w, outside = _prepare(query, key, rel_pos_h,
                                               rel_pos_w, geo)
    v_pad = _pad(value.to(q.dtype), geo)
    grad = grad.to(q.dtype)
    grad_q = torch.zeros_like(q)
    grad_v_pad = torch.zeros_like(v_pad)
    grad_k_pad = None if k_pad is None else torch.zeros_like(k_pad)
    grad_rel_h = None if rel_h is None else torch.zeros_like(rel_h)
    grad_rel_w = None if rel_w is None else torch.zeros_like(rel_w)
    cols = q.shape[-1]
    for top, rows in _tiles(q, value):
        q_t = q[..., top:top + rows, :]
        g_t = grad[..., top:top + rows, :]
        gq_t = grad_q[..., top:top + rows, :]
        attn = _attention(q_t, k_pad, rel_h, rel_w, outside, top, geo)
        grad_attn = torch.stack([
            (g_t * _shifted(v_pad, dy, dx, top, rows, cols, geo)).sum(2)
            for dy, dx in geo.offsets()
        ], 2).unflatten(2, (geo.kernel, geo.kernel))
        mean = (attn * grad_attn).sum((2, 3), keepdim=True)
        grad_logits = attn * (grad_attn - mean) * geo.scale
        for dy, dx in geo.offsets():
            at = (dy, dx, top, rows, cols, geo)
            _shifted(grad_v_pad, *at).addcmul_(
                attn[:, :, dy, dx].unsqueeze(2), g_t)
            if k_pad is not None:
                step = grad_logits[:, :, dy, dx].unsqueeze(2)
                gq_t.addcmul_(step, _shifted(k_pad, *at))
                _shifted(grad_k_pad, *at).addcmul_(step, q_t)
        if rel_h is not None:
            half = rel_h.shape[1]
            along_h, along_w = grad_logits.sum(3), grad_logits.sum(2)
            gq_t[:, :, :half] += torch.einsum('bnkhw,ndk->bndhw', along_h,
                                              rel_h)
            gq_t[:, :, half:] += torch.einsum('bnkhw,ndk->bndhw', along_w,
                                              rel_w)
            grad_rel_h += torch.einsum('bnkhw,bndhw->ndk', along_h,
                                       q_t[:, :, :half])
            grad_rel_w += torch.einsum('bnkhw,bndhw->ndk', along_w,
                                       q_t[:, :, half:])

    grad_query = grad_q
    if stride > 1:
        grad_query = torch.zeros_like(query, dtype=q.dtype)
        grad_query[..., ::stride, ::stride] = grad_q
    grads = [
        grad_query, None if key is None else _unpad_grad(
            grad_k_pad, h, w, geo),
        _unpad_grad(grad_v_pad, h, w, geo), grad_rel_h, grad_rel_w
    ]
    return [
        None if x is None else x.to(query.dtype).contiguous() for x in grads
    ]
