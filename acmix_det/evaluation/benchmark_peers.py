"""Local attention of other packages, to compare with."""
import importlib.util
from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

Peer = Tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Tuple[int, ...]]


def missing(name: str) -> Optional[str]:
    """Return why a peer is not there, None if it is."""
    if name == 'NATTEN' and importlib.util.find_spec('natten') is None:
        return 'not installed'
    return None


def natten(batch: int, heads: int, head_dim: int, height: int, width: int,
           kernel: int, device: str) -> Peer:
    """NATTEN's fused operation, and the shape of its query, key and value."""
    from natten.functional import na2d
    return (lambda *qkv: na2d(*qkv, kernel_size=kernel, scale=1.0),
            (batch, height, width, heads, head_dim))


def flex_attention(batch: int, heads: int, head_dim: int, height: int,
                   width: int, kernel: int, device: str) -> Peer:
    """PyTorch's FlexAttention with the mask of a neighborhood, and the shape.

    The rows of the map lie one behind the other, as they do in memory.
    """
    from torch.nn.attention.flex_attention import flex_attention as flex
    mask = neighborhood_mask(height, width, kernel, device)
    function = torch.compile(flex, dynamic=False)
    return (lambda *qkv: function(*qkv, block_mask=mask, scale=1.0),
            (batch, heads, height * width, head_dim))


def neighborhood_mask(height: int, width: int, kernel: int, device: str,
                      block: int = 128):
    """FlexAttention's block mask of a k x k neighborhood.

    It is written down by blocks: ``create_block_mask`` would make the map of
    all pairs of pixels, 4.5 G of them for 200 x 336.
    """
    from torch.nn.attention.flex_attention import BlockMask
    pixels, radius = height * width, kernel // 2
    first = torch.arange(0, pixels, block)[:, None]
    last = (first + block - 1).clamp(max=pixels - 1)
    seen = torch.zeros(len(first), len(first), dtype=torch.bool)
    for dy in range(-radius, radius + 1):
        low, high = first + dy * width - radius, last + dy * width + radius
        seen |= (first.T <= high) & (last.T >= low)

    def near(b, h, query, key):
        return (((query // width - key // width).abs() <= radius) &
                ((query % width - key % width).abs() <= radius))

    order = seen.int().argsort(dim=1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        seen.sum(1, dtype=torch.int32)[None, None].to(device),
        order[None, None].to(device, torch.int32), BLOCK_SIZE=block,
        mask_mod=near, seq_lengths=(pixels, pixels))


PEERS = {'NATTEN': natten, 'FlexAttention': flex_attention}
