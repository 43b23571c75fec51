"""Self-attention layers (SASA, ACmix) in the place of convolutions in MMDetection 3.x detectors.

Importing the package checks its dependencies, makes the host run with them (`acmix_det.compat`) and
registers every layer, model, data set and metric.
"""
from . import compat
from .version import __version__

compat.check_dependencies()
compat.install()

from . import checkpoints, datasets, layers, models, ops  # noqa: E402

__all__ = ['__version__', 'checkpoints', 'compat', 'datasets', 'layers', 'models', 'ops']
