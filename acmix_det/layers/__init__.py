from .acmix import ACmix2d
from .base import AttentionConv2d
from .sasa import StandAloneSelfAttention2d
from .stem import SASAStem2d

__all__ = [
    'ACmix2d', 'AttentionConv2d', 'SASAStem2d', 'StandAloneSelfAttention2d'
]
