"""Sharded training by mmengine's FSDPStrategy, two processes on the CPU."""
import json

import cv2
import numpy as np
import pytest
import torch
from mmengine._strategy import FSDPStrategy
from mmengine.config import Config
from mmengine.registry import FUNCTIONS, RUNNERS, DefaultScope
from mmengine.runner import Runner
from torch import nn

from acmix_det.compat.checkpoint_loader import load_from_local
from acmix_det.compat.faults import FaultError
from acmix_det.evaluation import build_detector
from tests.test_compat import sharded_training  # registers RecordLosses
from tests.test_compat.test_cpu_training import ROOT, needs_cpu, torchrun

DIGITS = ROOT / 'configs/digits/retinanet_r18-acmix_fpn-acmix_digits.py'
FSDP = 'acmix_det::_base_/fsdp.py'
# clips in every step, and keeps a state to resume from
CONFIG = """
_base_ = {bases}
model = dict(test_cfg=dict(score_thr=0.))  # detections from the start
data = dict(data_root='{root}/', ann_file='set.json',
            data_prefix=dict(img=''))
train_dataloader = dict(batch_size={batch_size}, dataset=data)
val_dataloader = dict(batch_size=2, dataset=data)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file='{root}/set.json')
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=2)
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='SGD', lr=0.1, momentum=0.9),
    paramwise_cfg=dict(custom_keys={{'alpha': dict(lr_mult=0.)}}),
    clip_grad=dict(max_norm=0.5))
param_scheduler = None
custom_hooks = [dict(type='RecordLosses')]
default_hooks = dict(logger=dict(interval=1),
                     checkpoint=dict(max_keep_ckpts=-1))
"""


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    """Eight images with boxes at the same places.

    RetinaNet divides a loss by the number of positive anchors in the batch of
    its process: the mean over processes is the loss of the whole batch only
    where these numbers are equal.
    """
    root = tmp_path_factory.mktemp('fsdp')
    boxes = [[10, 12, 30, 42], [50, 40, 24, 34]]
    rng = np.random.default_rng(0)
    images, annotations = [], []
    for i in range(8):
        picture = rng.integers(0, 256, (96, 96, 3), np.uint8)
        for x, y, w, h in boxes:
            picture[y:y + h, x:x + w] = 28 * i
        cv2.imwrite(str(root / f'{i}.png'), picture)
        images.append(dict(id=i, file_name=f'{i}.png', width=96, height=96))
        annotations += [
            dict(id=2 * i + j, image_id=i, category_id=(i + j) % 10 + 1,
                 bbox=box, area=box[2] * box[3], iscrowd=0)
            for j, box in enumerate(boxes)]
    categories = [dict(id=i + 1, name=str(i)) for i in range(10)]
    (root / 'set.json').write_text(json.dumps(dict(
        images=images, annotations=annotations, categories=categories)))
    for name, bases, size in (('single', [DIGITS], 4),
                              ('sharded', [DIGITS, FSDP], 2)):
        (root / f'{name}.py').write_text(CONFIG.format(
            bases=[str(x) for x in bases], root=root, batch_size=size))
    # weights that are not there, nor read in a test
    (root / 'tested.py').write_text(
        "_base_ = './sharded.py'\n"
        "model = dict(backbone=dict(init_cfg=dict(\n"
        "    _delete_=True, type='Pretrained', checkpoint='none.pth')))\n")
    return root


def train_alone(config, name, **kwargs):
    """One process with the whole batch, mmengine's default runner."""
    cfg = Config.fromfile(config / 'single.py')
    # one name is one logger
    cfg.update(work_dir=str(config / name), experiment_name=f'fsdp_{name}',
               **kwargs)
    with DefaultScope.overwrite_default_scope(None):
        Runner.from_cfg(cfg).train()


@pytest.fixture(scope='module')
def trained(config):
    """Output of torchrun; the folders single, sharded and resumed."""
    train_alone(config, 'single')
    path = str(config / 'sharded.py')
    calls = [
        ['train', path, '--work-dir', str(config / 'sharded')],
        ['train', path, '--work-dir', str(config / 'resumed'),
         '--resume', str(config / 'sharded' / 'epoch_1.pth')],
        ['test', str(config / 'tested.py'),
         str(config / 'sharded' / 'epoch_2.pth'),
         '--work-dir', str(config / 'tested')],
    ]
    return torchrun(sharded_training.__file__, json.dumps(calls))


def losses(folder):
    """Mean over the processes, for every iteration."""
    files = sorted(folder.glob('losses_*.json'))
    values = np.array([json.loads(x.read_text()) for x in files])
    return values.mean(0), len(files)


@needs_cpu
@pytest.mark.slow
def test_sharded_blocks_have_the_gradients_of_one_process(trained):
    units = dict(plain=9, checkpointing=9, swin=6, pvt=5, san=11)
    for name, number in {**units, 'frozen stage': 9}.items():
        assert trained.count(f'{name}: equal in {number} units') == 2, trained


