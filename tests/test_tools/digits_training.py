"""A small training on digits for tools/train.py."""
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write_config(path, digits, name='retinanet_r18_fpn_digits', extra=''):
    """Write a config that trains two epochs on a folder of digits."""
    base = ROOT / f'configs/digits/{name}.py'
    data = dict(data_root=f'{digits}/')
    path.write_text(
        f'_base_ = {str(base)!r}\n'
        f'train_dataloader = dict(batch_size=4, dataset={data})\n'
        f'val_dataloader = dict(dataset={data})\n'
        'test_dataloader = val_dataloader\n'
        f"val_evaluator = dict(ann_file='{digits}/annotations/val.json')\n"
        'test_evaluator = val_evaluator\n'
        'train_cfg = dict(max_epochs=2)\n'
        'default_hooks = dict(logger=dict(interval=1))\n'
        f'{extra}')
    return path


def start(config, work_dir, *args):
    """Start tools/train.py in a process of its own."""
    return subprocess.Popen(
        [sys.executable, 'tools/train.py', config, '--work-dir', work_dir,
         *args], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(os.environ, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES=''))
