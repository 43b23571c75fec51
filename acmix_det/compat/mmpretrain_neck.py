"""Pooling between mmdet's backbones and mmpretrain's classification heads."""
from typing import Sequence, Tuple

from mmengine.registry import MODELS
from torch import Tensor, nn


@MODELS.register_module()
class LastMapMean(nn.Module):
    """Mean over the last map of a backbone.

    mmpretrain's GlobalAveragePooling refuses lists, which mmdet's Swin and PVT
    return.
    """

    def forward(self, maps: Sequence[Tensor]) -> Tuple[Tensor]:
        """Pool the last of the maps, (B, C, H, W), to (B, C)."""
        return (maps[-1].mean((2, 3)), )
