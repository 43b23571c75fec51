"""Swin Transformer whose window attention is ACmix."""
import math
import warnings
from typing import Dict, List, Tuple

import torch
import torch.nn.functional as F
from mmdet.models.backbones.swin import SwinBlock, SwinTransformer
from mmdet.registry import MODELS
from mmengine.logging import print_log
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from acmix_det.checkpoints import convert_acmix, rename_swin, some_of
from acmix_det.layers.acmix_window import ACmixWindowMSA
from acmix_det.ops.checks import (check_finite, check_int, check_list,
                                  check_positive_int, check_stages)
from .pretrained import (check_init_cfg, load_fitting, read_weights,
                         start_as_plain_attention)


class ACmixSwinBlock(nn.Module):
    """Block of a Swin Transformer with :class:`ACmixWindowMSA`.

    Args:
        block (SwinBlock): mmdet's block, whose other layers it takes over.
    """

    def __init__(self, block: SwinBlock) -> None:
        super().__init__()
        self.with_cp = block.with_cp
        self.norm1 = block.norm1
        self.attn = ACmixWindowMSA(block.attn)
        self.norm2 = block.norm2
        self.ffn = block.ffn

    def forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        """Apply the block, (B, H * W, C) to (B, H * W, C)."""
        if self.with_cp and torch.is_grad_enabled():
            return checkpoint(self._forward, x, hw_shape, use_reentrant=False)
        return self._forward(x, hw_shape)

    def _forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        x = x + self.attn(self.norm1(x), hw_shape)
        return self.ffn(self.norm2(x), identity=x)


@MODELS.register_module()
class ACmixSwinTransformer(SwinTransformer):
    """mmdet's SwinTransformer with ACmix for the attention of every block.

    Every argument of :class:`mmdet.models.SwinTransformer` is accepted, by
    keyword; the defaults are those of Swin-T. It computes what the released
    Swin-ACmix code computes, at any image size, see
    :class:`ACmixWindowMSA`.

    Args:
        **kwargs: Arguments of :class:`mmdet.models.SwinTransformer`.
            ``pretrained`` is refused, use ``init_cfg``, of type 'Pretrained'
            or 'WarmStart', see :meth:`init_weights`. ``use_abs_pos_embed`` is
            refused, since mmdet's fits one image size only.
            ``convert_weights`` has no effect: the names of a checkpoint show
            whether it is mmdet's, Swin's or Swin-ACmix's own.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If arguments contradict each other.

    Example:
        >>> import torch
        >>> from acmix_det.models import ACmixSwinTransformer
        >>> model = ACmixSwinTransformer(embed_dims=24)
        >>> [tuple(x.shape) for x in model(torch.rand(1, 3, 100, 67))]
        [(1, 24, 25, 17), (1, 48, 13, 9), (1, 96, 7, 5), (1, 192, 4, 3)]
    """

    def __init__(self, **kwargs) -> None:
        _check_arguments(**kwargs)
        super().__init__(**kwargs)
        for stage in self.stages:
            for i, block in enumerate(stage.blocks):
                stage.blocks[i] = ACmixSwinBlock(block)
        self._freeze_stages()
        if self.frozen_stages >= 0 and self.init_cfg is None:
            self._warn_of_frozen('all of them')

    def train(self, mode: bool = True) -> 'ACmixSwinTransformer':
        """Set the mode, frozen stages respected."""
        super().train(mode)
        return self  # mmdet's returns None

    def init_weights(self) -> None:
        """Initialise or load the weights.

        With ``init_cfg=dict(type='Pretrained', ...)`` the weights that fit
        are loaded from a checkpoint of this class, of the released Swin-ACmix
        code, of mmdet's SwinTransformer or of the Swin repository, and a
        summary is logged. Position tables of another window size are
        interpolated. Classifier and final norm are not used.

        With ``type='WarmStart'``, for a plain Swin, alpha is then set to 1
        and beta to 0 in every layer: training starts from a network that
        computes what that Swin computes.

        Raises:
            ValueError: If ``init_cfg`` is of another type, or no weight of
                the checkpoint fits.
        """
        cfg = self.init_cfg
        if cfg is None:
            super().init_weights()
            for layer in self._acmix_layers():
                layer.init_weights()
            return
        state = _rename(read_weights(cfg))
        summary = self._load(state, cfg['checkpoint'])
        summary += start_as_plain_attention(cfg, state, self._acmix_layers())
        print_log(summary, logger='current')
        self._is_init = True

    def _acmix_layers(self) -> List[ACmixWindowMSA]:
        return [m for m in self.modules() if isinstance(m, ACmixWindowMSA)]

    def _load(self, state: Dict[str, Tensor], path: str) -> str:
        """Load what fits; return a summary."""
        resized = []

        def adapt(key: str, x: Tensor, own: Tensor) -> Tensor:
            if not key.endswith('.relative_position_bias_table'):
                return x
            table = _resize_table(x, own)
            if table is not x:
                resized.append(key)
            return table

        summary = load_fitting(self, state, path, adapt)
        new = [
            key for key, p in self.named_parameters()
            if not p.requires_grad and key not in state
        ]
        if new:
            self._warn_of_frozen(some_of(new))
        if resized:
            summary += (f'; {len(resized)} position tables interpolated to '
                        'the window size of the model')
        return summary

    def _warn_of_frozen(self, names: str) -> None:
        warnings.warn(
            f'frozen_stages={self.frozen_stages} freezes weights of '
            f'{type(self).__name__} that no checkpoint of init_cfg sets '
            f'({names}); unless one is loaded, they stay random for the whole '
            'training: set frozen_stages=-1')


