"""Train a detector: mmdet's train.py, with all of its arguments, after `import acmix_det`.

Classes that do not fit, which mmdet would train with, stop it first. A full disk and broken data end it with a message.
"""
import argparse
import os
import sys

from mmengine.config import Config, DictAction

from acmix_det.compat.cpu_training import end_gloo_process
from acmix_det.compat.faults import end_with_message
from acmix_det.compat.mmdet_tools import run_mmdet_tool
from acmix_det.datasets import check_classes


def check_config(args):
    """Refuse classes that are no list, or another number of them in the head."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument('config', nargs='?', default='')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={})
    parsed, _ = parser.parse_known_args(args)
    if not os.path.isfile(parsed.config):
        return  # mmdet's script says so
    cfg = Config.fromfile(parsed.config)
    cfg.merge_from_dict(parsed.cfg_options)
    try:
        check_classes(cfg)
    except ValueError as error:
        sys.exit(f'{parsed.config}: {error}')


if __name__ == '__main__':
    check_config(sys.argv[1:])
    with end_with_message():
        run_mmdet_tool('train', sys.argv[1:])
    end_gloo_process()
