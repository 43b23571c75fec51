"""ACmix in the place of a Swin Transformer's window attention."""
from typing import Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .acmix import init_shift_conv_, shift_conv


class ACmixWindowMSA(nn.Module):
    r"""Shifted window attention and convolution from the same q, k, v.

    As in the released Swin-ACmix code,

    .. math::
        y = alpha \cdot proj(attention(q, k, v)) + beta \cdot
        convolution(q, k, v),

    with Swin's window attention and the convolution path of
    :class:`acmix_det.layers.ACmix2d` (3 x 3, here with a bias on the mixture
    of the 3N maps; output channels ordered [D, N]). Both work on the
    cyclically shifted map; outside it the convolution sees zeros.

    Maps that are no multiple of the window: attention sees the padded map, as
    in :class:`mmdet.models.SwinTransformer`. The convolution has no windows
    and needs no padding, so it runs on the map itself, shifted cyclically by
    as much; at sizes that the released code accepts, both are the same map.
    As there, and unlike in mmdet, nothing is shifted where the smaller side
    of the map fits into one window.

    Shapes: B batch, N heads, D channels of a head, C = N * D, s window size,
    L = s * s, H' and W' the padded size.

    Args:
        attn (nn.Module): The attention of mmdet's Swin block, a
            ``ShiftWindowMSA``, whose parameters and settings this layer takes
            over.

    Raises:
        ValueError: If its heads do not divide its channels.

    Example:
        >>> import torch
        >>> from mmdet.models.backbones.swin import ShiftWindowMSA
        >>> from acmix_det.layers.acmix_window import ACmixWindowMSA
        >>> layer = ACmixWindowMSA(ShiftWindowMSA(32, 4, 7, shift_size=3))
        >>> layer(torch.rand(2, 10 * 15, 32), (10, 15)).shape
        torch.Size([2, 150, 32])
    """

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.w_msa = attn.w_msa
        self.drop = attn.drop
        self.window_size = attn.window_size
        self.shift_size = attn.shift_size
        self.num_heads = attn.w_msa.num_heads
        channels = attn.w_msa.embed_dims
        if channels % self.num_heads:
            raise ValueError(
                'num_heads must divide the channels of each stage, got '
                f'num_heads={self.num_heads} for {channels} channels')
        # it follows from the window size, and other files do not hold it
        self.w_msa.register_buffer(
            'relative_position_index',
            self.w_msa.relative_position_index,
            persistent=False)
        self.fc_weight = nn.Parameter(torch.empty(9, 3 * self.num_heads))
        self.fc_bias = nn.Parameter(torch.empty(9))
        self.shift_weight = nn.Parameter(torch.empty(1, channels, 9, 3, 3))
        self.alpha = nn.Parameter(torch.empty(1))
        self.beta = nn.Parameter(torch.empty(1))
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set the position table and all that Swin does not have."""
        self.w_msa.init_weights()
        init_shift_conv_(self.fc_weight, self.shift_weight)
        self.fc_bias.zero_()
        self.alpha.fill_(0.5)
        self.beta.fill_(0.5)

    def forward(self, query: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        """Apply the layer.

        Args:
            query (Tensor): (B, H * W, C).
            hw_shape (tuple[int, int]): H and W.

        Returns:
            Tensor: (B, H * W, C).
        """
        h, w = hw_shape
        s = self.window_size
        shift = self.shift_size if min(h, w) > s else 0
        x = query.unflatten(1, (h, w))
        x = F.pad(x, (0, 0, 0, -w % s, 0, -h % s))
        if shift:
            x = x.roll((-shift, -shift), (1, 2))
        qkv = self.w_msa.qkv(x)  # (B, H', W', 3C)
        attn = _crop(self._attention(qkv, shift), h, w, shift)
        conv = self._convolution(_crop(qkv, h, w, shift))
        x = self.alpha.to(attn.dtype) * attn + self.beta.to(conv.dtype) * conv
        if shift:
            x = x.roll((shift, shift), (1, 2))
        return self.drop(x.flatten(1, 2))

    def _attention(self, qkv: Tensor, shift: int) -> Tensor:
        """Attention inside the windows, (B, H', W', 3C) to (B, H', W', C)."""
        h, w = qkv.shape[1:3]
        s = self.window_size
        # each (B, windows, N, L, D)
        q, k, v = _to_windows(qkv, s).unflatten(
            3, (3, self.num_heads, -1)).permute(3, 0, 1, 4, 2, 5)
        bias = self.w_msa.relative_position_bias_table[
            self.w_msa.relative_position_index]
        bias = bias.permute(2, 0, 1)[None]  # (1, N, L, L)
        fold = (0, 1)
        if shift:
            bias = bias + self._shift_mask(h, w, shift, bias)[:, None]
            bias = bias.flatten(0, 1)[None]  # (1, windows * N, L, L)
            fold = (1, 2)
        out = F.scaled_dot_product_attention(
            q.flatten(*fold),
            k.flatten(*fold),
            v.flatten(*fold),
            attn_mask=bias.to(q.dtype),
            dropout_p=self.w_msa.attn_drop.p if self.training else 0.,
            scale=self.w_msa.scale)
        out = out.reshape(q.shape).transpose(2, 3).flatten(3)
        out = self.w_msa.proj_drop(self.w_msa.proj(out))
        return out.unflatten(2, (s, s)).unflatten(
            1, (h // s, w // s)).transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def _shift_mask(self, h: int, w: int, shift: int, like: Tensor) -> Tensor:
        """Keeps pixels from opposite borders apart, (windows, L, L)."""
        wrapped_h = torch.arange(h, device=like.device) >= h - shift
        wrapped_w = torch.arange(w, device=like.device) >= w - shift
        region = wrapped_h[:, None] * 2 + wrapped_w[None, :] * 1
        region = _to_windows(region[None, :, :, None], self.window_size)[0]
        # -100 as in the released code
        return (region != region.transpose(1, 2)).to(like.dtype) * -100

    def _convolution(self, qkv: Tensor) -> Tensor:
        """Convolution path, (B, H, W, 3C) to (B, H, W, C)."""
        # channels [3, N, D] to [D, 3, N]
        proj = qkv.unflatten(3, (3, self.num_heads, -1)).permute(
            0, 5, 3, 4, 1, 2).flatten(1, 3)
        return shift_conv(proj, self.fc_weight, self.shift_weight,
                          self.fc_bias).permute(0, 2, 3, 1)

    def extra_repr(self) -> str:
        return f'window_size={self.window_size}, shift_size={self.shift_size}'


def _to_windows(x: Tensor, size: int) -> Tensor:
    """(B, H', W', C) to (B, windows, L, C)."""
    x = x.unflatten(2, (-1, size)).unflatten(1, (-1, size))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _crop(x: Tensor, h: int, w: int, shift: int) -> Tensor:
    """Cut the window padding out of a shifted map, to (B, H, W, C)."""
    for dim, size in ((1, h), (2, w)):
        padding = x.shape[dim] - size
        if padding:
            # what was shifted across the border lies behind it
            first, _, last = x.split((size - shift, padding, shift), dim)
            x = torch.cat((first, last), dim)
    return x
