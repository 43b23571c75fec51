"""Patchwise self-attention, and its mix with convolution (ACmix)."""
from typing import List

import torch
from mmcv.cnn import build_norm_layer
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from acmix_det.ops.checks import (check_attn_kernel_size,
                                  check_conv_kernel_size, check_size)
from acmix_det.ops.export import is_exporting
from acmix_det.ops.torch_backend import (_Geometry, _pad, _shifted, _tiles,
                                         _unpad_grad)
from .acmix import init_shift_conv_, shift_conv


def patchwise_aggregation(value: Tensor, weight: Tensor) -> Tensor:
    r"""Weighted sum over the neighborhood of every pixel, reflected outside.

    .. math::
        y_{c, i} = \sum_o weight_{c \bmod Cw, o, i} \, value_{c, i+o}

    Values are never unfolded, and sums of half types run in float32.

    Args:
        value (Tensor): (B, C, H, W).
        weight (Tensor): (B, Cw, k * k, H, W); Cw divides C, k is odd.

    Returns:
        Tensor: (B, C, H, W), in the type of value.

    Raises:
        ValueError: If the shapes do not fit.

    Example:
        >>> import torch
        >>> from acmix_det.layers.patchwise import patchwise_aggregation
        >>> value, weight = torch.rand(2, 16, 5, 9), torch.rand(2, 4, 9, 5, 9)
        >>> patchwise_aggregation(value, weight).shape
        torch.Size([2, 16, 5, 9])
    """
    if value.dim() != 4 or 0 in value.shape[1:]:
        raise ValueError('value must have the shape (B, C, H, W), got '
                         f'{tuple(value.shape)}')
    b, c, h, w = value.shape
    taps = weight.shape[2] if weight.dim() == 5 else 0
    kernel = round(taps**0.5)
    if (weight.dim() != 5 or weight.shape[0] != b or weight.shape[3:] !=
        (h, w) or kernel % 2 == 0 or kernel**2 != taps
            or weight.shape[1] == 0 or c % weight.shape[1]):
        raise ValueError(
            f'weight must have the shape ({b}, Cw, k * k, {h}, {w}) with an '
            f'odd k and a Cw that divides {c}, got {tuple(weight.shape)}')
    weight = weight.to(value.dtype)
    if is_exporting():
        # standard operators only, which the exported graph can hold
        return _aggregate(value, weight)
    return _aggregation_op(value, weight)


def _prepare(value: Tensor, weight: Tensor):
    """Padded values (B, C / Cw, Cw, ...), the tiles, and the geometry."""
    geo = _Geometry(round(weight.shape[2]**0.5), 1., 1, 1, 'reflect')
    compute = torch.promote_types(value.dtype, torch.float32)
    v = value.to(compute).unflatten(1, (-1, weight.shape[1]))
    return _pad(v, geo), _tiles(v, v), geo


def _aggregate(value: Tensor, weight: Tensor) -> Tensor:
    v_pad, tiles, geo = _prepare(value, weight)
    cols = value.shape[-1]
    outs = []
    for top, rows in tiles:
        out = None
        for i, (dy, dx) in enumerate(geo.offsets()):
            # (B, 1, Cw, rows, cols)
            factor = weight[:, None, :, i, top:top + rows].to(v_pad.dtype)
            v = _shifted(v_pad, dy, dx, top, rows, cols, geo)
            out = factor * v if out is None else out.addcmul_(factor, v)
        outs.append(out)
    return torch.cat(outs, -2).flatten(1, 2).to(value.dtype)


@torch.library.custom_op('acmix_det::patchwise_aggregation', mutates_args=())
def _aggregation_op(value: Tensor, weight: Tensor) -> Tensor:
    return _aggregate(value, weight)


@_aggregation_op.register_fake
def _(value, weight):
    return value.new_empty(value.shape)


@torch.library.custom_op(
    'acmix_det::patchwise_aggregation_backward', mutates_args=())
def _aggregation_backward_op(grad: Tensor, value: Tensor,
                             weight: Tensor) -> List[Tensor]:
    v_pad, tiles, geo = _prepare(value, weight)
    h, w = value.shape[-2:]
    grad = grad.to(v_pad.dtype).unflatten(1, (-1, weight.shape[1]))
    grad_v_pad = torch.zeros_like(v_pad)
    grad_weight = weight.new_empty(weight.shape)
    for top, rows in tiles:
        g = grad[..., top:top + rows, :]
        for i, (dy, dx) in enumerate(geo.offsets()):
            factor = weight[:, None, :, i, top:top + rows].to(v_pad.dtype)
            at = (dy, dx, top, rows, w, geo)
            grad_weight[:, :, i, top:top + rows] = (
                g * _shifted(v_pad, *at)).sum(1)
            _shifted(grad_v_pad, *at).addcmul_(factor, g)
    grad_value = _unpad_grad(grad_v_pad, h, w, geo)
    return [grad_value.flatten(1, 2).to(value.dtype), grad_weight]


