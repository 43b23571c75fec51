"""Configs for mmpretrain, and the way of their weights into detectors."""
import copy
import functools
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml
from mmengine.config import Config
from mmengine.registry import MODELS, PARAM_SCHEDULERS, DefaultScope
from torch import nn

from acmix_det.compat import mmpretrain_tools
from acmix_det.datasets import digits_classification, draw_digits
from acmix_det.evaluation import build_detector
from tests.test_models.test_detectors import batch

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / 'configs' / 'pretrain'
CONFIGS = sorted(path.stem for path in FOLDER.glob('*.py'))
IMAGENET = [name for name in CONFIGS if name.endswith('_in1k')]

needs_mmpretrain = pytest.mark.skipif(
    importlib.util.find_spec('mmpretrain') is None,
    reason='needs mmpretrain (pip install "mmpretrain>=1.2,<1.3")')

# computed, and equal to the released code where there is some (ACmix ResNets
# and Swins); the others within 0.1 M of the papers
PARAMETERS = {
    'r26-sasa': 10_342_632, 'r38-sasa': 14_190_632, 'r50-sasa': 18_038_632,
    'r50-sasa-stem': 18_031_016,
    'r26-acmix': 10_487_816, 'r38-acmix': 14_410_896, 'r50-acmix': 18_333_976,
    'swin-t-acmix': 28_649_908, 'swin-s-acmix': 50_345_080,
    'pvt-t-acmix': 13_394_008, 'pvt-s-acmix': 24_822_563,
    'san10': 11_841_124, 'san15': 16_181_310, 'san19': 20_518_470,
    'san10-acmix': 11_994_612, 'san15-acmix': 16_414_134,
    'san19-acmix': 20_829_278,
}


@functools.lru_cache(maxsize=None)
def load(name):
    return Config.fromfile(FOLDER / f'{name}.py')


def build_classifier(name):
    cfg = copy.deepcopy(load(name))
    cfg.model.train_cfg = None  # mixing is mmpretrain's business
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        return MODELS.build(cfg.model)


def samples(labels):
    from mmpretrain.structures import DataSample
    return [DataSample().set_gt_label(label) for label in labels]


@needs_mmpretrain
@pytest.mark.parametrize('name', CONFIGS)
def test_classifier_has_its_parameters_and_gradients_reach_them_all(name):
    torch.manual_seed(0)
    model = build_classifier(name).train()
    count = sum(p.numel() for p in model.parameters())
    code = name.split('_')[0]
    if name in IMAGENET:
        assert count == PARAMETERS[code]
    losses = model.loss(torch.randn(2, 3, 64, 64), samples([1, 2]))
    losses['loss'].backward()
    for key, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), key
    norms = [m for m in model.backbone.modules()
             if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert all(m.training for m in norms)


def rates(name, length):
    """Learning rates of a config with epochs of some iterations."""
    cfg = load(name)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))],
                                cfg.optim_wrapper.optimizer.lr)
    schedulers = cfg.param_scheduler
    if isinstance(schedulers, dict):
        schedulers = [schedulers]
    built = []
    for scheduler in schedulers:
        scheduler = dict(copy.deepcopy(scheduler), optimizer=optimizer)
        scheduler.setdefault('end', cfg.train_cfg.max_epochs)
        built.append(PARAM_SCHEDULERS.build(
            scheduler, default_args=dict(epoch_length=length)))
    seen = []
    for i in range(cfg.train_cfg.max_epochs * length):
        seen.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in built:
            if not scheduler.by_epoch or (i + 1) % length == 0:
                scheduler.step()
    return seen


