from .backbones import ACmixResNet, SASAResNet
from .dense_heads import SASARetinaHead
from .necks import ACmixFPN, SASAFPN

__all__ = [
    'ACmixFPN', 'ACmixResNet', 'SASAFPN', 'SASAResNet', 'SASARetinaHead'
]
