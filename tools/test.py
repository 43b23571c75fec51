"""Test a detector: mmdet's test.py, with all of its arguments, after `import acmix_det`."""
import sys

from acmix_det.compat.cpu_training import end_gloo_process
from acmix_det.compat.faults import end_with_message
from acmix_det.compat.mmdet_tools import run_mmdet_tool

if __name__ == '__main__':
    with end_with_message():
        run_mmdet_tool('test', sys.argv[1:])
    end_gloo_process()
