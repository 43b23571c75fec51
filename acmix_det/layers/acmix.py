"""ACmix: self-attention and convolution from the same projections."""
from typing import Optional

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from acmix_det.ops import local_attention
from acmix_det.ops.checks import check_positive_int
from .base import AttentionConv2d, IntOrPair


@MODELS.register_module('ACmix')
class ACmix2d(AttentionConv2d):
    r"""Mix of local self-attention and convolution, as a spatial layer.

    From `On the Integration of Self-Attention and Convolution
    <https://arxiv.org/abs/2111.14556>`_, equations 11 to 14. One set of
    pointwise projections q, k, v (with bias) feeds two paths,

    .. math::
        y = alpha \cdot attention(q, k, v) + beta \cdot convolution(q, k, v).

    Attention: logits :math:`D^{-1/2} q_i \cdot (k_j + p_i - p_j)` with p a
    pointwise projection of the pixel's coordinates in [-1, 1]. The term
    :math:`q_i \cdot p_i` is the same for the whole neighborhood and leaves
    the softmax unchanged, so that this is plain local attention with the keys
    :math:`k_j - p_j`; for the same reason the bias of p has no effect (it is
    kept for the released checkpoints).

    Convolution: a fully connected layer mixes the 3N maps q, k, v of every
    channel of a head into kc * kc maps, and a grouped convolution, which
    starts as the kc * kc shifts by one pixel, moves and sums them. Both are
    linear; they are composed into one grouped convolution on every forward.
    Its output channels are ordered [D, N], the attention's [N, D], as in the
    released checkpoints.

    Differences from the released layer: any size and odd sizes with a stride;
    ``dilation`` spreads both paths (there it fails); start values are not
    overwritten by the host.

    Shapes: B batch, N ``num_heads``, D = ``out_channels`` / N, k
    ``attn_kernel_size``, kc ``conv_kernel_size``, S ``num_shift_sets``.

    Args:
        in_channels (int): See :class:`AttentionConv2d`, as for all up to
            ``bias``.
        num_heads (int): Attention heads. Defaults to 4.
        attn_kernel_size (int): Extent of the neighborhood, odd. Defaults to 7.
        conv_kernel_size (int | None): Kernel of the convolution path, odd.
            None is the kernel of the replaced convolution. Defaults to None.
        num_shift_sets (int): Sets of shift kernels, whose mean is applied.
            The parameters of the paper's ResNets fit 2, those of the released
            code 1. Defaults to 1.
        padding_mode (str): Border rule of the attention. Defaults to
            'reflect'.
        backend (str): Backend of the attention. Defaults to 'auto'.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the layer cannot stand in for such a convolution.

    Example:
        >>> import torch
        >>> from acmix_det.layers import ACmix2d
        >>> layer = ACmix2d(16, 32, 3, stride=2, padding=1)
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
                 num_heads: int = 4,
                 attn_kernel_size: int = 7,
                 conv_kernel_size: Optional[int] = None,
                 num_shift_sets: int = 1,
                 padding_mode: str = 'reflect',
                 backend: str = 'auto') -> None:
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
            backend=backend)
        if conv_kernel_size is None:
            conv_kernel_size = self.kernel_size[0]
        if check_positive_int('conv_kernel_size', conv_kernel_size) % 2 == 0:
            raise ValueError('conv_kernel_size must be odd, got '
                             f'{conv_kernel_size}')
        self.conv_kernel_size = conv_kernel_size
        self.num_shift_sets = check_positive_int('num_shift_sets',
                                                 num_shift_sets)
        taps = conv_kernel_size**2
        # rows: the channels of q, of k and of v
        self.in_proj_weight = nn.Parameter(
            torch.empty(3 * out_channels, in_channels))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * out_channels))
        # columns: the coordinate along the width, then along the height
        self.pos_weight = nn.Parameter(torch.empty(self.head_dim, 2))
        self.pos_bias = nn.Parameter(torch.empty(self.head_dim))
        self.fc_weight = nn.Parameter(torch.empty(taps, 3 * num_heads))
        self.shift_weight = nn.Parameter(
            torch.empty(num_shift_sets, out_channels, taps, conv_kernel_size,
                        conv_kernel_size))
        self.alpha = nn.Parameter(torch.empty(1))
        self.beta = nn.Parameter(torch.empty(1))
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set every parameter to its start value."""
        nn.init.kaiming_normal_(self.in_proj_weight)
        self.in_proj_bias.zero_()
        nn.init.kaiming_normal_(self.pos_weight, nonlinearity='linear')
        self.pos_bias.zero_()
        # the sum of the shifted maps starts with the variance of q, k and v
        self.fc_weight.normal_(0, self.fc_weight.numel()**-0.5)
        taps = self.conv_kernel_size**2
        self.shift_weight.copy_(
            torch.eye(taps).view(taps, *self.shift_weight.shape[-2:]))
        self.alpha.fill_(0.5)
        self.beta.fill_(0.5)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x (Tensor): (B, in_channels, H, W).

        Returns:
            Tensor: (B, out_channels, ceil(H / stride), ceil(W / stride)).
        """
        self._check_input(x)
        heads = (3, self.num_heads, self.head_dim)
        # project into the channel order [D, 3, N]: a group of the convolution
        # path is then contiguous, and attention reads any strides
        weight = self.in_proj_weight.unflatten(0, heads).movedim(2, 0)
        bias = self.in_proj_bias.unflatten(0, heads).movedim(2, 0)
        proj = F.conv2d(x,
                        weight.flatten(0, 2)[:, :, None, None],
                        bias.flatten())
        # each (B, N, D, H, W)
        query, key, value = proj.unflatten(
            1, (self.head_dim, 3, self.num_heads)).transpose(1, 3).unbind(2)
        attn = local_attention(
            query,
            key - self._position(key),
            value,
            self.attn_kernel_size,
            scale=self.head_dim**-0.5,
            stride=self.stride[0],
            dilation=self.dilation[0],
            padding_mode=self.padding_mode,
            backend=self.backend).flatten(1, 2)
        conv = self._convolution(proj)
        out = self.alpha.to(attn.dtype) * attn + self.beta.to(
            conv.dtype) * conv
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)[:, None, None]
        return out

    def _position(self, key: Tensor) -> Tensor:
        """Position terms p of all pixels, (D, H, W)."""
        h, w = key.shape[-2:]
        weight, bias = self.pos_weight, self.pos_bias
        along_w = _coordinates(w, weight) * weight[:, :1]  # (D, W)
        along_h = _coordinates(h, weight) * weight[:, 1:]  # (D, H)
        position = along_h[:, :, None] + along_w[:, None, :]
        return (position + bias[:, None, None]).to(key.dtype)

    def _convolution(self, proj: Tensor) -> Tensor:
        """Convolution path, (B, D * 3N, H, W) to (B, D * N, H', W')."""
        # [D * N, taps, kc, kc] x [taps, 3N] -> (D * N, 3N, kc, kc)
        weight = torch.einsum('otyx,tm->omyx', self.shift_weight.mean(0),
                              self.fc_weight)
        # other strides would make F.conv2d choose another memory format
        weight = weight.contiguous()
        return F.conv2d(
            proj,
            weight,
            stride=self.stride,
            padding=self.dilation[0] * (self.conv_kernel_size // 2),
            dilation=self.dilation,
            groups=self.head_dim)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.conv_kernel_size != self.kernel_size[0]:
            text += f', conv_kernel_size={self.conv_kernel_size}'
        if self.num_shift_sets != 1:
            text += f', num_shift_sets={self.num_shift_sets}'
        return text


def _coordinates(size: int, like: Tensor) -> Tensor:
    """``size`` steps from -1 to 1 (-1 alone for one)."""
    steps = torch.arange(size, device=like.device).to(like.dtype)
    return steps * (2 / torch.sym_max(size - 1, 1)) - 1