@needs_mmpretrain
@pytest.mark.parametrize('name, epochs, warm_up, first, highest, batch_size', [
    ('r50-sasa_32xb128-130e_in1k', 130, 10, 0.0016, 1.6, 4096),
    ('r50-acmix_8xb16-90e_in1k', 90, 5, 0.025, 0.1, 128),
    ('san10_8xb32-100e_in1k', 100, 0, 0.1, 0.1, 256),
    ('swin-t-acmix_8xb128-300e_in1k', 300, 20, 1e-6, 1e-3, 1024),
    ('pvt-t-acmix_8xb128-300e_in1k', 300, 20, 1e-6, 1e-3, 1024),
])
def test_learning_rate_warms_up_and_decays_as_the_recipe_says(
        name, epochs, warm_up, first, highest, batch_size):
    length = 4
    seen = rates(name, length)
    assert load(name).auto_scale_lr.base_batch_size == batch_size
    assert len(seen) == epochs * length
    assert seen[0] == pytest.approx(first)
    assert max(seen) == pytest.approx(highest)
    assert seen[warm_up * length] == pytest.approx(highest, rel=1e-2)
    assert seen[:warm_up * length] == sorted(seen[:warm_up * length])
    assert seen[-1] < 0.02 * highest
    middle = seen[(warm_up + epochs) // 2 * length]
    assert middle == pytest.approx(highest / 2, rel=0.03)


@needs_mmpretrain
@pytest.mark.parametrize('name', IMAGENET)
def test_name_states_batch_and_epochs_of_the_recipe(name):
    cfg = load(name)
    gpus, batch_size, epochs = map(int, re.search(
        r'_(\d+)xb(\d+)-(\d+)e_in1k$', name).groups())
    assert cfg.train_dataloader.batch_size == batch_size
    assert gpus * batch_size == cfg.auto_scale_lr.base_batch_size
    assert cfg.train_cfg.max_epochs == epochs


def test_readme_has_one_row_for_every_config_with_its_parameters():
    text = (FOLDER / 'README.md').read_text('utf-8')
    rows = {}
    for line in text.splitlines():
        link = re.search(r'\]\(\./([\w-]+)\.py\)', line)
        if line.startswith('|') and link:
            cells = line.strip("|").split("|")
            rows[link.group(1)] = [cell.strip() for cell in cells]
    assert sorted(rows) == IMAGENET
    for name, (_, params, top1, *_) in rows.items():
        assert params == f'{PARAMETERS[name.split("_")[0]] / 1e6:.2f}'
        assert top1 == '-'  # nobody has trained them


@needs_mmpretrain
def test_metafile_names_every_imagenet_config():
    meta = yaml.safe_load((FOLDER / 'metafile.yml').read_text('utf-8'))
    collections = {c['Name'] for c in meta['Collections']}
    assert sorted(m['Name'] for m in meta['Models']) == IMAGENET
    for model in meta['Models']:
        assert model['In Collection'] in collections
        assert model['Config'] == f'configs/pretrain/{model["Name"]}.py'
        assert model['Metadata']['Epochs'] == load(
            model['Name']).train_cfg.max_epochs
        assert 'Weights' not in model  # nobody has trained them


# the data set

def test_splits_share_no_scan_and_labels_are_those_of_the_scans():
    _, labels = draw_digits.load_scans()
    seen = {}
    for split, number in (('train', 1545), ('val', 252)):
        seen[split] = set()
        for index in (*range(0, number, 50), number - 1, number):
            _, label, scan = digits_classification.draw_one_digit(
                0, split, index, 64)
            assert label == labels[scan]
            assert scan in draw_digits.split_scan_ids(split)
            seen[split].add(scan)
    assert not seen['train'] & seen['val']


def test_image_shows_its_digit_and_depends_on_its_arguments_only():
    draw = digits_classification.draw_one_digit
    image, label, _ = draw(0, 'train', 7, 64)
    again, _, _ = draw(0, 'train', 7, 64)
    other, other_label, _ = draw(1, 'train', 7, 64)
    assert image.shape == (64, 64, 3) and image.dtype == np.uint8
    assert np.array_equal(image, again)
    assert label == other_label and not np.array_equal(image, other)


def test_data_set_has_a_folder_for_each_split_and_class(tmp_path):
    root = tmp_path / 'digits'
    digits_classification.make_digits_classification(
        str(root), num_train=40, num_val=10)
    for split, number in (('train', 40), ('val', 10)):
        files = sorted((root / split).glob('*/*.png'))
        assert {path.parent.name for path in files} == set('0123456789')
        assert len(files) == number
        for path in files:
            image, label, _ = digits_classification.draw_one_digit(
                0, split, int(path.stem), 64)
            assert path.parent.name == str(label)
            assert np.array_equal(cv2.imread(str(path)), image)
    assert [path.name for path in tmp_path.iterdir()] == ['digits']
    with pytest.raises(FileExistsError, match='data_root must not exist yet'):
        digits_classification.make_digits_classification(str(root))


@pytest.mark.parametrize('name, value', [
    ('seed', -1), ('num_train', 9), ('num_val', 9), ('image_size', 7)])
def test_data_set_refuses_numbers_out_of_range(name, value, tmp_path):
    with pytest.raises(ValueError, match=rf'{name} .*got {name}={value}'):
        digits_classification.make_digits_classification(
            str(tmp_path / 'digits'), **{name: value})
    assert not list(tmp_path.iterdir())


# the scripts

def start(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['mmpretrain_tools', *args])
    monkeypatch.setattr(sys, 'path', list(sys.path))
    mmpretrain_tools.main()


@pytest.mark.parametrize('args', [(), ('tset', )], ids=['none', 'unknown'])
def test_tool_without_a_known_name_says_which_there_are(args, monkeypatch):
    with pytest.raises(SystemExit) as caught:
        start(monkeypatch, *args)
    assert f"NAME must be one of ('train', 'test'), got {''.join(args)!r}" in (
        caught.value.code)


def test_tool_without_mmpretrain_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(SystemExit) as caught:
        start(monkeypatch, 'train')
    assert "pip install 'mmpretrain>=1.2,<1.3'" in caught.value.code


def test_tool_without_its_scripts_names_the_places(tmp_path, monkeypatch):
    origin = tmp_path / 'mmpretrain' / '__init__.py'
    monkeypatch.setattr(
        importlib.util, 'find_spec',
        lambda name: importlib.util.spec_from_file_location(name, origin))
    with pytest.raises(SystemExit) as caught:
        start(monkeypatch, 'train')
    assert str(origin.parent / '.mim/tools/train.py') in caught.value.code
    tools = tmp_path / 'tools'  # a checkout
    tools.mkdir()
    (tools / 'train.py').write_text(
        'import sys\nseen = [__name__, *sys.argv, sys.path[0]]\n'
        f'open({str(tmp_path / "seen")!r}, "w").write("\\n".join(seen))\n')
    start(monkeypatch, 'train', 'config.py', '--amp')
    assert (tmp_path / 'seen').read_text().split('\n') == [
        '__main__', str(tools / 'train.py'), 'config.py', '--amp', str(tools)]


# from the classifier to the detector

@needs_mmpretrain
@pytest.mark.parametrize('classifier, detector, new', [
    ('r50-acmix_8xb16-90e_in1k',
     'acmix/retinanet_r50-acmix-pretrained_fpn-acmix_1x_coco', []),
    ('r50-sasa_32xb128-130e_in1k',
     'sasa/retinanet_r50-sasa-pretrained_fpn-sasa_1x_coco', []),
    ('swin-t-acmix_8xb128-300e_in1k',
     'acmix/retinanet_swin-t-acmix_fpn_1x_coco', ['norm1', 'norm2']),
    ('pvt-t-acmix_8xb128-300e_in1k',
     'acmix/retinanet_pvt-t-acmix_fpn_1x_coco', []),
    ('san10-acmix_8xb32-100e_in1k',
     'acmix/retinanet_san10-acmix_fpn_1x_coco', []),
])
def test_checkpoint_starts_the_backbone_of_a_detector_without_renaming(
        classifier, detector, new, tmp_path):
    trained = build_classifier(classifier).state_dict()
    trained = {key: torch.rand_like(x) if x.is_floating_point() else x + 7
               for key, x in trained.items()}
    torch.save(dict(state_dict=trained), tmp_path / 'epoch_1.pth')
    cfg = Config.fromfile(ROOT / f'configs/{detector}.py')
    backbone = cfg.model.backbone
    backbone.init_cfg = dict(
        type='Pretrained', checkpoint=str(tmp_path / 'epoch_1.pth'),
        prefix='backbone.')
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(backbone)
    model.init_weights()
    missing = torch.zeros(0)
    assert {key.split('.')[0] for key, x in model.state_dict().items()
            if not torch.equal(x, trained.get(f'backbone.{key}', missing))
            } == set(new)


@needs_mmpretrain
@pytest.mark.slow
@pytest.mark.parametrize('kind', ['acmix', 'sasa'])
def test_trained_classifier_starts_the_whole_backbone_of_a_detector(
        kind, tmp_path):
    data_root = tmp_path / 'digits'
    digits_classification.make_digits_classification(
        str(data_root), num_train=320, num_val=40)
    work_dir = tmp_path / 'work'
    done = subprocess.run(
        [sys.executable, '-m', 'acmix_det.compat.mmpretrain_tools', 'train',
         str(FOLDER / f'r18-{kind}_digits.py'), '--work-dir', str(work_dir),
         '--cfg-options', 'train_cfg.max_epochs=1',
         *(f'{split}_dataloader.dataset.data_root={data_root}'
           for split in ('train', 'val', 'test'))],
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    scalars, = work_dir.glob('*/vis_data/scalars.json')
    assert 'accuracy/top1' in json.loads(
        scalars.read_text().splitlines()[-1])
    path = work_dir / 'epoch_1.pth'

    cfg = Config.fromfile(
        ROOT / f'configs/digits/retinanet_r18-{kind}_fpn_digits.py')
    model = build_detector(cfg)
    model.backbone.init_cfg = dict(
        type='Pretrained', checkpoint=str(path), prefix='backbone.')
    fresh = copy.deepcopy(model.backbone.state_dict())
    model.init_weights()
    trained = torch.load(path, weights_only=False)['state_dict']
    loaded = [key for key, x in model.backbone.state_dict().items()
              if torch.equal(x, trained[f'backbone.{key}'])]
    assert loaded == list(fresh)
    assert not torch.equal(fresh['layer4.1.conv2.in_proj_weight'],
                           trained['backbone.layer4.1.conv2.in_proj_weight'])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = model.loss(*batch([(128, 128), (128, 128)]))
    total = sum(sum(x) for x in losses.values())
    total.backward()
    optimizer.step()
    assert torch.isfinite(total)
    moved = model.backbone.state_dict()['layer4.1.conv2.in_proj_weight']
    assert moved.isfinite().all() and not torch.equal(
        moved, trained['backbone.layer4.1.conv2.in_proj_weight'])
