import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmengine._strategy import FSDPStrategy
from mmengine.dist import utils as dist_utils
from mmengine.model import MMDistributedDataParallel, revert_sync_batchnorm
from mmengine.model.wrappers import MMFullyShardedDataParallel
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner import FlexibleRunner, checkpoint
from torch import nn

from acmix_det import compat
from acmix_det.datasets import make_digits
from acmix_det.evaluation import build_detector
from tests.test_compat import distributed_detectors
from tests.test_compat.distributed_detectors import KINDS, total_loss
from tests.test_models.test_detectors import batch

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


@pytest.mark.parametrize('kind', KINDS)
def test_every_parameter_gets_a_gradient_with_boxes_and_without(kind):
    model = distributed_detectors.build(kind)
    frozen = {key for key, p in model.named_parameters()
              if not p.requires_grad}
    assert bool(frozen) == kind.endswith('frozen')
    for boxes in (2, 0):
        model.zero_grad()
        total_loss(model, boxes).backward()
        for key, p in model.named_parameters():
            assert (p.grad is None) == (key in frozen), (boxes, key)


@needs_cpu
@pytest.mark.slow
def test_two_processes_need_no_search_for_unused_parameters():
    out = torchrun(distributed_detectors.__file__)
    for kind in KINDS:
        assert out.count(f'{kind}: two steps') == 2, out


@needs_cpu
@pytest.mark.parametrize('wrapper', [MMDistributedDataParallel,
                                     MMFullyShardedDataParallel])
def test_synchronised_norms_are_refused_where_torch_has_none(wrapper,
                                                             monkeypatch):
    cfg = distributed_detectors.digits(
        'retinanet_r18-sasa_fpn-sasa', norm_cfg=dict(type='SyncBN'))
    model = build_detector(cfg)
    told = r"norm_cfg must not .* 'SyncBN' .* 20 of them \(backbone.bn1, "
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, 'is_initialized', lambda: True)
        with pytest.raises(ValueError, match=told):
            wrapper(module=model)
    # as BN, the way out of the message, it has the same weights
    cfg.model.backbone.norm_cfg = dict(type='BN')
    plain = build_detector(cfg)
    plain.load_state_dict(model.state_dict(), strict=True)
    compat.cpu_training.refuse_sync_norms(plain)
    compat.cpu_training.refuse_sync_norms(revert_sync_batchnorm(model))


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


@needs_cpu
def test_process_of_several_ends_without_destructors(tmp_path):
    code = ('import atexit, builtins, torch\n'
            'from acmix_det.compat.cpu_training import end_gloo_process\n'
            'class Loud:\n'
            '    def __del__(self, print=print):\n'
            '        print("destroyed", flush=True)\n'
            'end_gloo_process()\n'
            'print("no group")\n'
            'atexit.register(print, "registered")\n'
            'torch.distributed.init_process_group("gloo", '
            f'init_method="file://{tmp_path}/store", rank=0, world_size=1)\n'
            'builtins.loud = Loud()\n'
            'end_gloo_process()\n')
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ['no group', 'registered']


def test_installing_twice_wraps_once():

    def wrapped():
        return (dist_utils._init_dist_pytorch,
                MMDistributedDataParallel.__init__,
                MMFullyShardedDataParallel.__init__,
                FSDPStrategy.build_optim_wrapper,
                FlexibleRunner.save_checkpoint, checkpoint.load_from_http)

    before = wrapped()
    compat.install()
    assert before == wrapped()
    assert all(hasattr(x, '__wrapped__') for x in before)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    models = [distributed_detectors.build('acmix') for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    images, samples = batch([(64, 64)] * 4, boxes=2, num_classes=10)
    for model, parts in zip(models, (1, 2)):
        wrapper = OPTIM_WRAPPERS.build(
            dict(type='OptimWrapper', accumulative_counts=parts,
                 optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
        size = 4 // parts
        for start in range(0, 4, size):
            part = slice(start, start + size)
            losses = model(images[part], samples[part], mode='loss')
            wrapper.update_params(sum(sum(x) for x in losses.values()))
    for (key, a), b in zip(models[0].named_parameters(),
                           models[1].parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=key)


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
