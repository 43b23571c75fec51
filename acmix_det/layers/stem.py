"""The attention stem of stand-alone self-attention networks."""
from typing import Tuple

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from acmix_det.ops.checks import check_size


@MODELS.register_module('SASAStem')
class SASAStem2d(nn.Module):
    r"""Self-attention on the image inside each non-overlapping block.

    From `Stand-Alone Self-Attention in Vision Models
    <https://arxiv.org/abs/1906.05909>`_, section 3.3 and appendix: single
    pixels carry too little for a content-based choice of values, so the value
    projection depends on the place (a, b) inside the block,

    .. math::
        v(a, b) = \Big(\sum_m p(a, b, m) W_V^m\Big) x(a, b),\quad
        p(a, b, m) = softmax_m((e_a + e_b) \cdot \nu_m),

    with p shared by the heads. Queries, keys and relative positions are as in
    :class:`StandAloneSelfAttention2d`. A block that the image does not fill
    attends to its pixels inside the image only. Norm and max pooling (by
    ``block_size``) are the host's.

    Not published, hence chosen here: the number of mixtures (4, an option)
    and the width of :math:`e` and :math:`\nu` (that of a head).

    Shapes: B batch, N ``num_heads``, D = ``out_channels`` / N, s
    ``block_size``, M ``num_mixtures``, P = s * s, Z = B * blocks.

    Args:
        in_channels (int): Channels of the image.
        out_channels (int): Channels of the output; ``num_heads`` divides it.
        num_heads (int): Attention heads. Defaults to 4.
        num_mixtures (int): Value projections M that are mixed; 1 is plain
            attention. Defaults to 4.
        block_size (int): Height and width of a block. Defaults to 4.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``out_channels`` is not divisible by ``num_heads``, or
            an argument is not positive.

    Example:
        >>> import torch
        >>> from acmix_det.layers import SASAStem2d
        >>> SASAStem2d(3, 64)(torch.rand(1, 3, 30, 37)).shape
        torch.Size([1, 64, 30, 37])
    """

    def __init__(self,
                 in_channels: int,
                 out_channels: int,
                 *,
                 num_heads: int = 4,
                 num_mixtures: int = 4,
                 block_size: int = 4) -> None:
        super().__init__()
        self.in_channels = check_size('in_channels', in_channels)
        self.out_channels = check_size('out_channels', out_channels)
        self.num_heads = check_size('num_heads', num_heads)
        self.num_mixtures = check_size('num_mixtures', num_mixtures)
        # attention between all pixels of a block: the fourth power of it
        self.block_size = check_size('block_size', block_size, most=64)
        if out_channels % num_heads:
            raise ValueError(
                'out_channels must be divisible by num_heads, got '
                f'out_channels={out_channels}, num_heads={num_heads}')
        self.head_dim = out_channels // num_heads
        half = self.head_dim // 2
        reach = 2 * block_size - 1
        self.query_weight = nn.Parameter(
            torch.empty(out_channels, in_channels))
        self.key_weight = nn.Parameter(torch.empty(out_channels, in_channels))
        self.value_weight = nn.Parameter(
            torch.empty(num_mixtures, out_channels, in_channels))
        self.rel_pos_h = nn.Parameter(torch.empty(num_heads, half, reach))
        self.rel_pos_w = nn.Parameter(
            torch.empty(num_heads, self.head_dim - half, reach))
        if num_mixtures > 1:
            self.mixture_pos_h = nn.Parameter(
                torch.empty(block_size, self.head_dim))
            self.mixture_pos_w = nn.Parameter(
                torch.empty(block_size, self.head_dim))
            self.mixture_weight = nn.Parameter(
                torch.empty(num_mixtures, self.head_dim))
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set every parameter to its start value."""
        std = self.in_channels**-0.5
        self.query_weight.normal_(0, std * self.head_dim**-0.5)
        self.key_weight.normal_(0, std)
        self.value_weight.normal_(0, 2**0.5 * std)
        self.rel_pos_h.normal_()
        self.rel_pos_w.normal_()
        if self.num_mixtures > 1:
            self.mixture_pos_h.normal_()
            self.mixture_pos_w.normal_()
            self.mixture_weight.normal_(0, self.head_dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the stem.

        Args:
            x (Tensor): Images, (B, in_channels, H, W).

        Returns:
            Tensor: (B, out_channels, H, W).
        """
        if (x.dim() != 4 or x.shape[1] != self.in_channels
                or 0 in x.shape[2:]):
            raise ValueError(
                f'x must have the shape (B, {self.in_channels}, H, W), got '
                f'{tuple(x.shape)}')
        b, _, h, w = x.shape
        pixels = self._to_blocks(x)  # (Z, P, in_channels)
        inside = self._to_blocks(x.new_ones(1, 1, h, w)) > 0  # (blocks, P, 1)

        query = self._split_heads(F.linear(pixels, self.query_weight))
        key = self._split_heads(F.linear(pixels, self.key_weight))
        value = self._split_heads(
            torch.einsum('zpi,poi->zpo', pixels, self._value_weight()))

        # softmax in float32 at least: the logits are not scaled
        logits = query @ key.transpose(-1, -2) + self._position_logits(query)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits.reshape(b, inside.shape[0],
                                *logits.shape[1:]).masked_fill(
            ~inside.transpose(-1, -2)[:, None], float('-inf')).flatten(0, 1)
        attn = logits.softmax(-1).to(value.dtype)  # (Z, N, P, P)
        out = (attn @ value).transpose(1, 2).flatten(2)
        return self._from_blocks(out, b, h, w)

    def _to_blocks(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (Z, P, C), padded with zeros to whole blocks."""
        # sizes by name: ONNX traces keep them dynamic, in contrast to unflatten
        b, c, h, w = x.shape
        s, rows, cols = self._blocks(h, w)
        x = F.pad(x, (0, cols * s - w, 0, rows * s - h))
        x = x.reshape(b, c, rows, s, cols, s).permute(0, 2, 4, 3, 5, 1)
        return x.reshape(b * rows * cols, s * s, c)

    def _from_blocks(self, x: Tensor, b: int, h: int, w: int) -> Tensor:
        """(Z, P, C) to (B, C, H, W)."""
        s, rows, cols = self._blocks(h, w)
        x = x.reshape(b, rows, cols, s, s, self.out_channels)
        x = x.permute(0, 5, 1, 3, 2, 4)
        x = x.reshape(b, self.out_channels, rows * s, cols * s)
        return x[..., :h, :w]

    def _blocks(self, h: int, w: int) -> Tuple[int, int, int]:
        """Block size, rows of blocks, columns of blocks."""
        s = self.block_size
        return s, (h + s - 1) // s, (w + s - 1) // s

    def _split_heads(self, x: Tensor) -> Tensor:
        """(Z, P, C) to (Z, N, P, D)."""
        z, p, _ = x.shape
        return x.reshape(z, p, self.num_heads,
                         self.head_dim).transpose(1, 2)

    def _value_weight(self) -> Tensor:
        """Value projection of each place in a block, (P, out, in)."""
        if self.num_mixtures == 1:
            return self.value_weight.expand(self.block_size**2, -1, -1)
        place = self.mixture_pos_h[:, None] + self.mixture_pos_w[None]
        mixture = (place.flatten(0, 1) @ self.mixture_weight.T).softmax(-1)
        return torch.einsum('pm,moi->poi', mixture, self.value_weight)

    def _position_logits(self, query: Tensor) -> Tensor:
        """q . r of every pair of pixels in a block, (Z, N, P, P)."""
        half = self.head_dim // 2
        place = torch.arange(self.block_size**2, device=query.device)
        logits = 0
        for q, rel_pos, along in (
            (query[..., :half], self.rel_pos_h, place // self.block_size),
            (query[..., half:], self.rel_pos_w, place % self.block_size)):
            offset = along[None, :] - along[:, None] + self.block_size - 1
            per_offset = q @ rel_pos.to(q.dtype)  # (Z, N, P, 2s - 1)
            logits = logits + per_offset.gather(
                -1, offset.expand(*per_offset.shape[:2], -1, -1))
        return logits

    def extra_repr(self) -> str:
        return (f'{self.in_channels}, {self.out_channels}, '
                f'num_heads={self.num_heads}, '
                f'num_mixtures={self.num_mixtures}, '
                f'block_size={self.block_size}')
