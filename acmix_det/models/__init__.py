from .backbones import ACmixResNet, SASAResNet
from .dense_heads import SASARetinaHead
from .necks import ACmixFPN, SASAFPN
from .pvt import ACmixPyramidVisionTransformer
from .san import SAN, ACmixSAN
from .swin import ACmixSwinTransformer

__all__ = [
    'ACmixFPN', 'ACmixPyramidVisionTransformer', 'ACmixResNet', 'ACmixSAN',
    'ACmixSwinTransformer', 'SAN', 'SASAFPN', 'SASAResNet', 'SASARetinaHead'
]
