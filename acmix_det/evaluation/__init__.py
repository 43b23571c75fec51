from .complexity import Complexity, build_detector, count_complexity
from .runs import Run, read_run

__all__ = [
    'Complexity', 'Run', 'build_detector', 'count_complexity', 'read_run'
]
