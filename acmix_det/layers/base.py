"""What every stand-in for nn.Conv2d has in common."""
from typing import Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair
from torch.utils.checkpoint import checkpoint

from acmix_det.ops.checks import (check_attn_kernel_size, check_choice,
                                  check_size)
from acmix_det.ops.local_attention import BACKENDS, PADDING_MODES

IntOrPair = Union[int, Tuple[int, int]]


class AttentionConv2d(nn.Module):
    """Base of the layers that stand in for a spatial ``nn.Conv2d``.

    It takes the arguments of the convolution that it replaces, checks them,
    and shows them as attributes under the names of ``nn.Conv2d``. It isn't a
    subclass of ``nn.Conv2d`` and holds none, since hosts re-initialise every
    convolution inside them and fuse it with the norm behind it.

    Args:
        in_channels (int): Channels of the input.
        out_channels (int): Channels of the output; ``num_heads`` divides it.
        kernel_size (int | tuple[int, int]): Kernel of the convolution that is
            replaced: square, odd, larger than 1. It isn't the extent of the
            attention.
        stride (int | tuple[int, int]): Defaults to 1.
        padding (int | tuple[int, int]): The padding with which the
            convolution keeps its size, ``dilation * (kernel_size // 2)``.
            Defaults to 0, which is right for no kernel.
        dilation (int | tuple[int, int]): Step between the neighbors.
            Defaults to 1.
        groups (int): 1. Defaults to 1.
        bias (bool): Whether to add a learnable bias to the output. Defaults
            to True.
        num_heads (int): Attention heads N.
        attn_kernel_size (int): Extent k of the neighborhood, odd.
        padding_mode (str): Border rule of the attention, see
            :func:`acmix_det.ops.local_attention`.
        backend (str): Backend of the attention, see there.
        with_cp (bool): Whether to compute queries, keys and values again in
            the backward pass instead of keeping them.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the layer cannot stand in for such a convolution.
    """

    def __init__(self, in_channels: int, out_channels: int,
                 kernel_size: IntOrPair, stride: IntOrPair,
                 padding: IntOrPair, dilation: IntOrPair, groups: int,
                 bias: bool, *, num_heads: int, attn_kernel_size: int,
                 padding_mode: str, backend: str, with_cp: bool) -> None:
        super().__init__()
        self.in_channels = check_size('in_channels', in_channels)
        self.out_channels = check_size('out_channels', out_channels)
        self.kernel_size = _square('kernel_size', kernel_size)
        self.stride = _square('stride', stride)
        self.dilation = _square('dilation', dilation)
        if self.kernel_size[0] == 1 or self.kernel_size[0] % 2 == 0:
            raise ValueError(
                'kernel_size must be odd and larger than 1 (attention stands '
                f'in for spatial convolutions only), got {kernel_size}; '
                'conv_cfg reaches the 1x1 convolutions of a ResNet or FPN '
                'too, attn_cfg of SASAResNet, SASAFPN, ... does not')
        kept = self.dilation[0] * (self.kernel_size[0] // 2)
        if isinstance(padding, str) or _pair(padding) != (kept, kept):
            raise ValueError(
                f'padding must be dilation * (kernel_size // 2) = {kept}, so '
                f'that the size is kept, got {padding!r}')
        self.padding = (kept, kept)
        if groups != 1:
            raise ValueError(
                f'groups must be 1, got {groups}; grouped convolutions '
                '(ResNeXt, depthwise) cannot be replaced')
        self.groups = groups
        self.transposed = False
        self.output_padding = (0, 0)

        self.num_heads = check_size('num_heads', num_heads)
        if out_channels % num_heads:
            divisors = [
                n for n in range(1, out_channels + 1) if out_channels % n == 0
            ]
            nearest = min(divisors, key=lambda n: abs(n - num_heads))
            raise ValueError(
                'out_channels must be divisible by num_heads, got '
                f'out_channels={out_channels}, num_heads={num_heads}; '
                f'num_heads={nearest} would do')
        self.head_dim = out_channels // num_heads
        self.attn_kernel_size = check_attn_kernel_size(attn_kernel_size)
        check_choice('padding_mode', padding_mode, PADDING_MODES)
        self.padding_mode = padding_mode
        check_choice('backend', backend, BACKENDS)
        self.backend = backend
        self.with_cp = with_cp
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_channels))
        else:
            self.register_parameter('bias', None)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x (Tensor): (B, in_channels, H, W).

        Returns:
            Tensor: (B, out_channels, ceil(H / stride), ceil(W / stride)).
        """
        self._check_input(x)
        if self.with_cp and torch.is_grad_enabled():
            return checkpoint(self._forward, x, use_reentrant=False,
                              preserve_rng_state=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f'{type(self).__name__}._forward')

    def init_weights(self) -> None:
        """Set every parameter to its start value.

        The constructor calls it, and hosts may call it again.
        """
        raise NotImplementedError(f'{type(self).__name__}.init_weights')

    def imitate_conv(self,
                     weight: Tensor,
                     input_mean: Optional[Tensor] = None) -> Optional[float]:
        """Set the parameters so that the layer imitates a convolution.

        Args:
            weight (Tensor): Kernels of the convolution that it replaces,
                (out_channels, in_channels, kh, kw).
            input_mean (Tensor | None): Expected value of each channel of the
                input, (in_channels,). Defaults to None, that of a rectified
                standard normal variable.

        Returns:
            float | None: Norm of what it cannot imitate, relative to the
            kernels; None, with no parameter changed, where it cannot imitate
            a convolution at all, as here.
        """
        return None

    def _check_input(self, x: Tensor) -> None:
        if (x.dim() != 4 or x.shape[1] != self.in_channels
                or 0 in x.shape[2:]):
            raise ValueError(
                f'x must have the shape (B, {self.in_channels}, H, W), got '
                f'{tuple(x.shape)}')

    @staticmethod
    def _split(x: Tensor, *sizes: int) -> Tensor:
        """(B, C, H, W) to (B, *sizes, H, W).

        In contrast to ``unflatten``, ONNX traces keep H and W dynamic.
        """
        b, _, h, w = x.shape
        return x.reshape(b, *sizes, h, w)

    def extra_repr(self) -> str:
        text = (f'{self.in_channels}, {self.out_channels}, '
                f'kernel_size={self.kernel_size}, stride={self.stride}, '
                f'padding={self.padding}, num_heads={self.num_heads}, '
                f'attn_kernel_size={self.attn_kernel_size}, '
                f'padding_mode={self.padding_mode!r}')
        if self.dilation != (1, 1):
            text += f', dilation={self.dilation}'
        if self.bias is None:
            text += ', bias=False'
        if self.backend != 'auto':
            text += f', backend={self.backend!r}'
        if self.with_cp:
            text += ', with_cp=True'
        return text


def _square(name: str, value: Union[int, Sequence[int]]) -> Tuple[int, int]:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, ) * 2
    if len(pair) != 2 or pair[0] != pair[1]:
        raise ValueError(f'{name} must be the same in both directions, got '
                         f'{value}')
    return (check_size(name, pair[0]), ) * 2
