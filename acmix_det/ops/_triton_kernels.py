"""Kernels of :mod:`acmix_det.ops.triton_backend`, which alone imports them.

A stride and a dilation leave lattices of pixels that never meet: the queries
``class + classes * i`` see only the keys ``class * stride + dilation * j``,
and query ``i`` sees the keys with ``|step * i - j| <= KERNEL // 2``. On one
lattice the keys around a tile of queries are dense (for ``step`` 1), so every
program works on one lattice of one head, whatever stride and dilation are.

Tiles of tensors are (positions, channels), logits (queries, keys) or, where
the keys are the tile, (keys, queries).
"""
import os

import triton
import triton.language as tl

# What triton itself takes for true.
INTERPRETED = os.environ.get('TRITON_INTERPRET', '').lower() in ('1', 'true',
                                                                 'on', 'y',
                                                                 'yes')
_UPCAST = tl.constexpr(INTERPRETED)
_LOWEST = tl.constexpr(-3e38)  # finite: the difference of two is no NaN


@triton.jit
def _dot(a, b):
    # The interpreter multiplies the bit patterns of bfloat16.
    if _UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision='ieee')


@triton.jit
def _bounce(i, size):
    """Reflect indices into ``0 .. size - 1``, with period 2 * size - 2."""
    period = tl.maximum(2 * size - 2, 1)
    # right for both signs that % may give to negative numbers
    i = (i % period + period) % period
    return tl.minimum(i, period - i)


@triton.jit
def _offsets(b, n, channels, y, x, stride_b, stride_n, stride_d, stride_h,
             stride_w):
    """Offsets (positions, channels) in 64 bits."""
    head = b.to(tl.int64) * stride_b + n.to(tl.int64) * stride_n
    pixels = y.to(tl.int64) * stride_h + x.to(tl.int64) * stride_w
    return (head + pixels)[:, None] + (channels.to(tl.int64) *
                                       stride_d)[None, :]


@triton.jit
def _program(heads, classes, tiles_h, tiles_w):
    """What a program works on: batch, head, class (y, x), tile (y, x)."""
    pid = tl.program_id(0)
    tile_x = pid % tiles_w
    pid = pid // tiles_w
    tile_y = pid % tiles_h
    pid = pid // tiles_h
    class_x = pid % classes
    pid = pid // classes
    class_y = pid % classes
    pid = pid // classes
    return pid // heads, pid % heads, class_y, class_x, tile_y, tile_x


@triton.jit
def _key_pixels(y, x, height, width, PADDING_MODE: tl.constexpr):
    """Where keys lie in the image, and whether they do."""
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    if PADDING_MODE == 'reflect':
        y = _bounce(y, height)
        x = _bounce(x, width)
        inside = x >= 0  # all
    return y, x, inside


@triton.jit
def _rel_pos(rel_pos, n, channels, step, head_dim, KERNEL: tl.constexpr):
    """Embedding of one step along both axes: rows first, then columns."""
    offsets = (n * head_dim + channels) * KERNEL + step
    return tl.load(
        rel_pos + offsets, mask=channels < head_dim, other=0.).to(tl.float32)


@triton.jit
def _position_logits(q, r, of_rows):
    """q.r of one step along the rows and along the columns."""
    products = q.to(tl.float32) * r[None, :]
    return (tl.sum(tl.where(of_rows, products, 0.), 1),
            tl.sum(tl.where(of_rows, 0., products), 1))


