"""The RetinaNet head of stand-alone self-attention."""
from typing import Optional

from mmcv.cnn import ConvModule
from mmdet.models.dense_heads import RetinaHead
from mmdet.registry import MODELS
from torch import nn

from .swap import resolve_attn_cfg, swap_conv


@MODELS.register_module()
class SASARetinaHead(RetinaHead):
    """mmdet's RetinaHead with attention towers and predictors.

    As in `Stand-Alone Self-Attention in Vision Models
    <https://arxiv.org/abs/1906.05909>`_, section 4.2 and appendix: every 3x3
    convolution of the towers is attention, value projections start from
    N(0, 0.01), and a predictor is attention followed by a pointwise
    convolution, which mixes the attention heads.

    Args:
        attn_cfg (dict | None): The attention layer: ``type`` and its own
            arguments. Defaults to None, SASA with ``value_init_std=0.01``.
        **kwargs: Arguments of :class:`mmdet.models.RetinaHead`, positional
            ones too.

    Raises:
        TypeError: If ``attn_cfg`` has a key that its layer does not take.
        ValueError: If the layer cannot replace such a convolution.

    Example:
        >>> import torch
        >>> from acmix_det.models import SASARetinaHead
        >>> head = SASARetinaHead(80, 16, feat_channels=16)
        >>> scores, deltas = head.forward_single(torch.rand(1, 16, 9, 7))
        >>> tuple(scores.shape), tuple(deltas.shape)
        ((1, 720, 9, 7), (1, 36, 9, 7))
    """

    def __init__(self, *args, attn_cfg: Optional[dict] = None,
                 **kwargs) -> None:
        attn_cfg = resolve_attn_cfg(attn_cfg, 'SASA')
        if attn_cfg['type'] == 'SASA':
            attn_cfg.setdefault('value_init_std', 0.01)
        self.attn_cfg = attn_cfg  # super().__init__ calls _init_layers
        super().__init__(*args, **kwargs)

    def _init_layers(self) -> None:
        """Build the towers, then swap."""
        super()._init_layers()
        for tower, name in ((self.cls_convs, 'retina_cls'),
                            (self.reg_convs, 'retina_reg')):
            conv = getattr(self, name)
            tower.append(
                ConvModule(
                    conv.in_channels,
                    conv.in_channels,
                    3,
                    padding=1,
                    bias=False,
                    act_cfg=None))
            for layer in tower:
                swap_conv(layer, 'conv', self.attn_cfg)
            setattr(self, name,
                    nn.Conv2d(conv.in_channels, conv.out_channels, 1))
