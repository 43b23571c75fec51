import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmengine.dist import utils as dist_utils
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from acmix_det import compat
from acmix_det.datasets import make_digits

ROOT = Path(__file__).parents[2]
needs_cpu = pytest.mark.skipif(torch.cuda.is_available(),
                               reason='the fixes are for machines without GPU')


def torchrun(*args, processes=2):
    result = subprocess.run(
        [sys.executable, '-m', 'torch.distributed.run', '--standalone',
         f'--nproc_per_node={processes}', *map(str, args)], cwd=ROOT,
        env=dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout[-5000:]
    return result.stdout


@needs_cpu
@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one():
    out = torchrun(Path(__file__).with_name('distributed_gradients.py'))
    for name in ('plain', 'checkpointing', 'frozen stage', 'swin', 'pvt',
                 'san'):
        assert out.count(f'{name}: equal') == 2, out


@needs_cpu
@pytest.mark.slow
def test_two_processes_train_and_evaluate(tmp_path):
    make_digits(str(tmp_path / 'digits'), num_train=16, num_val=4,
                image_size=96)
    base = ROOT / 'configs/digits/retinanet_r18-acmix_fpn-acmix_digits.py'
    config = tmp_path / 'config.py'
    data = dict(data_root=f'{tmp_path}/digits/')
    config.write_text(
        f'_base_ = {str(base)!r}\n'
        f'train_dataloader = dict(batch_size=4, dataset={data})\n'
        f'val_dataloader = dict(dataset={data})\n'
        'val_evaluator = dict('
        f"ann_file='{tmp_path}/digits/annotations/val.json')\n"
        'train_cfg = dict(max_epochs=1)\n'
        'default_hooks = dict(logger=dict(interval=1))\n')
    out = torchrun('tools/train.py', config, '--launcher', 'pytorch',
                   '--work-dir', tmp_path / 'run', '--auto-scale-lr')
    assert "backend='nccl' gives way to gloo" in out
    assert 'Epoch(train) [1][2/2]' in out  # 16 images, 2 x 4 at a time
    assert 'current batch size is 8' in out
    assert (tmp_path / 'run' / 'epoch_1.pth').is_file()


def test_installing_twice_wraps_once():
    before = dist_utils._init_dist_pytorch, MMDistributedDataParallel.__init__
    compat.install()
    assert before == (dist_utils._init_dist_pytorch,
                      MMDistributedDataParallel.__init__)


def test_autocast_on_cpus_computes_in_bfloat16_and_updates_in_float32():
    model = nn.Linear(4, 4)
    wrapper = OPTIM_WRAPPERS.build(
        dict(type='CPUAmpOptimWrapper',
             optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    before = model.weight.clone()
    with wrapper.optim_context(model):
        out = model(torch.rand(2, 4))
    assert out.dtype == torch.bfloat16
    assert model(torch.rand(2, 4)).dtype == torch.float32
    wrapper.update_params(out.float().square().mean())
    assert model.weight.dtype == torch.float32
    assert not torch.equal(model.weight, before)
