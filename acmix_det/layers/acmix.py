"""ACmix: self-attention and convolution from the same projections."""
from typing import Optional

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from acmix_det.ops import local_attention
from acmix_det.ops.checks import check_conv_kernel_size, check_size
from .base import AttentionConv2d, IntOrPair
from .conv_fit import low_rank_groups


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
    linear; up to 4 heads (kc = 3) they are composed into one grouped
    convolution on every forward. Its output channels are ordered [D, N], the
    attention's [N, D], as in the released checkpoints.

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
        with_cp (bool): Whether to compute queries, keys and values again in
            the backward pass instead of keeping them: less memory, more time.
            Defaults to False.

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
        if conv_kernel_size is None:
            conv_kernel_size = self.kernel_size[0]
        self.conv_kernel_size = check_conv_kernel_size(conv_kernel_size)
        self.num_shift_sets = check_size('num_shift_sets', num_shift_sets)
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
        init_shift_conv_(self.fc_weight, self.shift_weight)
        self.alpha.fill_(0.5)
        self.beta.fill_(0.5)
        if self.bias is not None:
            self.bias.zero_()

    @torch.no_grad()
    def imitate_conv(self,
                     weight: Tensor,
                     input_mean: Optional[Tensor] = None) -> Optional[float]:
        """Set the convolution path to imitate a convolution.

        The N outputs of a channel of a head see min(kc * kc, 3N) maps through
        kc x kc kernels, so the best imitation is a truncated SVD of their
        kernels. What the projections need not hold for that stays random; the
        attention path starts with alpha = 0.1.

        See :meth:`AttentionConv2d.imitate_conv`; ``input_mean`` is not used.
        """
        margin = self.conv_kernel_size - weight.shape[-1]
        if margin < 0:
            return None
        self.init_weights()
        weight = F.pad(weight.to(self.fc_weight), [margin // 2] * 4)
        taps, maps = self.fc_weight.shape
        fit = low_rank_groups(weight, self.head_dim, min(taps, maps))
        # rows as long as those of the usual start
        gain = 2**0.5
        left, right = fit.left / gain, fit.right * gain
        nn.init.orthogonal_(self.fc_weight)
        if maps >= taps:  # fc fc^T = 1
            free = torch.eye(maps).to(weight) - self.fc_weight.T @ (
                self.fc_weight)
            start = self.in_proj_weight.unflatten(
                0, (maps, self.head_dim)).transpose(0, 1)
            right = self.fc_weight.T @ right + free @ start
        else:  # fc^T fc = 1
            left = left @ self.fc_weight.T
        # (D, 3N, Cin) and (D, N, kc * kc, taps)
        self.in_proj_weight.copy_(right.transpose(0, 1).flatten(0, 1))
        shift = left.flatten(0, 1).transpose(1, 2)
        self.shift_weight.copy_(shift.unflatten(
            2, self.shift_weight.shape[-2:]))
        self.alpha.fill_(0.1)
        self.beta.fill_(1.)
        return fit.error

    def _forward(self, x: Tensor) -> Tensor:
        heads = (3, self.num_heads, self.head_dim)
        # project into the channel order [D, 3, N]: a group of the convolution
        # path is then contiguous, and attention reads any strides
        weight = self.in_proj_weight.unflatten(0, heads).movedim(2, 0)
        bias = self.in_proj_bias.unflatten(0, heads).movedim(2, 0)
        proj = F.conv2d(x,
                        weight.flatten(0, 2)[:, :, None, None],
                        bias.flatten())
        # each (B, N, D, H, W)
        query, key, value = self._split(
            proj, self.head_dim, 3, self.num_heads).transpose(1, 3).unbind(2)
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
        return shift_conv(
            proj,
            self.fc_weight,
            self.shift_weight,
            stride=self.stride[0],
            dilation=self.dilation[0])

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.conv_kernel_size != self.kernel_size[0]:
            text += f', conv_kernel_size={self.conv_kernel_size}'
        if self.num_shift_sets != 1:
            text += f', num_shift_sets={self.num_shift_sets}'
        return text


def shift_conv(proj: Tensor,
               fc_weight: Tensor,
               shift_weight: Tensor,
               fc_bias: Optional[Tensor] = None,
               *,
               stride: int = 1,
               dilation: int = 1) -> Tensor:
    """Convolution path of ACmix: mix the maps of each channel, then shift.

    Shapes as in :class:`ACmix2d`, taps = kc * kc. The maps after the mixture
    count as zero outside the image, their bias included.

    Args:
        proj (Tensor): q, k and v, channels ordered [D, 3, N],
            (B, D * 3N, H, W).
        fc_weight (Tensor): (taps, 3N).
        shift_weight (Tensor): (S, D * N, taps, kc, kc).
        fc_bias (Tensor | None): (taps,). Defaults to None.
        stride (int): Defaults to 1.
        dilation (int): Defaults to 1.

    Returns:
        Tensor: Channels ordered [D, N], (B, D * N, H', W').
    """
    taps, maps = fc_weight.shape
    groups = proj.shape[1] // maps
    shift_weight = shift_weight.mean(0)
    # a pair, which torch 2.6 can trace too
    padding = (dilation * (shift_weight.shape[-1] // 2), ) * 2
    if maps > taps + 3:
        # with more than 4 heads (kc = 3) two steps are fewer multiply-adds,
        # and the map between them, 9 / N of a layer's output, is small
        fc_weight = fc_weight.repeat(groups, 1)[:, :, None, None]
        if fc_bias is not None:
            fc_bias = fc_bias.repeat(groups)
        proj = F.conv2d(proj, fc_weight, fc_bias, groups=groups)
        return F.conv2d(proj, shift_weight, None, stride, padding, dilation,
                        groups)
    # [D * N, taps, kc, kc] x [taps, 3N] -> (D * N, 3N, kc, kc)
    weight = torch.einsum('otyx,tm->omyx', shift_weight, fc_weight)
    # other strides would make F.conv2d choose another memory format
    weight = weight.contiguous()
    out = F.conv2d(proj, weight, None, stride, padding, dilation, groups)
    if fc_bias is not None:
        # what is left of the bias near the border
        weight = torch.einsum('otyx,t->oyx', shift_weight, fc_bias)[:, None]
        ones = proj.new_ones(1, 1, *proj.shape[-2:])
        out = out + F.conv2d(ones, weight, None, stride, padding, dilation)
    return out


@torch.no_grad()
def init_shift_conv_(fc_weight: Tensor, shift_weight: Tensor) -> None:
    """Set the weights of :func:`shift_conv` to their start values."""
    # the sum of the shifted maps starts with the variance of q, k and v
    fc_weight.normal_(0, fc_weight.numel()**-0.5)
    taps, *kernel = shift_weight.shape[2:]
    shift_weight.copy_(torch.eye(taps).view(taps, *kernel))


def _coordinates(size: int, like: Tensor) -> Tensor:
    """``size`` steps from -1 to 1 (-1 alone for one)."""
    steps = torch.arange(size, device=like.device).to(like.dtype)
    # by tensors, since traces hold sizes as tensors
    return steps * (2 / steps[-1:].clamp(min=1)) - 1