def _check_arguments(depths=(2, 2, 6, 2),
                     num_heads=(3, 6, 12, 24),
                     strides=(4, 2, 2, 2),
                     out_indices=(0, 1, 2, 3),
                     window_size=7,
                     frozen_stages=-1,
                     pretrained=None,
                     use_abs_pos_embed=False,
                     qk_scale=None,
                     init_cfg=None,
                     **kwargs) -> None:
    check_init_cfg(init_cfg)
    if pretrained is not None:
        raise ValueError(
            'pretrained must be None, use init_cfg=dict(type="Pretrained", '
            f'checkpoint=...) instead, got {pretrained!r}')
    if use_abs_pos_embed:
        raise ValueError('use_abs_pos_embed must be False (it fits images of '
                         f'one size only), got {use_abs_pos_embed!r}')
    check_positive_int('window_size', window_size)
    if qk_scale is not None:
        check_finite('qk_scale', qk_scale)
    stages = len(check_list('depths', depths))
    for name, value in (('num_heads', num_heads), ('strides', strides)):
        if len(check_list(name, value)) != stages:
            raise ValueError(f'{name} must have one entry for each of the '
                             f'{stages} depths, got {value}')
    check_stages('out_indices', out_indices, stages)
    if not -1 <= check_int('frozen_stages', frozen_stages) <= stages:
        raise ValueError(f'frozen_stages must be from -1 to {stages}, got '
                         f'{frozen_stages}')


def _rename(state: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """Weights under mmdet's names for a Swin."""
    start = 'backbone.'  # of a detector
    if any(key.startswith(start) for key in state):
        state = {
            key[len(start):]: x
            for key, x in state.items() if key.startswith(start)
        }
    if any(key.endswith('.dep_conv.weight') for key in state):
        return convert_acmix(state)
    if any(key.startswith('layers.') for key in state):
        return rename_swin(state)
    index = '.relative_position_index'
    return {key: x for key, x in state.items() if not key.endswith(index)}


def _resize_table(table: Tensor, own: Tensor) -> Tensor:
    """A position table for the window size of another, (positions, N)."""
    if table.dim() != 2 or table.shape[1] != own.shape[1]:
        return table
    old, new = math.isqrt(len(table)), math.isqrt(len(own))
    if old == new or not old or old**2 != len(table):
        return table
    table = table.T.unflatten(1, (old, old))[None].to(own.dtype)
    table = F.interpolate(table, size=(new, new), mode='bicubic')
    return table[0].flatten(1).T
