"""Stand-alone self-attention in the place of a convolution."""
import math
from typing import Optional

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from acmix_det.ops import local_attention
from acmix_det.ops.checks import check_choice, check_finite
from .base import AttentionConv2d, IntOrPair
from .conv_fit import padded_log, separable_fit

POSITIONS = ('relative', 'absolute', 'none')


@MODELS.register_module('SASA')
class StandAloneSelfAttention2d(AttentionConv2d):
    r"""Local self-attention with relative positions, as a spatial layer.

    From `Stand-Alone Self-Attention in Vision Models
    <https://arxiv.org/abs/1906.05909>`_, equations 2 and 3:

    .. math::
        y_i = \sum_{o} softmax_o(q_i \cdot k_{i+o} + q_i \cdot r_o) \,
        v_{i+o}

    with q, k, v full pointwise projections of the input (the parameter counts
    of the paper say full, its text says grouped), no 1 / sqrt(D), no bias in
    the projections and no projection behind the attention. A stride s is
    attention at input resolution, then s x s average pooling (ceil mode).

    Differences from the paper: the query projection starts 1 / sqrt(D)
    smaller than the key projection, since the logits are not scaled and the
    paper gives no start values.

    Shapes: B batch, N ``num_heads``, D = ``out_channels`` / N, k
    ``attn_kernel_size``.

    Args:
        in_channels (int): See :class:`AttentionConv2d`, as for all up to
            ``bias``.
        num_heads (int): Attention heads. Defaults to 8.
        attn_kernel_size (int): Extent of the neighborhood, odd. Defaults to 7.
        position (str): 'relative' (learned row and column embeddings per
            head), 'absolute' (sinusoids of the pixel's row and column, added
            to the input) or 'none'. Defaults to 'relative'.
        use_key (bool): False leaves q . k out of the logits, so that they are
            q . r alone. Defaults to True.
        value_init_std (float | None): Standard deviation of the start values
            of the value projection (the paper takes 0.01 in the heads). None
            is Kaiming's. Defaults to None.
        padding_mode (str): Border rule. Defaults to 'mask'.
        backend (str): Backend of the attention. Defaults to 'auto'.
        with_cp (bool): Whether to compute queries, keys and values again in
            the backward pass instead of keeping them: less memory, more time.
            Defaults to False.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the layer cannot stand in for such a convolution.

    Example:
        >>> import torch
        >>> from acmix_det.layers import StandAloneSelfAttention2d
        >>> layer = StandAloneSelfAttention2d(16, 32, 3, stride=2, padding=1)
        >>> layer(torch.rand(2, 16, 25, 40)).shape
        torch.Size([2, 32, 13, 20])
    """

    def __init__(self,
                 in_channels: int,
                 out_channels: int,
                 kernel_size: IntOrPair,
                 stride: IntOrPair = 1,
                 padding: IntOrPair = 0,
                 dilation: IntOrPair = 1,
                 groups: int = 1,
                 bias: bool = True,
                 *,
                 num_heads: int = 8,
                 attn_kernel_size: int = 7,
                 position: str = 'relative',
                 use_key: bool = True,
                 value_init_std: Optional[float] = None,
                 padding_mode: str = 'mask',
                 backend: str = 'auto',
                 with_cp: bool = False) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            num_heads=num_heads,
            attn_kernel_size=attn_kernel_size,
            padding_mode=padding_mode,
            backend=backend,
            with_cp=with_cp)
        check_choice('position', position, POSITIONS)
        if not isinstance(use_key, bool):
            raise TypeError(f'use_key must be a bool, got {use_key!r}')
        if not use_key and position != 'relative':
            raise ValueError("use_key must be True unless position='relative'"
                             f', got use_key=False, position={position!r}')
        if value_init_std is not None and not (
                0 < check_finite('value_init_std', value_init_std) < 1e6):
            raise ValueError('value_init_std must be positive and below 1e6, '
                             f'or None, got {value_init_std}')
        self.position = position
        self.use_key = use_key
        self.value_init_std = value_init_std
        # rows: the channels of q, of k (if used) and of v
        self.in_proj_weight = nn.Parameter(
            torch.empty((2 + use_key) * out_channels, in_channels))
        if position == 'relative':
            half = self.head_dim // 2
            self.rel_pos_h = nn.Parameter(
                torch.empty(num_heads, half, attn_kernel_size))
            self.rel_pos_w = nn.Parameter(
                torch.empty(num_heads, self.head_dim - half,
                            attn_kernel_size))
        else:
            self.register_parameter('rel_pos_h', None)
            self.register_parameter('rel_pos_w', None)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set every parameter to its start value."""
        query, *key, value = self.in_proj_weight.split(self.out_channels)
        std = self.in_channels**-0.5
        query.normal_(0, std * self.head_dim**-0.5)
        for weight in key:
            weight.normal_(0, std)
        if self.value_init_std is None:
            nn.init.kaiming_normal_(value)
        else:
            value.normal_(0, self.value_init_std)
        if self.position == 'relative':
            self.rel_pos_h.normal_()
            self.rel_pos_w.normal_()
        if self.bias is not None:
            self.bias.zero_()

    @torch.no_grad()
    def imitate_conv(self,
                     weight: Tensor,
                     input_mean: Optional[Tensor] = None) -> Optional[float]:
        """Set the layer to imitate a convolution by attention to positions.

        Every head gets one attention map, the best product of weights of rows
        and columns for its kernels: query projections sum up the input, which
        makes q positive and about 1 behind a ReLU, and the embeddings are the
        logarithms of the map. Keys start small. A convolution with a stride
        is imitated before the pooling.

        See :meth:`AttentionConv2d.imitate_conv`. Positions other than
        'relative' and heads of one channel cannot imitate a convolution.
        """
        half = self.head_dim // 2
        if self.position != 'relative' or half == 0:
            return None
        self.init_weights()
        fit = separable_fit(weight.to(self.in_proj_weight), self.num_heads)
        query, *key, value = self.in_proj_weight.split(self.out_channels)
        if input_mean is None:
            input_mean = query.new_full((self.in_channels, ),
                                        (2 * math.pi)**-0.5)
        total = input_mean.to(query).abs().sum().clamp(min=1e-6)
        query.mul_(0.1).add_(1 / total)
        for k in key:
            k.mul_(0.1)
        value.copy_(fit.value)
        for embedding, weights in ((self.rel_pos_h, fit.rows),
                                   (self.rel_pos_w, fit.cols)):
            logits = padded_log(weights, self.attn_kernel_size, floor=1e-3)
            embedding.mul_(0.1 / self.head_dim).add_(
                logits[:, None] / embedding.shape[1])
        return fit.error

    def _forward(self, x: Tensor) -> Tensor:
        if self.position == 'absolute':
            x = x + sinusoidal_position(x)
        proj = F.conv2d(x, self.in_proj_weight[:, :, None, None])
        # each (B, N, D, H, W)
        query, *key, value = self._split(
            proj, 2 + self.use_key, self.num_heads, self.head_dim).unbind(1)
        rel_pos_h, rel_pos_w = self.rel_pos_h, self.rel_pos_w
        if rel_pos_h is not None:
            # autocast leaves parameters as they are
            rel_pos_h = rel_pos_h.to(query.dtype)
            rel_pos_w = rel_pos_w.to(query.dtype)
        out = local_attention(
            query,
            key[0] if key else None,
            value,
            self.attn_kernel_size,
            rel_pos_h=rel_pos_h,
            rel_pos_w=rel_pos_w,
            dilation=self.dilation[0],
            padding_mode=self.padding_mode,
            backend=self.backend).flatten(1, 2)
        if self.stride != (1, 1):
            out = F.avg_pool2d(
                out,
                self.stride,
                self.stride,
                ceil_mode=True,
                count_include_pad=False)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)[:, None, None]
        return out

    def extra_repr(self) -> str:
        text = super().extra_repr() + f', position={self.position!r}'
        return text if self.use_key else text + ', use_key=False'


def sinusoidal_position(x: Tensor) -> Tensor:
    """Sinusoids of the rows and columns of a map.

    The first half of the channels encodes the row and the second half the
    column, each with sines in even and cosines in odd places and wavelengths
    from 2 pi to 10000 * 2 pi (Vaswani et al., 2017).

    Args:
        x (Tensor): (B, C, H, W), for its size, type and device.

    Returns:
        Tensor: (C, H, W).
    """
    channels, h, w = x.shape[1:]
    half = channels // 2
    factory = dict(
        device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))

    def encode(size: int, count: int) -> Tensor:
        index = torch.arange(count, **factory)
        rate = torch.exp(-(index - index % 2) *
                         (math.log(10000.) / max(count, 1)))
        phase = torch.arange(size, **factory) * rate[:, None]
        return torch.where(index[:, None] % 2 == 0, phase.sin(), phase.cos())

    rows = encode(h, half)[:, :, None].expand(-1, -1, w)
    cols = encode(w, channels - half)[:, None, :].expand(-1, h, -1)
    return torch.cat([rows, cols]).to(x.dtype)
