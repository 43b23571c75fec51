"""Self-attention networks (SAN), plain and with ACmix."""
import warnings
from collections import OrderedDict
from typing import List, Optional, Sequence, Tuple, Type

import torch
from mmdet.registry import MODELS
from mmengine.logging import print_log
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from acmix_det.checkpoints import some_of
from acmix_det.layers.patchwise import (ACmixPatchwiseAttention2d,
                                        PatchwiseAttention2d, build_norm)
from acmix_det.ops.checks import (check_attn_kernel_size, check_int,
                                  check_list, check_size, check_stages)
from .pretrained import (check_init_cfg, load_fitting, read_weights,
                         start_as_plain_attention)
from .swap import resolve_attn_cfg


class SANBlock(nn.Module):
    """Pre-activation block of SAN: attention at a quarter of the width.

    Norm, ReLU, attention, norm, ReLU, pointwise, added to the input.

    Args:
        channels (int): Channels C of input and output; queries and keys have
            C / 16, values C / 4.
        attn (type): The attention layer.
        attn_kernel_size (int): Extent of its neighborhood.
        attn_cfg (dict): Its other arguments.
        norm_cfg (dict): The norms.
        with_cp (bool): Whether to recompute activations in the backward pass
            to save memory.
    """

    def __init__(self, channels: int, attn: Type[PatchwiseAttention2d],
                 attn_kernel_size: int, attn_cfg: dict, norm_cfg: dict,
                 with_cp: bool) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.norm1 = build_norm(norm_cfg, channels)
        self.attn = attn(channels, channels // 16, channels // 4,
                         attn_kernel_size, norm_cfg, **attn_cfg)
        self.norm2 = build_norm(norm_cfg, channels // 4)
        self.conv = nn.Conv2d(channels // 4, channels, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block, (B, C, H, W) to (B, C, H, W)."""
        if self.with_cp and torch.is_grad_enabled():
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        out = self.attn(self.relu(self.norm1(x)))
        return x + self.conv(self.relu(self.norm2(out)))


@MODELS.register_module()
class SAN(BaseModule):
    """Self-attention network with patchwise attention.

    From `Exploring Self-attention for Image Recognition
    <https://arxiv.org/abs/2004.13621>`_: no spatial convolution at all, but
    attention with a weight for every offset and channel
    (:class:`acmix_det.layers.patchwise.PatchwiseAttention2d`), and maximum
    pooling between the stages.

    Stages work at the strides 2, 4, 8, 16 and 32. The one at stride 2 is part
    of the stem, so that the stages that ``out_indices`` and
    ``frozen_stages`` count have the strides and widths of a ResNet-50. Pooled
    maps are rounded up.

    The relations of an attention layer take about three times the memory of
    its input; ``with_cp`` saves most of that in training.

    Args:
        depth (int): 10, 15 or 19.
        in_channels (int): Channels of the image. Defaults to 3.
        base_channels (int): Channels of the stem, a multiple of 16. Defaults
            to 64.
        attn_kernel_sizes (Sequence[int]): Extent of the neighborhood in the
            stem and in each of the four stages. Defaults to (3, 7, 7, 7, 7).
        attn_cfg (dict | None): Other arguments of the attention layer:
            ``share_planes``, for ACmixSAN also ``conv_kernel_size`` and
            ``num_shift_sets``. Defaults to None, the layer's defaults.
        out_indices (Sequence[int]): Stages (0 to 3) that are returned.
            Defaults to (0, 1, 2, 3).
        frozen_stages (int): 0 freezes the stem, i the stem and i stages; -1
            nothing. Defaults to -1.
        norm_cfg (dict): Norms, also of the attention. They must fit any
            number of channels, as batch norms do. Defaults to
            dict(type='BN', requires_grad=True).
        norm_eval (bool): Whether batch norms keep their statistics in
            training. Only for pretrained weights. Defaults to False.
        with_cp (bool): Whether to recompute the activations of each block in
            the backward pass to save memory. Defaults to False.
        init_cfg (dict | list[dict] | None): Start values, see
            :meth:`init_weights`. Defaults to None, PyTorch's for every layer
            as in the released code. (Kaiming's with the fan out, the start of
            a ResNet, is too large here: until the statistics of the norms
            settle, the products of weights and values overflow in testing.)

    Raises:
        TypeError: If ``attn_cfg`` has a key that the layer does not take.
        ValueError: If an argument breaks the rules above.

    Example:
        >>> import torch
        >>> from acmix_det.models import SAN
        >>> model = SAN(10, base_channels=32)
        >>> [tuple(x.shape) for x in model(torch.rand(1, 3, 33, 50))]
        [(1, 128, 9, 13), (1, 256, 5, 7), (1, 512, 3, 4), (1, 1024, 2, 2)]
    """

    # blocks in the stem and in each stage
    arch_settings = {
        10: (2, 1, 2, 4, 1),
        15: (3, 2, 3, 5, 2),
        19: (3, 3, 4, 6, 3)
    }
    attn_class: Type[PatchwiseAttention2d] = PatchwiseAttention2d

    def __init__(self,
                 depth: int,
                 in_channels: int = 3,
                 base_channels: int = 64,
                 attn_kernel_sizes: Sequence[int] = (3, 7, 7, 7, 7),
                 attn_cfg: Optional[dict] = None,
                 out_indices: Sequence[int] = (0, 1, 2, 3),
                 frozen_stages: int = -1,
                 norm_cfg: dict = dict(type='BN', requires_grad=True),
                 norm_eval: bool = False,
                 with_cp: bool = False,
                 init_cfg: Optional[dict] = None) -> None:
        super().__init__(init_cfg=init_cfg)
        check_init_cfg(init_cfg)
        if depth not in [*self.arch_settings]:  # of any type
            raise ValueError(f'depth must be one of '
                             f'{sorted(self.arch_settings)}, got {depth!r}')
        self.in_channels = check_size('in_channels', in_channels)
        if check_size('base_channels', base_channels) % 16:
            raise ValueError('base_channels must be a multiple of 16, got '
                             f'{base_channels}')
        blocks = self.arch_settings[depth]
        for size in check_list('attn_kernel_sizes', attn_kernel_sizes):
            check_attn_kernel_size(size, 'each of attn_kernel_sizes')
        if len(attn_kernel_sizes) != len(blocks):
            raise ValueError(
                'attn_kernel_sizes must have one entry for the stem and each '
                f'of the 4 stages, got {attn_kernel_sizes}')
        out_indices = check_stages('out_indices', out_indices, 4)
        if check_int('frozen_stages', frozen_stages) not in range(-1, 5):
            raise ValueError('frozen_stages must be from -1 to 4, got '
                             f'{frozen_stages}')
        attn_cfg = resolve_attn_cfg(attn_cfg, self.attn_class)
        if attn_cfg.pop('type') is not self.attn_class:
            raise ValueError("attn_cfg must have no 'type', which is always "
                             f'{self.attn_class.__name__} here')
        self.depth = depth
        self.attn_cfg = attn_cfg
        self.out_indices = out_indices
        self.frozen_stages = frozen_stages
        self.norm_cfg = norm_cfg
        self.norm_eval = norm_eval
        self.with_cp = with_cp
        widths = [base_channels * factor for factor in (1, 4, 8, 16, 32)]
        stages = [
            self._make_stage(*args) for args in zip(
                [base_channels, *widths], widths, blocks, attn_kernel_sizes)
        ]
        self.stem = nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(in_channels, base_channels, 1, bias=False),
                norm=build_norm(norm_cfg, base_channels),
                relu=nn.ReLU(inplace=True),
                stage=stages[0]))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages[1:]
        self._freeze_stages()
        if frozen_stages >= 0 and not self._checkpoint_cfg():
            self._warn_of_frozen('all of them')

    def _make_stage(self, in_channels: int, out_channels: int, blocks: int,
                    attn_kernel_size: int) -> nn.Sequential:
        return nn.Sequential(
            OrderedDict(
                pool=nn.MaxPool2d(2, 2, ceil_mode=True),
                conv=nn.Conv2d(in_channels, out_channels, 1, bias=False),
                blocks=nn.Sequential(*(SANBlock(
                    out_channels, self.attn_class, attn_kernel_size,
                    self.attn_cfg, self.norm_cfg, self.with_cp)
                                       for _ in range(blocks))),
                norm=build_norm(self.norm_cfg, out_channels),
                relu=nn.ReLU(inplace=True)))

    def forward(self, x: Tensor) -> Tuple[Tensor, ...]:
        """Compute the maps of the stages in ``out_indices``.

        Args:
            x (Tensor): Images, (B, in_channels, H, W).

        Returns:
            tuple[Tensor]: Of stage i with stride s = 4 * 2**i:
            (B, base_channels * 4 * 2**i, ceil(H / s), ceil(W / s)).
        """
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f'x must have the shape (B, {self.in_channels}, H, W), got '
                f'{tuple(x.shape)}')
        x = self.stem(x)
        outs = []
        for i, stage in enumerate(self._stages()):
            x = stage(x)
            if i in self.out_indices:
                outs.append(x)
        return tuple(outs)

    def _stages(self) -> List[nn.Module]:
        return [self.layer1, self.layer2, self.layer3, self.layer4]

    def train(self, mode: bool = True) -> 'SAN':
        """Set the mode, frozen stages and ``norm_eval`` respected."""
        super().train(mode)
        self._freeze_stages()
        if mode and self.norm_eval:
            for m in self.modules():
                if isinstance(m, _BatchNorm):
                    m.eval()
        return self

    def _freeze_stages(self) -> None:
        for part in [self.stem, *self._stages()][:self.frozen_stages + 1]:
            part.eval()
            part.requires_grad_(False)

    def _checkpoint_cfg(self) -> bool:
        return isinstance(self.init_cfg, dict) and (
            'checkpoint' in self.init_cfg)

    def init_weights(self) -> None:
        """Initialise or load the weights.

        With ``init_cfg=dict(type='Pretrained', checkpoint=...)`` the weights
        that fit are loaded (for ACmixSAN a plain SAN's too) and a summary is
        logged. With ``type='WarmStart'``, for ACmixSAN and the weights of a
        plain SAN, alpha is then set to 1 and beta to 0 in every layer:
        training starts from a network that computes what that SAN computes.

        Raises:
            ValueError: If no weight of the checkpoint fits, or 'WarmStart'
                makes no sense.
        """
        if not self._checkpoint_cfg():
            super().init_weights()
            return
        state = read_weights(self.init_cfg)
        layers = (m for m in self.modules()
                  if isinstance(m, ACmixPatchwiseAttention2d))
        summary = load_fitting(self, state, self.init_cfg['checkpoint'])
        summary += start_as_plain_attention(self.init_cfg, state, layers)
        print_log(summary, logger='current')
        self._is_init = True
        new = [
            key for key, p in self.named_parameters()
            if not p.requires_grad and key not in state
        ]
        if new:
            self._warn_of_frozen(some_of(new))

    def _warn_of_frozen(self, names: str) -> None:
        warnings.warn(
            f'frozen_stages={self.frozen_stages} freezes weights of '
            f'{type(self).__name__} that no checkpoint of init_cfg sets '
            f'({names}); unless one is loaded, they stay random for the whole '
            'training: set frozen_stages=-1')


@MODELS.register_module()
class ACmixSAN(SAN):
    """SAN with ACmix for every patchwise attention.

    From `On the Integration of Self-Attention and Convolution
    <https://arxiv.org/abs/2111.14556>`_; the layer is
    :class:`acmix_det.layers.patchwise.ACmixPatchwiseAttention2d`, whose
    ``num_shift_sets`` is 2 in the published parameter counts and 1 by
    default.

    Args:
        *args, **kwargs: Arguments of :class:`SAN`.

    Example:
        >>> import torch
        >>> from acmix_det.models import ACmixSAN
        >>> model = ACmixSAN(10, base_channels=32)
        >>> [tuple(x.shape) for x in model(torch.rand(1, 3, 33, 50))]
        [(1, 128, 9, 13), (1, 256, 5, 7), (1, 512, 3, 4), (1, 1024, 2, 2)]
    """
    attn_class = ACmixPatchwiseAttention2d