@triton.jit
def query_kernel(
        query, key, value, rel_pos, out, grad_out, log_sum, delta, grad_query,
        grad_rel_pos,
        heads, head_dim, value_dim, half, height, width, out_h, out_w, scale,
        stride, dilation, classes, tiles_h, tiles_w,
        query_b, query_n, query_d, query_h, query_w,
        key_b, key_n, key_d, key_h, key_w,
        value_b, value_n, value_d, value_h, value_w,
        grad_b, grad_n, grad_d, grad_h, grad_w,
        PASS: tl.constexpr, HAS_KEY: tl.constexpr, HAS_REL_POS: tl.constexpr,
        PADDING_MODE: tl.constexpr, KERNEL: tl.constexpr, STEP: tl.constexpr,
        TILE_H: tl.constexpr, TILE_W: tl.constexpr, HALO_H: tl.constexpr,
        BLOCKS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):
    """One tile of queries against the rows of its halo, one after another.

    The halo has HALO_H rows and BLOCKS blocks of BLOCK_W columns.

    PASS 'forward' writes ``out``. PASS 'statistics' writes what the backward
    needs of every query: the logarithm of the softmax's denominator and
    ``delta``, the mean gradient of its attention. PASS 'gradient' reads them
    and writes ``grad_query`` and the tile's share of the gradient of the
    positions: ``grad_rel_pos`` has one (head_dim, KERNEL) per program.
    """
    b, n, class_y, class_x, tile_y, tile_x = _program(heads, classes, tiles_h,
                                                      tiles_w)
    tile = tl.arange(0, TILE_H * TILE_W)
    iy = tile_y * TILE_H + tile // TILE_W
    ix = tile_x * TILE_W + tile % TILE_W
    oy = class_y + classes * iy
    ox = class_x + classes * ix
    in_map = (oy < out_h) & (ox < out_w)
    channels = tl.arange(0, BLOCK_D)
    value_channels = tl.arange(0, BLOCK_DV)
    of_rows = (channels < half)[None, :]
    steps = tl.arange(0, BLOCK_K)[None, :]

    in_query = in_map[:, None] & (channels < head_dim)[None, :]
    in_out = in_map[:, None] & (value_channels < value_dim)[None, :]
    statistics_at = ((b * heads + n).to(tl.int64) * out_h + oy) * out_w + ox
    q = tl.load(
        query + _offsets(b, n, channels, oy * stride, ox * stride, query_b,
                         query_n, query_d, query_h, query_w),
        mask=in_query, other=0.)
    if PASS != 'forward':
        g = tl.load(
            grad_out + _offsets(b, n, value_channels, oy, ox, grad_b, grad_n,
                                grad_d, grad_h, grad_w),
            mask=in_out, other=0.)
    # q.r separates: a logit per row offset and one per column offset
    along_h = tl.zeros((TILE_H * TILE_W, BLOCK_K), tl.float32)
    along_w = tl.zeros((TILE_H * TILE_W, BLOCK_K), tl.float32)
    if HAS_REL_POS:
        for step in range(KERNEL):
            r = _rel_pos(rel_pos, n, channels, step, head_dim, KERNEL)
            of_h, of_w = _position_logits(q, r, of_rows)
            along_h = tl.where(steps == step, of_h[:, None], along_h)
            along_w = tl.where(steps == step, of_w[:, None], along_w)

    if PASS == 'gradient':
        log_total = tl.load(log_sum + statistics_at, mask=in_map, other=0.)
        mean = tl.load(delta + statistics_at, mask=in_map, other=0.)
        acc = tl.zeros((TILE_H * TILE_W, BLOCK_D), tl.float32)
        grad_along_h = tl.zeros((TILE_H * TILE_W, BLOCK_K), tl.float32)
        grad_along_w = tl.zeros((TILE_H * TILE_W, BLOCK_K), tl.float32)
    else:
        largest = tl.full((TILE_H * TILE_W, ), _LOWEST, tl.float32)
        total = tl.zeros((TILE_H * TILE_W, ), tl.float32)
        acc = tl.zeros((TILE_H * TILE_W, BLOCK_DV), tl.float32)
    jy = tile_y * TILE_H * STEP - KERNEL // 2
    for block in range(BLOCKS):
        jx = tile_x * TILE_W * STEP - KERNEL // 2 + block * BLOCK_W
        jx += tl.arange(0, BLOCK_W)
        halo_x = class_x * stride + dilation * jx
        dx = jx[None, :] - STEP * ix[:, None] + KERNEL // 2
        near_x = in_map[:, None] & (dx >= 0) & (dx < KERNEL)
        # the same for every row of keys
        block_along_w = tl.zeros((TILE_H * TILE_W, BLOCK_W), tl.float32)
        if HAS_REL_POS:
            for step in range(KERNEL):
                of_w = tl.sum(tl.where(steps == step, along_w, 0.), 1)
                block_along_w = tl.where(dx == step, of_w[:, None],
                                         block_along_w)
        if PASS == 'gradient':
            block_grad_w = tl.zeros((TILE_H * TILE_W, BLOCK_W), tl.float32)
        for row in range(HALO_H):
            dy = (jy + row - STEP * iy + KERNEL // 2)[:, None]
            near = near_x & (dy >= 0) & (dy < KERNEL)
            halo_y = class_y * stride + dilation * (jy + row)
            y, x, inside = _key_pixels(halo_y + tl.zeros_like(halo_x), halo_x,
                                       height, width, PADDING_MODE)
            if PADDING_MODE == 'mask':
                near = near & inside[None, :]
            logits = block_along_w
            if HAS_REL_POS:
                of_h = tl.sum(tl.where(steps == dy, along_h, 0.), 1)
                logits += of_h[:, None]
            if HAS_KEY:
                k = tl.load(
                    key + _offsets(b, n, channels, y, x, key_b, key_n, key_d,
                                   key_h, key_w),
                    mask=inside[:, None] & (channels < head_dim)[None, :],
                    other=0.)
                logits += _dot(q, tl.trans(k))
            logits = tl.where(near, logits * scale, float('-inf'))
            v = tl.load(
                value + _offsets(b, n, value_channels, y, x, value_b, value_n,
                                 value_d, value_h, value_w),
                mask=inside[:, None] & (value_channels < value_dim)[None, :],
                other=0.)
            if PASS == 'gradient':
                attn = tl.exp(logits - log_total[:, None])
                grad_logits = attn * (_dot(g, tl.trans(v)) - mean[:, None])
                if HAS_KEY:
                    acc += _dot(grad_logits.to(k.dtype), k)
                if HAS_REL_POS:
                    of_h = tl.sum(grad_logits, 1)
                    grad_along_h += tl.where(steps == dy, of_h[:, None], 0.)
                    block_grad_w += grad_logits
            else:
                larger = tl.maximum(largest, tl.max(logits, 1))
                attn = tl.exp(logits - larger[:, None])
                shrink = tl.exp(largest - larger)
                total = total * shrink + tl.sum(attn, 1)
                acc = acc * shrink[:, None] + _dot(attn.to(v.dtype), v)
                largest = larger
        if PASS == 'gradient' and HAS_REL_POS:
            for step in range(KERNEL):
                of_w = tl.sum(tl.where(dx == step, block_grad_w, 0.), 1)
                grad_along_w += tl.where(steps == step, of_w[:, None], 0.)

    if PASS == 'gradient':
        if HAS_REL_POS:
            share_at = tl.program_id(0).to(tl.int64) * head_dim + channels
            for step in range(KERNEL):
                r = _rel_pos(rel_pos, n, channels, step, head_dim, KERNEL)
                of_h = tl.sum(tl.where(steps == step, grad_along_h, 0.), 1)
                of_w = tl.sum(tl.where(steps == step, grad_along_w, 0.), 1)
                grad_step = tl.where(of_rows, of_h[:, None], of_w[:, None])
                acc += grad_step * r[None, :]
                tl.store(
                    grad_rel_pos + share_at * KERNEL + step,
                    tl.sum(grad_step * q.to(tl.float32), 0) * scale,
                    mask=channels < head_dim)
        pixels = height * width
        at = _offsets(b * heads + n, n * 0, channels, oy * stride,
                      ox * stride, head_dim * pixels, 0, pixels, width, 1)
        tl.store(
            grad_query + at, (acc * scale).to(grad_query.dtype.element_ty),
            mask=in_query)
    else:
        # a query outside the map has no keys
        total = tl.where(in_map, total, 1.)
        acc = acc / total[:, None]
        if PASS == 'forward':
            pixels = out_h * out_w
            at = _offsets(b * heads + n, n * 0, value_channels, oy, ox,
                          value_dim * pixels, 0, pixels, out_w, 1)
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=in_out)
        else:
            tl.store(
                log_sum + statistics_at, largest + tl.log(total), mask=in_map)
            tl.store(
                delta + statistics_at, tl.sum(acc * g.to(tl.float32), 1),
                mask=in_map)


