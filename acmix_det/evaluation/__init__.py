from .complexity import Complexity, build_detector, count_complexity
from .runs import Run, Schedule, find_config, read_run, read_schedule

__all__ = [
    'Complexity', 'Run', 'Schedule', 'build_detector', 'count_complexity',
    'find_config', 'read_run', 'read_schedule'
]
