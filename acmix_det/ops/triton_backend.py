"""Fused local attention for CUDA in Triton.

A program holds a tile of queries of one head, reads the rows of keys and
values around it one after another and keeps a running softmax; no map of
logits is ever in memory. ``backward`` recomputes the logits: it keeps two
numbers per query and head, works by tiles of queries for their gradients and
by tiles of keys for those of key and value, and adds in a fixed order.

Half types are multiplied as they are, attention weights rounded to them, and
summed in float32; float32 is multiplied in float32, not in TF32.

Triton is imported when the first tensor comes, not before: the package works
without it.
"""
import importlib.util
import math
from types import ModuleType
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_WIDTH = 256  # channels per head in one program
_MIN_BLOCK = 16  # least extent that tl.dot takes


def _kernels() -> ModuleType:
    from . import _triton_kernels
    return _triton_kernels


# torch.compile sees constants, not the import and the driver.
@torch.compiler.assume_constant_result
def broken() -> Optional[str]:
    """Return why an installed Triton does not import, None if it does."""
    if importlib.util.find_spec('triton') is None:
        return None
    try:
        _kernels()
    except Exception as error:  # whatever a broken package raises
        return (f'triton does not import ({type(error).__name__}: {error}); '
                'reinstall it with "pip install --force-reinstall triton"')
    return None


@torch.compiler.assume_constant_result
def _cannot_run(device: torch.device) -> Optional[str]:
    if importlib.util.find_spec('triton') is None:
        return ('it needs the package triton; install it with '
                '"pip install triton"')
    reason = broken()
    if reason is not None:
        return reason
    if _kernels().INTERPRETED:
        return None
    if device.type != 'cuda':
        return f'it needs tensors on a CUDA device, got {device}'
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return ('it needs a device of compute capability 8.0 or above, '
                    f'got {".".join(map(str, capability))}')
    return None


def can_use(query: Tensor) -> Optional[str]:
    """Return why this backend cannot run, None if it can."""
    if query.dtype not in _DTYPES:
        return ('it computes in float32 and knows float32, float16 and '
                f'bfloat16, got {query.dtype}')
    if query.shape[2] > _MAX_WIDTH:
        return (f'it needs at most {_MAX_WIDTH} channels per head, got '
                f'{query.shape[2]}')
    return _cannot_run(query.device)


def _block(size: int) -> int:
    """Least power of two that holds ``size`` and that tl.dot takes."""
    return max(_MIN_BLOCK, 1 << (size - 1).bit_length())


class _Tile(NamedTuple):
    """Queries, or keys, of one program."""
    height: int
    width: int
    num_warps: int
    num_stages: int


def _tile(width: int) -> _Tile:
    """Tile for a block of ``width`` channels.

    With 8 columns and a k of up to 9, one block of 16 columns holds what a
    tile sees. Wide heads leave room for fewer positions: compiled for compute
    capabilities 8.0 and 9.0, every kernel stays below 99 KiB of shared memory.
    """
    if width <= 64:
        return _Tile(8, 8, num_warps=4, num_stages=2)
    if width <= 128:
        return _Tile(4, 8, num_warps=4, num_stages=2)
    return _Tile(4, 4, num_warps=8, num_stages=1)