@triton.jit
def key_grad_kernel(
        query, key, value, rel_pos, grad_out, log_sum, delta, grad_key,
        grad_value,
        heads, head_dim, value_dim, half, height, width, out_h, out_w, scale,
        stride, dilation, classes, tiles_h, tiles_w, first, pad, padded_h,
        padded_w,
        query_b, query_n, query_d, query_h, query_w,
        key_b, key_n, key_d, key_h, key_w,
        value_b, value_n, value_d, value_h, value_w,
        grad_b, grad_n, grad_d, grad_h, grad_w,
        HAS_KEY: tl.constexpr, HAS_REL_POS: tl.constexpr,
        PADDING_MODE: tl.constexpr, KERNEL: tl.constexpr, STEP: tl.constexpr,
        TILE_H: tl.constexpr, TILE_W: tl.constexpr, HALO_H: tl.constexpr,
        BLOCKS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_DV: tl.constexpr):
    """Gradients of one tile of keys and values, from the queries around it.

    Tiles start at key ``first`` of each lattice. The gradients have ``pad``
    pixels around the image, (padded_h, padded_w) in all.
    """
    b, n, class_y, class_x, tile_y, tile_x = _program(heads, classes, tiles_h,
                                                      tiles_w)
    tile = tl.arange(0, TILE_H * TILE_W)
    first_y = first + tile_y * TILE_H
    first_x = first + tile_x * TILE_W
    jy = first_y + tile // TILE_W
    jx = first_x + tile % TILE_W
    key_y = class_y * stride + dilation * jy
    key_x = class_x * stride + dilation * jx
    y, x, inside = _key_pixels(key_y, key_x, height, width, PADDING_MODE)
    channels = tl.arange(0, BLOCK_D)
    value_channels = tl.arange(0, BLOCK_DV)
    of_rows = (channels < half)[None, :]

    # the first query that may see the tile, rounded down (the terms with
    # 2 * (KERNEL // 2) keep the dividend positive)
    shift = 2 * (KERNEL // 2)
    iy = (first_y - KERNEL // 2 + shift * STEP) // STEP - shift
    left = (first_x - KERNEL // 2 + shift * STEP) // STEP - shift

    v = tl.load(
        value + _offsets(b, n, value_channels, y, x, value_b, value_n,
                         value_d, value_h, value_w),
        mask=inside[:, None] & (value_channels < value_dim)[None, :],
        other=0.)
    acc_v = tl.zeros((TILE_H * TILE_W, BLOCK_DV), tl.float32)
    if HAS_KEY:
        k = tl.load(
            key + _offsets(b, n, channels, y, x, key_b, key_n, key_d, key_h,
                           key_w),
            mask=inside[:, None] & (channels < head_dim)[None, :], other=0.)
        acc_k = tl.zeros((TILE_H * TILE_W, BLOCK_D), tl.float32)
    for block in range(BLOCKS):
        ix = left + block * BLOCK_W + tl.arange(0, BLOCK_W)
        ox = class_x + classes * ix
        dx = jx[:, None] - STEP * ix[None, :] + KERNEL // 2
        near_x = (dx >= 0) & (dx < KERNEL)
        for row in range(HALO_H):
            oy = tl.zeros_like(ox) + class_y + classes * (iy + row)
            in_map = (iy + row >= 0) & (oy < out_h) & (ix >= 0) & (ox < out_w)
            dy = jy - STEP * (iy + row) + KERNEL // 2
            near = near_x & ((dy >= 0) & (dy < KERNEL))[:, None]
            near = near & in_map[None, :]
            q = tl.load(
                query + _offsets(b, n, channels, oy * stride, ox * stride,
                                 query_b, query_n, query_d, query_h, query_w),
                mask=in_map[:, None] & (channels < head_dim)[None, :],
                other=0.)
            g = tl.load(
                grad_out + _offsets(b, n, value_channels, oy, ox, grad_b,
                                    grad_n, grad_d, grad_h, grad_w),
                mask=in_map[:, None] & (value_channels < value_dim)[None, :],
                other=0.)
            at = ((b * heads + n).to(tl.int64) * out_h + oy) * out_w + ox
            log_total = tl.load(log_sum + at, mask=in_map, other=0.)
            mean = tl.load(delta + at, mask=in_map, other=0.)
            logits = tl.zeros((TILE_H * TILE_W, BLOCK_W), tl.float32)
            if HAS_KEY:
                logits += _dot(k, tl.trans(q))
            if HAS_REL_POS:
                for step in range(KERNEL):
                    r = _rel_pos(rel_pos, n, channels, step, head_dim, KERNEL)
                    of_h, of_w = _position_logits(q, r, of_rows)
                    same_h, same_w = (dy == step)[:, None], dx == step
                    logits += tl.where(same_h, of_h[None, :], 0.)
                    logits += tl.where(same_w, of_w[None, :], 0.)
            logits = tl.where(near, logits * scale, float('-inf'))
            attn = tl.exp(logits - log_total[None, :])
            acc_v += _dot(attn.to(g.dtype), g)
            if HAS_KEY:
                grad_logits = attn * (_dot(v, tl.trans(g)) - mean[None, :])
                acc_k += _dot(grad_logits.to(q.dtype), q)

    y = key_y + pad
    x = key_x + pad
    stored = (y >= 0) & (y < padded_h) & (x >= 0) & (x < padded_w)
    pixels = padded_h * padded_w
    at = _offsets(b * heads + n, n * 0, value_channels, y, x,
                  value_dim * pixels, 0, pixels, padded_w, 1)
    tl.store(
        grad_value + at, acc_v.to(grad_value.dtype.element_ty),
        mask=stored[:, None] & (value_channels < value_dim)[None, :])
    if HAS_KEY:
        at = _offsets(b * heads + n, n * 0, channels, y, x,
                      head_dim * pixels, 0, pixels, padded_w, 1)
        tl.store(
            grad_key + at, (acc_k * scale).to(grad_key.dtype.element_ty),
            mask=stored[:, None] & (channels < head_dim)[None, :])
