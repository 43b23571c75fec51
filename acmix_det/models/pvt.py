"""Pyramid Vision Transformer whose attention is ACmix."""
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from mmdet.models.backbones.pvt import (PVTEncoderLayer,
                                        PyramidVisionTransformer,
                                        SpatialReductionAttention,
                                        pvt_convert)
from mmdet.models.layers.transformer import (AdaptivePadding, nchw_to_nlc,
                                             nlc_to_nchw)
from mmdet.registry import MODELS
from mmengine.logging import print_log
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from acmix_det.layers.acmix import init_shift_conv_, shift_conv
from acmix_det.ops.checks import (check_conv_kernel_size, check_list,
                                  check_size, check_stages)
from .pretrained import (check_init_cfg, load_fitting, read_weights,
                         start_as_plain_attention)
from .swap import resolve_attn_cfg


class ACmixSpatialReductionAttention(nn.Module):
    r"""Spatial-reduction attention and convolution from the same q, k, v.

    .. math::
        y = alpha \cdot proj(attention(q, k', v')) + beta \cdot
        convolution(q, k, v)

    with the attention of :class:`mmdet.models.PyramidVisionTransformer` and
    the convolution path of :class:`acmix_det.layers.ACmix2d` (channels
    ordered [D, N]), added after the output projection as in the released
    Swin-ACmix code.

    The attention takes k' and v' from the map that a strided convolution and
    a norm reduce. A convolution needs its inputs at full size, so k and v are
    the same projections of the tokens before the reduction, like q: those
    tokens come from a norm as the reduced ones do, no parameter is added, and
    where nothing is reduced (``sr_ratio=1``) k is k'. The paper does not say
    how it is done there, and no code of it is released. Its FLOPs (2.0 G for
    PVT-T and 3.9 G for PVT-S at 224 x 224; 2.15 and 4.31 here) leave no room
    for these projections; enlarging k' and v' would cost none, but a 3 x 3
    kernel finds no detail in a map that was reduced by 8.

    A map that ``sr_ratio`` does not divide is padded with zeros on the right
    and at the bottom, so that every token takes part (mmdet's drops the rest,
    and fails on a map smaller than ``sr_ratio``).

    Shapes: B batch, N heads, D channels of a head, C = N * D.

    Args:
        attn (SpatialReductionAttention): Attention of mmdet's PVT, whose
            parameters and settings this layer takes over.
        conv_kernel_size (int): Kernel of the convolution path, odd. Defaults
            to 3.
        num_shift_sets (int): Sets of shift kernels, whose mean is applied.
            Defaults to 1.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument breaks the rules above.

    Example:
        >>> import torch
        >>> from mmdet.models.backbones.pvt import SpatialReductionAttention
        >>> from acmix_det.models.pvt import ACmixSpatialReductionAttention
        >>> attn = SpatialReductionAttention(32, 4, sr_ratio=8)
        >>> layer = ACmixSpatialReductionAttention(attn)
        >>> layer(torch.rand(2, 10 * 15, 32), (10, 15)).shape
        torch.Size([2, 150, 32])
    """

    def __init__(self,
                 attn: SpatialReductionAttention,
                 *,
                 conv_kernel_size: int = 3,
                 num_shift_sets: int = 1) -> None:
        super().__init__()
        check_conv_kernel_size(conv_kernel_size)
        check_size('num_shift_sets', num_shift_sets)
        self.attn = attn.attn
        self.proj_drop = attn.proj_drop
        self.dropout_layer = attn.dropout_layer
        self.num_heads = attn.num_heads
        self.sr_ratio = attn.sr_ratio
        if self.sr_ratio > 1:
            self.sr = attn.sr
            self.norm = attn.norm
            self.padding = AdaptivePadding(
                self.sr_ratio, self.sr_ratio, padding='corner')
        taps = conv_kernel_size**2
        # parameters, not an nn.Conv2d: the host re-initialises those
        self.fc_weight = nn.Parameter(torch.empty(taps, 3 * self.num_heads))
        self.shift_weight = nn.Parameter(
            torch.empty(num_shift_sets, attn.embed_dims, taps,
                        conv_kernel_size, conv_kernel_size))
        self.alpha = nn.Parameter(torch.full((1, ), 0.5))
        self.beta = nn.Parameter(torch.full((1, ), 0.5))
        init_shift_conv_(self.fc_weight, self.shift_weight)

    def forward(self,
                x: Tensor,
                hw_shape: Tuple[int, int],
                identity: Optional[Tensor] = None) -> Tensor:
        """Apply the layer.

        Args:
            x (Tensor): (B, H * W, C).
            hw_shape (tuple[int, int]): H and W.
            identity (Tensor | None): What the result is added to,
                (B, H * W, C). Defaults to None, ``x``.

        Returns:
            Tensor: (B, H * W, C).
        """
        proj = F.linear(x, self.attn.in_proj_weight, self.attn.in_proj_bias)
        attn = self._attention(x, proj, hw_shape)
        conv = self._convolution(proj, hw_shape)
        out = self.alpha.to(attn.dtype) * attn + self.beta.to(
            conv.dtype) * conv
        identity = x if identity is None else identity
        return identity + self.dropout_layer(self.proj_drop(out))

    def _attention(self, x: Tensor, proj: Tensor,
                   hw_shape: Tuple[int, int]) -> Tensor:
        """Attention path, (B, H * W, C) to (B, H * W, C)."""
        q, k, v = proj.chunk(3, 2)
        if self.sr_ratio > 1:
            reduced = self.sr(self.padding(nlc_to_nchw(x, hw_shape)))
            reduced = self.norm(nchw_to_nlc(reduced))
            weight, bias = self.attn.in_proj_weight, self.attn.in_proj_bias
            channels = x.shape[2]
            k, v = F.linear(reduced, weight[channels:],
                            None if bias is None else bias[channels:]).chunk(
                                2, 2)
        # each (B, N, tokens, D)
        q, k, v = (
            t.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.attn.dropout if self.training else 0.)
        return self.attn.out_proj(out.transpose(1, 2).flatten(2))

    def _convolution(self, proj: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        """Convolution path, (B, H * W, 3C) to (B, H * W, C)."""
        # channels [3, N, D] to [D, 3, N]
        proj = proj.unflatten(2, (3, self.num_heads, -1)).permute(
            0, 4, 2, 3, 1).flatten(1, 3).unflatten(2, hw_shape)
        out = shift_conv(proj, self.fc_weight, self.shift_weight)
        return out.flatten(2).transpose(1, 2)

    def extra_repr(self) -> str:
        return f'num_heads={self.num_heads}, sr_ratio={self.sr_ratio}'


class ACmixPVTEncoderLayer(nn.Module):
    """Block of a PVT with :class:`ACmixSpatialReductionAttention`.

    Args:
        block (PVTEncoderLayer): mmdet's block, whose other layers it takes
            over.
        attn_cfg (dict): Arguments of the attention.
        with_cp (bool): Whether to recompute activations in the backward pass
            to save memory.
    """

    def __init__(self, block: PVTEncoderLayer, attn_cfg: dict,
                 with_cp: bool) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.norm1 = block.norm1
        self.attn = ACmixSpatialReductionAttention(block.attn, **attn_cfg)
        self.norm2 = block.norm2
        self.ffn = block.ffn

    def forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        """Apply the block, (B, H * W, C) to (B, H * W, C)."""
        if self.with_cp and torch.is_grad_enabled():
            return checkpoint(self._forward, x, hw_shape, use_reentrant=False)
        return self._forward(x, hw_shape)

    def _forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        x = self.attn(self.norm1(x), hw_shape, identity=x)
        return self.ffn(self.norm2(x), hw_shape, identity=x)


@MODELS.register_module()
class ACmixPyramidVisionTransformer(PyramidVisionTransformer):
    """mmdet's PyramidVisionTransformer with ACmix for every attention.

    Every argument of :class:`mmdet.models.PyramidVisionTransformer` is
    accepted, by keyword; the defaults are those of PVT-S, and
    ``num_layers=[2, 2, 2, 2]`` is PVT-T. Images that the strides do not
    divide are padded with zeros on the right and at the bottom, so that the
    maps are rounded up (mmdet's are rounded down), unless ``paddings`` are
    given.

    Args:
        attn_cfg (dict | None): Arguments of
            :class:`ACmixSpatialReductionAttention`: ``conv_kernel_size`` and
            ``num_shift_sets``. Defaults to None, the layer's defaults.
        with_cp (bool): Whether to recompute the activations of each block in
            the backward pass to save memory. Defaults to False.
        **kwargs: Arguments of
            :class:`mmdet.models.PyramidVisionTransformer`. ``pretrained`` is
            refused, use ``init_cfg``, of type 'Pretrained' or 'WarmStart',
            see :meth:`init_weights`.

    Raises:
        TypeError: If ``attn_cfg`` has a key that the layer does not take.
        ValueError: If arguments contradict each other.

    Example:
        >>> import torch
        >>> from acmix_det.models import ACmixPyramidVisionTransformer
        >>> model = ACmixPyramidVisionTransformer(embed_dims=8)
        >>> [tuple(x.shape) for x in model(torch.rand(1, 3, 100, 67))]
        [(1, 8, 25, 17), (1, 16, 13, 9), (1, 40, 7, 5), (1, 64, 4, 3)]
    """

    def __init__(self,
                 *,
                 attn_cfg: Optional[dict] = None,
                 with_cp: bool = False,
                 **kwargs) -> None:
        attn_cfg = resolve_attn_cfg(attn_cfg, ACmixSpatialReductionAttention)
        if attn_cfg.pop('type') is not ACmixSpatialReductionAttention:
            raise ValueError("attn_cfg must have no 'type', which is always "
                             'ACmixSpatialReductionAttention here')
        num_stages = check_size('num_stages', kwargs.get('num_stages', 4))
        kwargs.setdefault('paddings', ['corner'] * num_stages)
        _check_arguments(**kwargs)
        super().__init__(**kwargs)
        for _, blocks, _ in self.layers:
            for i, block in enumerate(blocks):
                if isinstance(block, PVTEncoderLayer):
                    blocks[i] = ACmixPVTEncoderLayer(block, attn_cfg, with_cp)

    def init_weights(self) -> None:
        """Initialise or load the weights.

        With ``init_cfg=dict(type='Pretrained', checkpoint=...)`` the weights
        that fit are loaded from a checkpoint of this class, of mmdet's
        PyramidVisionTransformer or, where ``convert_weights`` is True, of the
        PVT repository, and a summary is logged.

        With ``type='WarmStart'``, for a plain PVT, alpha is then set to 1 and
        beta to 0 in every layer: training starts from a network that
        computes what that PVT computes.

        Raises:
            ValueError: If ``init_cfg`` is of another type, or no weight of
                the checkpoint fits.
        """
        if self.init_cfg is None:
            super().init_weights()
            return
        layers = [
            m for m in self.modules()
            if isinstance(m, ACmixSpatialReductionAttention)
        ]
        state = read_weights(self.init_cfg)
        if self.convert_weights:
            state = pvt_convert(state)
        summary = load_fitting(self, state, self.init_cfg['checkpoint'])
        summary += start_as_plain_attention(self.init_cfg, state, layers)
        print_log(summary, logger='current')
        self._is_init = True


def _check_arguments(num_stages=4,
                     num_layers=(3, 4, 6, 3),
                     num_heads=(1, 2, 5, 8),
                     patch_sizes=(4, 2, 2, 2),
                     strides=(4, 2, 2, 2),
                     paddings=(),
                     sr_ratios=(8, 4, 2, 1),
                     mlp_ratios=(8, 8, 4, 4),
                     out_indices=(0, 1, 2, 3),
                     pretrained=None,
                     init_cfg=None,
                     **kwargs) -> None:
    check_init_cfg(init_cfg)
    if pretrained is not None:
        raise ValueError(
            'pretrained must be None, use init_cfg=dict(type="Pretrained", '
            f'checkpoint=...) instead, got {pretrained!r}')
    for name, value in (('num_layers', num_layers), ('num_heads', num_heads),
                        ('patch_sizes', patch_sizes), ('strides', strides),
                        ('sr_ratios', sr_ratios), ('paddings', paddings),
                        ('mlp_ratios', mlp_ratios)):
        # mmdet allows more entries of the last two
        spare = name in ('paddings', 'mlp_ratios')
        if (len(check_list(name, value)) < num_stages
                or len(value) > num_stages and not spare):
            raise ValueError(f'{name} must have one entry for each of the '
                             f'num_stages={num_stages}, got {value}')
    check_stages('out_indices', out_indices, num_stages)