@_aggregation_backward_op.register_fake
def _(grad, value, weight):
    return [value.new_empty(value.shape), weight.new_empty(weight.shape)]


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return tuple(_aggregation_backward_op(grad, *ctx.saved_tensors))


_aggregation_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.acmix_det.patchwise_aggregation)
def _flops(value, weight, *args, out_shape=None, **kwargs) -> int:
    b, c, h, w = value
    return 2 * b * c * weight[2] * h * w


@register_flop_formula(torch.ops.acmix_det.patchwise_aggregation_backward)
def _backward_flops(grad, value, weight, *args, out_shape=None,
                    **kwargs) -> int:
    return 2 * _flops(value, weight)


class PatchwiseAttention2d(nn.Module):
    r"""Self-attention whose weights are computed from the whole neighborhood.

    From `Exploring Self-attention for Image Recognition
    <https://arxiv.org/abs/2004.13621>`_, the patchwise variant with the
    concatenation for the relation:

    .. math::
        y_i = \sum_o \gamma([q_i, k_{i+o'} \forall o'])_o \odot v_{i+o}

    with :math:`\gamma` norm, ReLU, pointwise, norm, ReLU, pointwise: one
    weight for every offset and, shared by ``share_planes`` channels of the
    value, for every channel. There is no softmax and no position. Outside
    the image is its reflection, for maps of any size.

    The map of relations, (k * k + 1) * Cr channels, is held as a whole, since
    its norm needs it; with the widths of SAN these are about three times the
    channels of the input. Values, which are wider, are not unfolded.

    Shapes: B batch, k ``attn_kernel_size``, Cr ``rel_channels``.

    Args:
        in_channels (int): Channels of the input.
        rel_channels (int): Channels Cr of query and key.
        out_channels (int): Channels of value and output.
        attn_kernel_size (int): Extent of the neighborhood, odd.
        norm_cfg (dict): The norms of :math:`\gamma`.
        share_planes (int): Channels that share a weight, a divisor of
            ``out_channels``. Defaults to 8.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument breaks the rules above.

    Example:
        >>> import torch
        >>> from acmix_det.layers.patchwise import PatchwiseAttention2d
        >>> layer = PatchwiseAttention2d(64, 4, 16, 7, dict(type='BN'))
        >>> layer(torch.rand(2, 64, 9, 2)).shape
        torch.Size([2, 16, 9, 2])
    """

    def __init__(self,
                 in_channels: int,
                 rel_channels: int,
                 out_channels: int,
                 attn_kernel_size: int,
                 norm_cfg: dict,
                 *,
                 share_planes: int = 8) -> None:
        super().__init__()
        self.in_channels = check_size('in_channels', in_channels)
        check_size('rel_channels', rel_channels)
        self.out_channels = check_size('out_channels', out_channels)
        self.attn_kernel_size = check_attn_kernel_size(attn_kernel_size)
        if out_channels % check_size('share_planes', share_planes):
            raise ValueError(
                'share_planes must divide out_channels, got '
                f'share_planes={share_planes}, out_channels={out_channels}')
        self.query = nn.Conv2d(in_channels, rel_channels, 1)
        self.key = nn.Conv2d(in_channels, rel_channels, 1)
        self.value = nn.Conv2d(in_channels, out_channels, 1)
        taps = attn_kernel_size**2
        relations = rel_channels * (taps + 1)
        weights = out_channels // share_planes
        self.gamma = nn.Sequential(
            build_norm(norm_cfg, relations), nn.ReLU(inplace=True),
            nn.Conv2d(relations, weights, 1, bias=False),
            build_norm(norm_cfg, weights), nn.ReLU(inplace=True),
            nn.Conv2d(weights, weights * taps, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x (Tensor): (B, in_channels, H, W).

        Returns:
            Tensor: (B, out_channels, H, W).
        """
        if (x.dim() != 4 or x.shape[1] != self.in_channels
                or 0 in x.shape[2:]):
            raise ValueError(
                f'x must have the shape (B, {self.in_channels}, H, W), got '
                f'{tuple(x.shape)}')
        return self._attention(self.query(x), self.key(x), self.value(x))

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        geo = _Geometry(self.attn_kernel_size, 1., 1, 1, 'reflect')
        h, w = key.shape[-2:]
        k_pad = _pad(key, geo)
        relation = torch.cat([query] + [
            _shifted(k_pad, dy, dx, 0, h, w, geo) for dy, dx in geo.offsets()
        ], 1)
        weight = self.gamma(relation)
        return patchwise_aggregation(
            value, weight.unflatten(1, (-1, self.attn_kernel_size**2)))

    def extra_repr(self) -> str:
        return f'attn_kernel_size={self.attn_kernel_size}'


class ACmixPatchwiseAttention2d(PatchwiseAttention2d):
    r"""Mix of patchwise self-attention and convolution.

    ACmix (`arXiv 2111.14556 <https://arxiv.org/abs/2111.14556>`_) for the
    attention of SAN: the projections q, k and v feed the attention and the
    convolution path,

    .. math::
        y = alpha \cdot attention(q, k, v) + beta \cdot convolution(q, k, v).

    q and k have D = ``rel_channels`` channels and v has N times as many, so
    that the convolution path, :func:`acmix_det.layers.acmix.shift_conv`, sees
    N + 2 maps for every one of the D channels. Its output channels are
    ordered [D, N], as in the released layers.

    The paper does not say how the path treats the different widths of SAN,
    and no code of it is released. With this reading and two sets of shift
    kernels the published parameter counts come out (as for the ACmix
    ResNets).

    Args:
        in_channels (int): See :class:`PatchwiseAttention2d`, as for all up to
            ``share_planes``; ``rel_channels`` divides ``out_channels``.
        conv_kernel_size (int): Kernel of the convolution path, odd. Defaults
            to 3.
        num_shift_sets (int): Sets of shift kernels, whose mean is applied.
            Defaults to 1.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument breaks the rules above.

    Example:
        >>> import torch
        >>> from acmix_det.layers.patchwise import ACmixPatchwiseAttention2d
        >>> layer = ACmixPatchwiseAttention2d(64, 4, 16, 7, dict(type='BN'))
        >>> layer(torch.rand(2, 64, 9, 2)).shape
        torch.Size([2, 16, 9, 2])
    """

    def __init__(self,
                 in_channels: int,
                 rel_channels: int,
                 out_channels: int,
                 attn_kernel_size: int,
                 norm_cfg: dict,
                 *,
                 share_planes: int = 8,
                 conv_kernel_size: int = 3,
                 num_shift_sets: int = 1) -> None:
        super().__init__(
            in_channels,
            rel_channels,
            out_channels,
            attn_kernel_size,
            norm_cfg,
            share_planes=share_planes)
        if out_channels % rel_channels:
            raise ValueError(
                'rel_channels must divide out_channels, got '
                f'rel_channels={rel_channels}, out_channels={out_channels}')
        check_conv_kernel_size(conv_kernel_size)
        check_size('num_shift_sets', num_shift_sets)
        taps = conv_kernel_size**2
        maps = out_channels // rel_channels + 2
        self.fc_weight = nn.Parameter(torch.empty(taps, maps))
        self.shift_weight = nn.Parameter(
            torch.empty(num_shift_sets, out_channels, taps, conv_kernel_size,
                        conv_kernel_size))
        self.alpha = nn.Parameter(torch.full((1, ), 0.5))
        self.beta = nn.Parameter(torch.full((1, ), 0.5))
        init_shift_conv_(self.fc_weight, self.shift_weight)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attn = super()._attention(query, key, value)
        # channels [N + 2, D] to [D, N + 2]
        proj = torch.cat([query, key, value], 1).unflatten(
            1, (-1, query.shape[1])).transpose(1, 2).flatten(1, 2)
        conv = shift_conv(proj, self.fc_weight, self.shift_weight)
        return self.alpha.to(attn.dtype) * attn + self.beta.to(
            conv.dtype) * conv


def build_norm(norm_cfg: dict, channels: int) -> nn.Module:
    """Build a norm; the error of one that does not fit names the config."""
    if not isinstance(norm_cfg, dict) or 'type' not in norm_cfg:
        raise TypeError("norm_cfg must be a dict with a type such as 'BN', "
                        f'got {norm_cfg!r}')
    try:
        return build_norm_layer(norm_cfg, channels)[1]
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f'norm_cfg must fit {channels} channels, as BN and SyncBN do, got '
            f'{norm_cfg}: {error}') from error
