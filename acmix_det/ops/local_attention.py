"""The public operation: argument checks, choice of backend, custom op."""
import contextlib
from typing import Iterator, List, Optional, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from . import cpu_backend, export, reference, torch_backend, triton_backend
from .checks import (check_attn_kernel_size, check_choice, check_finite,
                     check_size)

PADDING_MODES = ('mask', 'zeros', 'reflect')
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKENDS = ('auto', 'reference', 'torch', 'cpu', 'triton')

MODULES = dict(
    reference=reference,
    torch=torch_backend,
    cpu=cpu_backend,
    triton=triton_backend)


def local_attention(query: Tensor,
                    key: Optional[Tensor],
                    value: Tensor,
                    attn_kernel_size: int,
                    *,
                    rel_pos_h: Optional[Tensor] = None,
                    rel_pos_w: Optional[Tensor] = None,
                    scale: float = 1.0,
                    stride: int = 1,
                    dilation: int = 1,
                    padding_mode: str = 'mask',
                    backend: str = 'auto') -> Tensor:
    r"""Attention of every pixel to the k x k neighborhood around it.

    For pixel :math:`i` and the offsets :math:`o = (dy, dx)` of its
    neighborhood

    .. math::
        logit(i, o) = scale \cdot (q_i \cdot k_{i+o} + q_i \cdot r_o),\quad
        y_i = \sum_o softmax_o(logit(i, o)) \, v_{i+o}

    with :math:`r_o = concat(rel\_pos\_h[:, dy], rel\_pos\_w[:, dx])`
    (`Stand-Alone Self-Attention in Vision Models
    <https://arxiv.org/abs/1906.05909>`_, equations 2 and 3; heads do not mix).
    Logits and softmax of half types are computed in float32.

    Shapes: B batch, N heads, D channels per head of query and key, Dv of
    value, k = ``attn_kernel_size``.

    Args:
        query (Tensor): Queries, (B, N, D, H, W).
        key (Tensor | None): Keys, (B, N, D, H, W). None leaves q . k out of
            the logits; positions are needed then.
        value (Tensor): Values, (B, N, Dv, H, W).
        attn_kernel_size (int): Extent k of the neighborhood, odd. It may
            exceed the map.
        rel_pos_h (Tensor | None): Embeddings of the row offsets,
            (N, D // 2, k). Defaults to None.
        rel_pos_w (Tensor | None): Embeddings of the column offsets,
            (N, D - D // 2, k); given if and only if ``rel_pos_h`` is.
            Defaults to None.
        scale (float): Factor on the logits. Defaults to 1.0.
        stride (int): Step between the pixels that are computed, starting at
            the first. Defaults to 1.
        dilation (int): Step between neighbors. Defaults to 1.
        padding_mode (str): What the positions outside the image are: 'mask'
            (no part in the softmax), 'zeros' (a zero key and value that take
            part) or 'reflect' (the image mirrored at its border pixels, as
            often as needed). Defaults to 'mask'.
        backend (str): 'reference' (the definition, slow), 'torch' (portable),
            'cpu' (native), 'triton' (CUDA), or 'auto' for the fastest that
            can run. A backend asked for by name is never replaced by another.
            Defaults to 'auto'.

    Returns:
        Tensor: (B, N, Dv, ceil(H / stride), ceil(W / stride)), in the type of
        query.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a shape or value breaks the rules above.
        RuntimeError: If the backend asked for cannot run here.

    Example:
        >>> import torch
        >>> from acmix_det.ops import local_attention
        >>> q, k, v = torch.rand(3, 2, 4, 8, 20, 30)
        >>> local_attention(q, k, v, 7, stride=2).shape
        torch.Size([2, 4, 8, 10, 15])
    """
    _check_tensors(query, key, value, rel_pos_h, rel_pos_w)
    attn_kernel_size = check_attn_kernel_size(attn_kernel_size)
    stride = check_size('stride', stride)
    dilation = check_size('dilation', dilation)
    _check_rel_pos(query, key, rel_pos_h, rel_pos_w, attn_kernel_size)
    if isinstance(scale, Tensor):
        raise TypeError('scale must be a number (multiply the query for a '
                        f'learned one), got {scale!r}')
    scale = check_finite('scale', scale)
    check_choice('padding_mode', padding_mode, PADDING_MODES)
    backend = _pick_backend(backend, query)

    args = (query, key, value, rel_pos_h, rel_pos_w, attn_kernel_size,
            scale, stride, dilation, padding_mode)
    if export.is_exporting() or _any_dual(args[:5]):
        # standard operators only, which an exported graph can hold and which
        # PyTorch can differentiate in forward mode
        return export.local_attention(*args)
    if backend == 'reference':
        return reference.local_attention(*args)
    return _local_attention_op(*args, backend)