@needs_cpu
@pytest.mark.slow
def test_sharded_training_is_that_of_one_process(config, trained):
    expected, _ = losses(config / 'single')
    actual, processes = losses(config / 'sharded')
    assert processes == 2 and len(actual) == 4
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    cfg = Config.fromfile(config / 'single.py')
    model = build_detector(cfg)
    for epoch in (1, 2):
        states = [
            load_from_local(str(config / x / f'epoch_{epoch}.pth'))
            for x in ('single', 'sharded')]
        model.load_state_dict(states[1]['state_dict'], strict=True)
        assert model.neck.fpn_convs[0].conv.alpha == 0.5  # lr_mult=0
        counts = [(x['meta']['epoch'], x['meta']['iter']) for x in states]
        assert counts == [(epoch, 2 * epoch)] * 2
        for key, value in states[0]['state_dict'].items():
            torch.testing.assert_close(states[1]['state_dict'][key], value,
                                       rtol=1e-5, atol=1e-6, msg=key)


@needs_cpu
@pytest.mark.slow
def test_sharded_training_resumes_to_the_same_weights(config, trained):
    assert 'resumed epoch: 1, iter: 2' in trained
    np.testing.assert_allclose(losses(config / 'resumed')[0],
                               losses(config / 'sharded')[0][2:], rtol=1e-6)

    states = [load_from_local(str(config / x / 'epoch_2.pth'))['state_dict']
              for x in ('sharded', 'resumed')]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, msg=key)


@needs_cpu
@pytest.mark.slow
def test_one_process_resumes_the_sharded_training(config, trained):
    train_alone(config, 'alone', resume=True,
                load_from=str(config / 'sharded' / 'epoch_1.pth'))
    np.testing.assert_allclose(losses(config / 'alone')[0],
                               losses(config / 'single')[0][2:], rtol=1e-5)


def test_sharded_training_does_not_resume_another():
    state = dict(state={0: dict(momentum_buffer=None)}, param_groups=[])
    with pytest.raises(FaultError, match='--resume must get .*load_from'):
        FSDPStrategy.load_optim_state_dict(None, state)


def metrics(path):
    """The last ones of a log."""
    last = json.loads(path.read_text().splitlines()[-1])
    return {k: x for k, x in last.items() if k.startswith('coco/')}


@needs_cpu
@pytest.mark.slow
def test_sharded_detector_is_tested_as_it_was_evaluated(config, trained):
    log, = (config / 'sharded').glob('*/vis_data/scalars.json')
    tested, = (config / 'tested').glob('*/*.json')
    assert len(metrics(log)) == 6 and metrics(tested) == metrics(log)


def test_one_process_without_a_launcher_is_told_how_to_start(
        config, tmp_path, monkeypatch):
    monkeypatch.setenv('LOCAL_RANK', '0')  # by mmdet's train.py
    cfg = Config.fromfile(config / 'sharded.py')
    cfg.update(work_dir=str(tmp_path), experiment_name=tmp_path.name,
               launcher='none')
    with DefaultScope.overwrite_default_scope(None):
        runner = RUNNERS.build(cfg)
        with pytest.raises(FaultError, match='launcher must be .*torchrun'):
            runner.train()


def asked(model, recurse, **kwargs):
    return FUNCTIONS.get('wrap_blocks')(module=model, recurse=recurse,
                                        nonwrapped_numel=0, **kwargs)


@pytest.fixture(scope='module')
def detector():
    return build_detector(Config.fromfile(DIGITS))


def test_blocks_are_wrapped_and_nothing_else(detector):
    assert asked(detector, True)
    assert {type(m).__name__ for m in detector.modules()
            if asked(m, False)} == {'BasicBlock'}
    assert {type(m).__name__ for m in detector.modules()
            if asked(m, False, blocks=['_BatchNorm', 'FPN'])} == {'ACmixFPN'}


@pytest.mark.parametrize('blocks, error, message', [
    ('BasicBlock', TypeError, "list of class names, got 'BasicBlock'"),
    ([nn.Conv2d], TypeError, 'list of class names, got '),
    (['BasicBlock', 'Bottelneck'], ValueError,
     r"classes of modules in the RetinaNet, got \['Bottelneck'\]"),
    ([], ValueError, r'in the RetinaNet, got \[\]'),
], ids=['string', 'class', 'misspelt', 'empty'])
def test_wrong_blocks_are_named(blocks, error, message, detector):
    with pytest.raises(error, match=message):
        asked(detector, True, blocks=blocks)


def test_detector_without_blocks_of_ours_is_refused(detector):
    cfg = Config.fromfile(DIGITS)
    cfg.model.backbone = dict(type='CSPDarknet', widen_factor=0.125)
    cfg.model.neck.update(in_channels=[32, 64, 128], start_level=0)
    cfg.model.backbone.out_indices = (2, 3, 4)
    with pytest.raises(ValueError, match=r'in the RetinaNet, got .*SwinBlock'):
        asked(build_detector(cfg), True)
