"""Feature pyramids whose 3x3 convolutions are attention."""
from typing import Optional, Tuple

from mmdet.models.necks import FPN
from mmdet.registry import MODELS
from torch import Tensor

from .swap import resolve_attn_cfg, swap_conv


class AttnFPN(FPN):
    """mmdet's FPN with attention for its 3x3 convolutions.

    Replaced are the output convolutions and the extra ones with stride 2 (P6
    and P7 of RetinaNet); the 1x1 laterals stay.

    Args:
        attn_cfg (dict | None): The attention layer: ``type`` and its own
            arguments (``num_heads``, ``attn_kernel_size``, ...). Defaults to
            None, the layer's defaults.
        **kwargs: Arguments of :class:`mmdet.models.FPN`, positional ones too.

    Raises:
        TypeError: If ``attn_cfg`` has a key that its layer does not take.
        ValueError: If the layer cannot replace such a convolution, or the
            arguments of the FPN contradict each other.

    Example:
        >>> import torch
        >>> from acmix_det.models import SASAFPN
        >>> neck = SASAFPN(in_channels=[8, 16], out_channels=32, num_outs=2)
        >>> maps = neck((torch.rand(1, 8, 20, 30), torch.rand(1, 16, 10, 15)))
        >>> [tuple(x.shape) for x in maps]
        [(1, 32, 20, 30), (1, 32, 10, 15)]
    """

    attn_type: str

    def __init__(self, *args, attn_cfg: Optional[dict] = None,
                 **kwargs) -> None:
        attn_cfg = resolve_attn_cfg(attn_cfg, self.attn_type)
        try:
            super().__init__(*args, **kwargs)
        except AssertionError as error:  # mmdet's have no text
            raise ValueError(
                'in_channels must be a list, and num_outs, start_level, '
                'end_level and add_extra_convs fit its length (see mmdet\'s '
                f'FPN), got {args or ""}{kwargs}') from error
        self.attn_cfg = attn_cfg
        for fpn_conv in self.fpn_convs:
            swap_conv(fpn_conv, 'conv', attn_cfg)

    def forward(self, inputs: Tuple[Tensor]) -> Tuple[Tensor]:
        """Apply the neck.

        Args:
            inputs (tuple[Tensor]): Maps of the backbone, each (B, C, H, W).

        Returns:
            tuple[Tensor]: ``num_outs`` maps, each (B, out_channels, H, W).
        """
        if len(inputs) != len(self.in_channels):
            raise ValueError(
                'inputs must have one map for each of the '
                f'{len(self.in_channels)} in_channels={self.in_channels}, got '
                f'{len(inputs)}: check out_indices of the backbone')
        return super().forward(inputs)


@MODELS.register_module()
class SASAFPN(AttnFPN):
    __doc__ = AttnFPN.__doc__
    attn_type = 'SASA'


@MODELS.register_module()
class ACmixFPN(AttnFPN):
    __doc__ = AttnFPN.__doc__
    attn_type = 'ACmix'