def _any_dual(tensors: Sequence[Optional[Tensor]]) -> bool:
    """Whether forward-mode differentiation is going on."""
    return not torch.compiler.is_compiling() and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None
        for x in tensors)


def _check_tensors(query, key, value, rel_pos_h, rel_pos_w) -> None:
    for name, x in (('query', query), ('key', key), ('value', value),
                    ('rel_pos_h', rel_pos_h), ('rel_pos_w', rel_pos_w)):
        if x is None and name not in ('query', 'value'):
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f'{name} must be a Tensor, got {type(x).__name__}')
        if x.dtype not in _DTYPES or x.layout is not torch.strided:
            raise TypeError(
                f'{name} must be a dense tensor of type '
                f'{", ".join(map(str, _DTYPES))}, got {x.dtype}, {x.layout}')
        if x.dtype != query.dtype:
            raise TypeError(f'{name} must have the dtype of query '
                            f'({query.dtype}), got {x.dtype}')
        if x.device != query.device:
            raise ValueError(f'{name} must be on the device of query '
                             f'({query.device}), got {x.device}')
    if query.dim() != 5:
        raise ValueError('query must have the shape (B, N, D, H, W), got '
                         f'{tuple(query.shape)}')
    if 0 in query.shape[1:]:
        raise ValueError('query must have no empty dimension except the '
                         f'batch, got {tuple(query.shape)}')
    if key is not None and key.shape != query.shape:
        raise ValueError(f'key must have the shape of query '
                         f'{tuple(query.shape)}, got {tuple(key.shape)}')
    if (value.dim() != 5 or value.shape[:2] != query.shape[:2]
            or value.shape[3:] != query.shape[3:] or value.shape[2] == 0):
        b, n, _, h, w = query.shape
        raise ValueError(f'value must have the shape ({b}, {n}, Dv, {h}, {w})'
                         f', got {tuple(value.shape)}')