def _halo(rows: int, columns: int) -> Dict[str, int]:
    return dict(
        HALO_H=rows, BLOCKS=-(-columns // _MIN_BLOCK), BLOCK_W=_MIN_BLOCK)


class _Plan:
    """Grids and arguments of the kernels for one problem."""

    def __init__(self, query: Tensor, key: Optional[Tensor], value: Tensor,
                 rel_pos_h: Optional[Tensor], rel_pos_w: Optional[Tensor],
                 attn_kernel_size: int, scale: float, stride: int,
                 dilation: int, padding_mode: str) -> None:
        self.b, self.n, d, self.h, self.w = query.shape
        self.out_size = -(-self.h // stride), -(-self.w // stride)
        self.stride, self.dilation = stride, dilation
        self.kernel, self.reflect = attn_kernel_size, padding_mode == 'reflect'
        common = math.gcd(stride, dilation)
        self.classes, self.step = dilation // common, stride // common
        self.tile = _tile(max(_block(d), _block(value.shape[2])))
        rel_pos = None
        if rel_pos_h is not None:
            rel_pos = torch.cat([rel_pos_h, rel_pos_w], 1)  # (N, D, k)
        self.arguments = dict(
            query=query, key=key, value=value, rel_pos=rel_pos, heads=self.n,
            head_dim=d, value_dim=value.shape[2], half=d // 2, height=self.h,
            width=self.w, out_h=self.out_size[0], out_w=self.out_size[1],
            scale=scale, stride=stride, dilation=dilation,
            classes=self.classes, **_strides('query', query),
            **_strides('key', key), **_strides('value', value),
            HAS_KEY=key is not None, HAS_REL_POS=rel_pos is not None,
            PADDING_MODE=padding_mode, KERNEL=attn_kernel_size,
            STEP=self.step, TILE_H=self.tile.height, TILE_W=self.tile.width,
            BLOCK_D=_block(d), BLOCK_DV=_block(value.shape[2]),
            num_warps=self.tile.num_warps, num_stages=self.tile.num_stages)

    def query_tiles(self) -> Tuple[int, int]:
        rows, cols = (-(-size // self.classes) for size in self.out_size)
        return -(-rows // self.tile.height), -(-cols // self.tile.width)

    def query_programs(self) -> int:
        tiles_h, tiles_w = self.query_tiles()
        return self.b * self.n * self.classes**2 * tiles_h * tiles_w

    def launch_by_queries(self, name: str, grad: Optional[Tensor],
                          **arguments) -> None:
        """Run a pass of ``query_kernel``; it leaves out what is not given."""
        for unused in ('out', 'log_sum', 'delta', 'grad_query',
                       'grad_rel_pos'):
            arguments.setdefault(unused, None)
        tiles_h, tiles_w = self.query_tiles()
        halo = _halo(*(self.step * (size - 1) + self.kernel
                       for size in self.tile[:2]))
        self._launch(
            _kernels().query_kernel, self.query_programs(), grad_out=grad,
            **_strides('grad', grad), tiles_h=tiles_h, tiles_w=tiles_w,
            PASS=name, BLOCK_K=_block(self.kernel), **halo, **arguments)

    def launch_by_keys(self, grad: Tensor, pad: int, **arguments) -> None:
        radius = self.kernel // 2
        # keys of a lattice: those that a query sees, and that are stored
        first = -radius
        if not self.reflect:
            before = (self.classes - 1) * self.stride // self.dilation
            first = max(first, -before)
        tiles = []
        for size, out_size, tile in zip((self.h, self.w), self.out_size,
                                        self.tile):
            last = self.step * (-(-out_size // self.classes) - 1) + radius
            if not self.reflect:
                last = min(last, (size - 1) // self.dilation)
            tiles.append(-(-(last + 1 - first) // tile))
        halo = _halo(*(-(-(size - 1 + 2 * radius) // self.step) + 1
                       for size in self.tile[:2]))
        self._launch(
            _kernels().key_grad_kernel,
            self.b * self.n * self.classes**2 * math.prod(tiles),
            grad_out=grad, **_strides('grad', grad), tiles_h=tiles[0],
            tiles_w=tiles[1], first=first, pad=pad, padded_h=self.h + 2 * pad,
            padded_w=self.w + 2 * pad, **halo, **arguments)

    def _launch(self, kernel, programs: int, **arguments) -> None:
        if programs == 0:
            return
        # a kernel runs on the current device
        with torch.cuda.device_of(self.arguments['query']):
            kernel[(programs, )](**self.arguments, **arguments)


def _strides(name: str, x: Optional[Tensor]) -> Dict[str, int]:
    strides = (0, ) * 5 if x is None else x.stride()
    return {f'{name}_{axis}': s for axis, s in zip('bndhw', strides)}


def _value_chunks(x: Tensor) -> Tuple[Tensor, ...]:
    return x.split(_MAX_WIDTH, 2)


def _fold(grad: Tensor, axis: int, size: int, pad: int) -> Tensor:
    """Add what lies outside an axis to the pixels it mirrors.

    Position ``i`` of a reflected axis is pixel ``i`` or ``period - i``,
    modulo the period; the order of the sum does not change from run to run,
    which index_add_ on CUDA does not promise.
    """
    period = max(2 * size - 2, 1)
    grad = grad.movedim(axis, -1)
    before = -pad % period
    after = -(before + grad.shape[-1]) % period
    # the padded axis starts at pixel -pad, now at a multiple of the period
    grad = torch.nn.functional.pad(grad, (before, after))
    grad = grad.unflatten(-1, (-1, period)).sum(-2)
    folded = grad[..., :size].clone()
    if size > 2:
        folded[..., 1:-1] += grad[..., size:].flip(-1)
    return folded.movedim(-1, axis)


def local_attention(query: Tensor, key: Optional[Tensor], value: Tensor,
                    rel_pos_h: Optional[Tensor], rel_pos_w: Optional[Tensor],
                    attn_kernel_size: int, scale: float, stride: int,
                    dilation: int, padding_mode: str) -> Tensor:
    """See :func:`acmix_det.ops.local_attention`; arguments are checked."""
    outs = []
    for v in _value_chunks(value):
        plan = _Plan(query, key, v, rel_pos_h, rel_pos_w, attn_kernel_size,
                     scale, stride, dilation, padding_mode)
        out = value.new_empty(*v.shape[:3], *plan.out_size)
        plan.launch_by_queries('forward', None, out=out)
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def _chunk_backward(grad: Tensor, plan: _Plan) -> List[Optional[Tensor]]:
    """Gradients of query, key, value and both positions in one tensor."""
    query, key, value, rel_pos = (
        plan.arguments[name] for name in ('query', 'key', 'value', 'rel_pos'))
    statistics = dict(
        log_sum=query.new_empty(
            plan.b, plan.n, *plan.out_size, dtype=torch.float32))
    statistics['delta'] = torch.empty_like(statistics['log_sum'])
    plan.launch_by_queries('statistics', grad, **statistics)

    # what no query sees has a gradient of zero
    grad_query = query.new_zeros(query.shape)
    grad_rel_pos = None
    if rel_pos is not None:
        grad_rel_pos = query.new_empty(
            plan.b, plan.n, plan.query_programs() // max(plan.b * plan.n, 1),
            *rel_pos.shape[1:], dtype=torch.float32)
    plan.launch_by_queries(
        'gradient', grad, grad_query=grad_query, grad_rel_pos=grad_rel_pos,
        **statistics)
    if rel_pos is not None:
        grad_rel_pos = grad_rel_pos.sum((0, 2))

    pad = plan.dilation * (plan.kernel // 2) if plan.reflect else 0
    dtype = torch.float32 if pad else query.dtype
    grad_key, grad_value = (
        None if x is None else x.new_zeros(
            *x.shape[:3], plan.h + 2 * pad, plan.w + 2 * pad, dtype=dtype)
        for x in (key, value))
    plan.launch_by_keys(
        grad, pad, grad_key=grad_key, grad_value=grad_value, **statistics)
    if pad:
        grad_key, grad_value = (
            None if x is None else _fold(
                _fold(x, -2, plan.h, pad), -1, plan.w, pad)
            for x in (grad_key, grad_value))
    return [grad_query, grad_key, grad_value, grad_rel_pos]


def local_attention_backward(
        grad: Tensor, query: Tensor, key: Optional[Tensor], value: Tensor,
        rel_pos_h: Optional[Tensor], rel_pos_w: Optional[Tensor],
        attn_kernel_size: int, scale: float, stride: int, dilation: int,
        padding_mode: str) -> List[Optional[Tensor]]:
    """Gradients of query, key, value, rel_pos_h and rel_pos_w.

    Those of arguments that are None are None.
    """
    # the gradients of the logits are linear in the channels of value
    chunks = [
        _chunk_backward(
            g, _Plan(query, key, v, rel_pos_h, rel_pos_w, attn_kernel_size,
                     scale, stride, dilation, padding_mode))
        for g, v in zip(_value_chunks(grad), _value_chunks(value))
    ]
    grad_query, grad_key, grad_value, grad_rel_pos = chunks[0]
    for more_query, more_key, more_value, more_rel_pos in chunks[1:]:
        grad_query = grad_query + more_query
        grad_value = torch.cat([grad_value, more_value], 2)
        if key is not None:
            grad_key = grad_key + more_key
        if rel_pos_h is not None:
            grad_rel_pos = grad_rel_pos + more_rel_pos
    grads = [grad_query, grad_key, grad_value, None, None]
    if rel_pos_h is not None:
        half = rel_pos_h.shape[1]
        grads[3:] = grad_rel_pos[:, :half], grad_rel_pos[:, half:]
    return [
        None if x is None else x.to(query.dtype).contiguous() for x in grads
    ]