def _check_rel_pos(query, key, rel_pos_h, rel_pos_w, kernel) -> None:
    if (rel_pos_h is None) != (rel_pos_w is None):
        missing = 'rel_pos_h' if rel_pos_h is None else 'rel_pos_w'
        raise ValueError('rel_pos_h and rel_pos_w must be given together, got '
                         f'{missing}=None')
    if rel_pos_h is None:
        if key is None:
            raise ValueError('key must be a Tensor where there are no '
                             'relative positions, got None')
        return
    n, d = query.shape[1:3]
    for name, x, channels in (('rel_pos_h', rel_pos_h, d // 2),
                              ('rel_pos_w', rel_pos_w, d - d // 2)):
        if tuple(x.shape) != (n, channels, kernel):
            raise ValueError(f'{name} must have the shape {(n, channels, kernel)}'
                             f', got {tuple(x.shape)}')


def _pick_backend(backend: str, query: Tensor) -> str:
    check_choice('backend', backend, BACKENDS)
    if backend == 'auto':
        if query.device.type == 'cpu' and cpu_backend.can_use(query) is None:
            return 'cpu'
        if query.device.type == 'cuda':
            broken = triton_backend.broken()
            if broken is not None:  # a slow path would hide it
                raise RuntimeError(f"{broken}, or ask for backend='torch'")
            if triton_backend.can_use(query) is None:
                return 'triton'
        return 'torch'
    if query.device.type == 'meta':
        return backend  # shapes only, nothing runs
    reason = MODULES[backend].can_use(query)
    if reason is not None:
        raise RuntimeError(f'backend={backend!r} cannot run: {reason}')
    return backend


# One opaque operator for every fast backend, so that torch.compile and FLOP
# counters see one node, forward and backward.


@torch.library.custom_op('acmix_det::local_attention', mutates_args=())
def _local_attention_op(query: Tensor, key: Optional[Tensor], value: Tensor,
                        rel_pos_h: Optional[Tensor],
                        rel_pos_w: Optional[Tensor], attn_kernel_size: int,
                        scale: float, stride: int, dilation: int,
                        padding_mode: str, backend: str) -> Tensor:
    return MODULES[backend].local_attention(query, key, value, rel_pos_h,
                                             rel_pos_w, attn_kernel_size,
                                             scale, stride, dilation,
                                             padding_mode)


@_local_attention_op.register_fake
def _(query, key, value, rel_pos_h, rel_pos_w, attn_kernel_size, scale, stride,
      dilation, padding_mode, backend):
    h, w = query.shape[-2:]
    return value.new_empty(*value.shape[:3], (h + stride - 1) // stride,
                           (w + stride - 1) // stride)


@torch.library.custom_op(
    'acmix_det::local_attention_backward', mutates_args=())
def _local_attention_backward_op(grad: Tensor, query: Tensor,
                                 key: Optional[Tensor], value: Tensor,
                                 rel_pos_h: Optional[Tensor],
                                 rel_pos_w: Optional[Tensor],
                                 attn_kernel_size: int, scale: float,
                                 stride: int, dilation: int,
                                 padding_mode: str,
                                 backend: str) -> List[Tensor]:
    grads = MODULES[backend].local_attention_backward(
        grad, query, key, value, rel_pos_h, rel_pos_w, attn_kernel_size, scale,
        stride, dilation, padding_mode)
    return [g for g in grads if g is not None]


@_local_attention_backward_op.register_fake
def _(grad, query, key, value, rel_pos_h, rel_pos_w, *args):
    tensors = (query, key, value, rel_pos_h, rel_pos_w)
    return [x.new_empty(x.shape) for x in tensors if x is not None]


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _backward(ctx, grad):
    tensors = ctx.saved_tensors
    grads = iter(
        _local_attention_backward_op(grad, *tensors, *ctx.options))
    return (*(None if x is None else next(grads) for x in tensors),
            *(None for _ in ctx.options))


_local_attention_op.register_autograd(_backward, setup_context=_setup_context)


# What FLOP counters count for q . r: 'executed' is the separable form, k maps
# for the rows and k for the columns; 'paper' is a product for every offset,
# as in 1906.05909.
CONVENTIONS = ('executed', 'paper')
_convention = 'executed'


@contextlib.contextmanager
def flop_convention(name: str) -> Iterator[None]:
    """Count the multiply-adds of local attention by a convention.

    Args:
        name (str): 'executed' (what runs; the default outside) or 'paper'
            (q . r costs k * k * D per query and head, as q . k does).

    Raises:
        ValueError: If there is no such convention.
    """
    global _convention
    check_choice('name', name, CONVENTIONS)
    before, _convention = _convention, name
    try:
        yield
    finally:
        _convention = before


def count_macs(query_shape, key_shape, value_shape, rel_pos_shape, kernel,
              stride) -> int:
    """Multiply-adds of q . k, q . r and attn . v, from the shapes.

    A shape is None where there is no such tensor.
    """
    b, n, d, h, w = query_shape
    positions = b * n * -(-h // stride) * -(-w // stride)
    per_position = kernel * kernel * value_shape[2]
    if key_shape is not None:
        per_position += kernel * kernel * d
    if rel_pos_shape is not None:
        per_position += kernel * d * (kernel if _convention == 'paper' else 1)
    return positions * per_position


@register_flop_formula(torch.ops.acmix_det.local_attention)
def _flops(query, key, value, rel_pos_h, rel_pos_w, attn_kernel_size, scale,
           stride, *args, out_shape=None, **kwargs) -> int:
    return 2 * count_macs(query, key, value, rel_pos_h, attn_kernel_size,
                         stride)


@register_flop_formula(torch.ops.acmix_det.local_attention_backward)
def _backward_flops(grad, query, key, value, rel_pos_h, rel_pos_w,
                    attn_kernel_size, scale, stride, *args, out_shape=None,
                    **kwargs) -> int:
    # the forward's logits again, then two products for each of its own
    forward = count_macs(query, key, value, rel_pos_h, attn_kernel_size, stride)
    values = count_macs(query, None, value, None, attn_kernel_size, stride)
    return 2 * (3 * forward - values)
