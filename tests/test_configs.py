"""Every shipped config loads, builds and runs; folders agree with their texts."""
import copy
import functools
import json
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torchvision
import yaml
from mmcv.transforms import Compose
from mmdet.registry import DATASETS, TRANSFORMS
from mmdet.structures.bbox import HorizontalBoxes
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import PARAM_SCHEDULERS, DefaultScope
from mmengine.runner import Runner
from torch import nn

from acmix_det.evaluation import build_detector, count_complexity
from acmix_det.layers import SASAStem2d
from tests.test_models.test_detectors import batch

ROOT = Path(__file__).parents[1] / 'configs'
# classifiers are not detectors: tests/test_pretrain.py
CONFIGS = sorted(path.relative_to(ROOT).with_suffix('').as_posix()
                 for path in ROOT.rglob('*.py')
                 if not {'_base_', 'pretrain'} & {*path.relative_to(ROOT).parts})
ABLATIONS = [name for name in CONFIGS if '/ablations/' in name]
CUSTOM_DATA = 'sasa/retinanet_r50-sasa_fpn-sasa_1x_custom-data'
FOLDERS = ('acmix', 'digits', 'sasa')
COCO_FOLDERS = ('acmix', 'sasa')
ATTENTION = {'StandAloneSelfAttention2d': 'sasa', 'SASAStem2d': 'sasa',
             'ACmix2d': 'acmix', 'ACmixWindowMSA': 'acmix',
             'ACmixSpatialReductionAttention': 'acmix',
             'ACmixPatchwiseAttention2d': 'acmix'}

every_config = pytest.mark.parametrize('name', CONFIGS)


@functools.lru_cache(maxsize=None)
def load(name):
    return Config.fromfile(ROOT / f'{name}.py')


def meta_detector(cfg):
    """The detector without values: shapes only, in an instant."""
    # these compute with values while they are built
    values = re.search('Swin|PyramidVision', cfg.model.backbone.type)
    with torch.device('cpu' if values else 'meta'):
        return build_detector(cfg)


def flat(cfg, prefix=''):
    """A nested config as one dict with dotted keys."""
    if isinstance(cfg, dict) and cfg:
        return {key: value for name, child in cfg.items()
                for key, value in flat(child, f'{prefix}.{name}').items()}
    return {prefix[1:]: cfg}


def difference(name, base):
    """Keys whose values differ from the base, and their values."""
    new, old = flat(load(name).to_dict()), flat(load(base).to_dict())
    assert set(old) <= set(new)
    return {key: value for key, value in new.items()
            if key not in old or old[key] != value}


def test_there_are_configs_in_every_folder():
    assert {name.split('/')[0] for name in CONFIGS} == set(FOLDERS)
    assert len(ABLATIONS) > 10


@every_config
def test_config_swaps_what_its_name_says(name, recwarn):
    cfg = load(name)
    model = meta_detector(cfg)
    head, backbone, neck = name.split('/')[-1].split('_')[:3]
    kinds = {'backbone': set(), 'neck': set(), 'head': set()}
    for key, module in model.named_modules():
        if type(module).__name__ in ATTENTION:
            part = key.split('.')[0]
            kinds[part if part in kinds else 'head'].add(
                ATTENTION[type(module).__name__])
    for part, code in (('backbone', backbone), ('neck', neck), ('head', head)):
        kind = re.search('sasa|acmix', code)
        assert kinds[part] == ({kind.group()} if kind else set()), part
    size = re.match(r'(?:(?:r|san)(\d+)|(swin|pvt)-([ts]))', backbone)
    depth, family, letter = size.groups()
    if depth:
        assert cfg.model.backbone.depth == int(depth)
    elif family == 'swin':
        assert len(model.backbone.stages[2].blocks) == dict(t=6, s=18)[letter]
    else:
        assert cfg.model.backbone.num_layers == dict(
            t=[2, 2, 2, 2], s=[3, 4, 6, 3])[letter]
    stems = [m for m in model.modules() if isinstance(m, SASAStem2d)]
    assert len(stems) == ('-stem' in backbone)
    assert not [w for w in recwarn if 'frozen_stages' in str(w.message)]


@every_config
def test_random_attention_is_never_frozen_nor_beside_norms_in_eval(name):
    cfg = load(name)
    model = meta_detector(cfg)
    model.train()
    attention = {m for m in model.modules()
                 if type(m).__name__ in ATTENTION}
    assert all(p.requires_grad for m in attention for p in m.parameters())
    init_cfg = cfg.model.backbone.get('init_cfg') or dict(type=None)
    if init_cfg['type'] is None or (
            init_cfg['type'] != 'WarmStart'
            and attention & set(model.backbone.modules())):
        assert all(p.requires_grad for p in model.parameters())
        assert cfg.model.backbone.norm_eval is False
        norms = [m for m in model.backbone.modules()
                 if isinstance(m, (nn.modules.batchnorm._NormBase,
                                   nn.GroupNorm))]
        assert norms and all(m.training for m in norms)
        assert cfg.model.backbone.norm_cfg.type in ('GN', 'SyncBN')


@every_config
def test_config_trains_and_predicts_on_tiny_images(name):
    cfg = load(name)
    model = revert_sync_batchnorm(build_detector(cfg))
    model.init_weights()
    images, samples = batch([(64, 64), (50, 33)])
    for sample in samples:
        height, width = sample.img_shape
        sample.gt_instances.masks = BitmapMasks(
            np.ones((1, height, width), np.uint8), height, width)
    losses = model.loss(images, samples)
    total = sum(x if torch.is_tensor(x) else sum(x)
                for key, x in losses.items() if 'loss' in key)
    total.backward()
    assert torch.isfinite(total)
    for key, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None and p.grad.isfinite().all(), key
    assert any('loss_mask' in key for key in losses) == ('mask-rcnn' in name)
    model.eval()
    with torch.no_grad():
        result = model.predict(*batch([(64, 64)]))[0].pred_instances
    assert (result.labels < (10 if name.startswith('digits/') else 80)).all()
    assert result.bboxes.isfinite().all()


@every_config
def test_dumped_config_reloads_to_the_same(name, tmp_path):
    cfg = load(name)
    dumped = tmp_path / 'config.py'
    cfg.dump(dumped)
    assert Config.fromfile(dumped).to_dict() == cfg.to_dict()


@every_config
def test_auto_scale_lr_knows_the_batch_of_the_learning_rate(name):
    cfg = load(name)
    detector = name.split('/')[-1].split('_')[0].split('-')[0]
    if name.startswith('digits/'):
        gpus, batch_size, lr = 1, 8, 4e-3
    elif '8xb8' in name:
        gpus, batch_size, lr = 8, 64, 0.12
    else:  # mmdet's convention and its rates
        gpus, batch_size = 8, 16
        lr = dict(retinanet=.01, atss=.01, faster=.02, mask=.02,
                  cascade=1e-4)[detector]
        if cfg.optim_wrapper.optimizer.type == 'AdamW':
            lr = 1e-4
    assert cfg.auto_scale_lr.base_batch_size == batch_size
    assert cfg.train_dataloader.batch_size * gpus == batch_size
    assert cfg.optim_wrapper.optimizer.lr == lr


STAGES = 'model.backbone.stage_with_attn'
ATTN = 'model.backbone.attn_cfg.'
STEM = 'model.backbone.attn_stem.num_mixtures'


def ablated(code):
    """What the code of an ablation changes."""
    if code.startswith('c'):
        first, last = int(code[1]), int(code[-1])
        return {STAGES: tuple(first <= c <= last for c in (2, 3, 4, 5))}
    fixed = {'nopos': {ATTN + 'position': 'none'},
             'abspos': {ATTN + 'position': 'absolute'},
             'qr': {ATTN + 'use_key': False}}
    if code in fixed:
        return fixed[code]
    key, value = re.fullmatch(r'(k|h|stem-m)(\d+)', code).groups()
    return {dict([('k', ATTN + 'attn_kernel_size'), ('h', ATTN + 'num_heads'),
                  ('stem-m', STEM)])[key]: int(value)}


@pytest.mark.parametrize('name', ABLATIONS)
def test_ablation_changes_exactly_what_it_names(name):
    code = re.search('r50-sasa-(.+)_fpn_1x_coco$', name).group(1)
    base = 'sasa/retinanet_r50-sasa_fpn_1x_coco'
    assert difference(name, base) == ablated(code)


@pytest.mark.parametrize('kind', COCO_FOLDERS)
@pytest.mark.parametrize('new, old, changes', [
    ('retinanet_r26-{0}_fpn-{0}_1x', 'retinanet_r50-{0}_fpn-{0}_1x',
     {'model.backbone.depth': 26}),
    ('retinanet_r38-{0}_fpn-{0}_1x', 'retinanet_r50-{0}_fpn-{0}_1x',
     {'model.backbone.depth': 38}),
    ('retinanet_r101-{0}_fpn-{0}_1x', 'retinanet_r50-{0}_fpn-{0}_1x',
     {'model.backbone.depth': 101}),
    ('retinanet_r50-{0}_fpn-{0}_amp-1x', 'retinanet_r50-{0}_fpn-{0}_1x',
     {'optim_wrapper.type': 'AmpOptimWrapper'}),
    ('retinanet_r50-{0}_fpn-{0}_1x', 'retinanet_r50-{0}_fpn_1x',
     {'model.neck.type': '{1}FPN'}),
    ('retinanet_r50-{0}_fpn_1x', '../sasa/retinanet_r50-scratch_fpn_1x',
     {'model.backbone.type': '{1}ResNet'}),
], ids=['r26', 'r38', 'r101', 'amp', 'neck', 'backbone'])
def test_one_step_in_the_grid_changes_one_thing(kind, new, old, changes):
    def fill(text):
        names = (kind, dict(sasa='SASA', acmix='ACmix')[kind])
        return text.format(*names) if isinstance(text, str) else text

    found = difference(f'{kind}/{fill(new)}_coco', f'{kind}/{fill(old)}_coco')
    assert found == {key: fill(value) for key, value in changes.items()}


@pytest.mark.parametrize('kind', COCO_FOLDERS)
def test_pretrained_variant_takes_every_unchanged_layer(kind):
    cfg = load(f'{kind}/retinanet_r50-{kind}-pretrained_fpn-{kind}_1x_coco')
    assert cfg.model.backbone.init_cfg.checkpoint == 'torchvision://resnet50'
    own = meta_detector(cfg).backbone.state_dict()
    with torch.device('meta'):
        released = torchvision.models.resnet50().state_dict()
    unused = {key for key, x in released.items()
              if key not in own or own[key].shape != x.shape}
    assert unused == {'fc.weight', 'fc.bias', *(
        key for key in released if key.endswith('.conv2.weight'))}


@pytest.mark.parametrize('name, millions', [
    ('retinanet_r50_fpn', 33.4), ('retinanet_r50-sasa_fpn', 25.9),
    ('retinanet_r50-sasa-stem_fpn', 25.9),
    ('retinanet-sasa_r50-sasa_fpn-sasa', 20.0),  # published: 22.0, see README
    ('retinanet-sasa_r50-sasa-stem_fpn-sasa', 20.0),
])
def test_paper_setting_has_the_papers_parameters_at_90_classes(name, millions):
    cfg = copy.deepcopy(load(f'sasa/{name}_8xb8-640-150e_coco'))
    cfg.model.bbox_head.num_classes = 90
    model = meta_detector(cfg)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6,
                 1) == millions
    assert set(model.bbox_head.prior_generator.num_base_priors) == {6}


@pytest.mark.parametrize('size', [(30, 2000), (480, 640)])
def test_paper_setting_trains_on_crops_of_640(size):
    cfg = load('sasa/retinanet_r50_fpn_8xb8-640-150e_coco')
    pipeline = cfg.train_dataloader.dataset.pipeline
    assert [t.type for t in pipeline[:2]] == ['LoadImageFromFile',
                                              'LoadAnnotations']
    with DefaultScope.overwrite_default_scope('mmdet'):
        transforms = Compose([TRANSFORMS.build(t) for t in pipeline[2:]])
    np.random.seed(0)
    height, width = size
    for _ in range(20):
        out = transforms(dict(
            img=np.zeros((*size, 3), np.uint8), img_shape=size, ori_shape=size,
            img_id=0, img_path='', gt_ignore_flags=np.zeros(1, bool),
            gt_bboxes=HorizontalBoxes([[1., 2., width - 3., height - 4.]]),
            gt_bboxes_labels=np.zeros(1, np.int64)))
        if out is None:  # nothing of the box left: mmdet draws another image
            continue
        assert out['inputs'].shape == (3, 640, 640)
        boxes = out['data_samples'].gt_instances.bboxes.tensor
        assert (boxes >= 0).all() and (boxes <= 640).all()


def test_paper_setting_warms_up_one_epoch_and_ends_at_zero():
    cfg = load('sasa/retinanet_r50_fpn_8xb8-640-150e_coco')
    epochs, length = cfg.train_cfg.max_epochs, 4
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))],
                                cfg.optim_wrapper.optimizer.lr)
    schedulers = [
        PARAM_SCHEDULERS.build(
            dict(copy.deepcopy(scheduler), optimizer=optimizer),
            default_args=dict(epoch_length=length))
        for scheduler in cfg.param_scheduler
    ]
    rates = []
    for _ in range(epochs * length):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert epochs == 150
    assert rates[0] < 1e-3 and rates[length] == pytest.approx(0.12, rel=1e-3)
    assert max(rates) <= 0.12 + 1e-9
    assert rates[:length + 1] == sorted(rates[:length + 1])
    assert rates[length:] == sorted(rates[length:], reverse=True)
    assert rates[(epochs + 1) * length // 2] == pytest.approx(0.06, rel=0.02)
    assert rates[-1] < 1e-5


def custom_config(folder, classes, **replace):
    """A user's copy of the template with other classes."""
    text = (ROOT / f'{CUSTOM_DATA}.py').read_text('utf-8')
    for old, new in (("_base_ = './", f"_base_ = '{ROOT / 'sasa'}/"),
                     ("['cat', 'dog']\n", f'{classes}\n'),
                     ("'data/custom/'", f"'{folder.as_posix()}/'"),
                     *replace.items()):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / 'config.py'
    path.write_text(text, 'utf-8')
    return Config.fromfile(path)


@pytest.mark.parametrize('classes', [['person'], ['a', 'b', 'c']], ids=len)
def test_custom_data_template_counts_its_one_list_of_classes(
        classes, tmp_path):
    cfg = custom_config(tmp_path, classes)
    model = meta_detector(cfg)
    assert model.bbox_head.num_classes == len(classes)
    for split in ('train', 'val', 'test'):
        dataset = cfg[f'{split}_dataloader'].dataset
        assert dataset.metainfo.classes == classes
        assert dataset.data_root == f'{tmp_path.as_posix()}/'
    for evaluator in (cfg.val_evaluator, cfg.test_evaluator):
        assert Path(evaluator.ann_file) == tmp_path / 'annotations/val.json'


def write_coco(folder, names):
    """One image with one object of the first class, twice."""
    for split in ('train', 'val'):
        (folder / split).mkdir()
        cv2.imwrite(str(folder / split / '1.png'),
                    np.full((64, 64, 3), 128, np.uint8))
        (folder / 'annotations').mkdir(exist_ok=True)
        (folder / f'annotations/{split}.json').write_text(json.dumps(dict(
            images=[dict(id=1, file_name='1.png', height=64, width=64)],
            annotations=[dict(id=1, image_id=1, category_id=1, iscrowd=0,
                              bbox=[8, 8, 40, 40], area=1600)],
            categories=[dict(id=i, name=name)
                        for i, name in enumerate(names, 1)])))


def custom_runner(cfg, folder):
    """Train and validate once on the processor."""
    cfg.model.backbone.update(
        depth=26, init_cfg=None, norm_cfg=dict(type='BN'))
    cfg.work_dir = str(folder / 'work')
    cfg.train_cfg.max_epochs = 1
    cfg.default_hooks.checkpoint.interval = -1
    for split in ('train', 'val', 'test'):
        dataloader = cfg[f'{split}_dataloader']
        dataloader.update(num_workers=0, persistent_workers=False)
        for transform in dataloader.dataset.pipeline:
            if transform.type == 'Resize':
                transform.scale = (64, 64)
    # registered by name, and one name is one process-wide logger
    cfg.experiment_name = f'custom_{folder.name}'
    with DefaultScope.overwrite_default_scope(None):
        return Runner.from_cfg(cfg)


def test_custom_data_template_trains(tmp_path):
    write_coco(tmp_path, ['cat', 'dog'])
    runner = custom_runner(custom_config(tmp_path, ['cat', 'dog']), tmp_path)
    runner.train()
    assert runner.iter == 1
    assert runner.train_dataloader.dataset.metainfo['classes'] == [
        'cat', 'dog']


@pytest.mark.parametrize('classes, replace', [
    ("('cat')", {}),
    ("'cat'", {}),
    (['cat', 'dog'], {'num_classes=len(classes)': 'num_classes=3'}),
], ids=['no comma', 'string', 'other count'])
def test_wrong_classes_are_refused_before_training(classes, replace, tmp_path):
    write_coco(tmp_path, ['cat', 'dog'])
    runner = custom_runner(custom_config(tmp_path, classes, **replace),
                           tmp_path)
    with pytest.raises(AssertionError, match='classes'):
        runner.train()
    assert runner.iter == 0


def table_rows(folder):
    """Rows of the tables that link a config: column title to cell."""
    text = (ROOT / folder / 'README.md').read_text('utf-8')
    titles = []
    for line in text.splitlines():
        if not line.startswith('|'):
            continue
        cells = [cell.strip() for cell in line.strip('|').split('|')]
        if 'config' in cells:
            titles = cells
        link = re.search(r'\]\(\.?/?([\w./+-]+)\.py\)', line)
        if link:
            assert len(cells) == len(titles), line
            yield f'{folder}/{link.group(1)}', dict(zip(titles, cells))


@pytest.mark.parametrize('folder', FOLDERS)
def test_readme_has_one_row_for_every_config_of_its_folder(folder):
    rows = [name for name, _ in table_rows(folder)]
    assert sorted(rows) == [name for name in CONFIGS
                            if name.startswith(f'{folder}/')]


@pytest.mark.parametrize('folder', COCO_FOLDERS)
def test_readme_states_the_parameters_and_macs_of_every_config(folder):
    for name, row in table_rows(folder):
        model = meta_detector(load(name))
        params = sum(p.numel() for p in model.parameters())
        assert row['params (M)'] == f'{params / 1e6:.2f}', name
        size = (640, 640) if '-640-' in name else (800, 1344)
        macs = count_complexity(model, size).macs
        assert row['GMACs'] == f'{macs / 1e9:.1f}', name
        assert row['box AP'] == '-', name  # nobody has trained them


@pytest.mark.parametrize('folder', COCO_FOLDERS)
def test_metafile_names_every_coco_config_of_its_folder(folder):
    meta = yaml.safe_load((ROOT / folder / 'metafile.yml').read_text('utf-8'))
    collection = meta['Collections'][0]['Name']
    for model in meta['Models']:
        path = ROOT.parent / model['Config']
        assert path.stem == model['Name']
        assert model['In Collection'] == collection
        name = path.relative_to(ROOT).with_suffix('').as_posix()
        assert model['Metadata']['Epochs'] == load(name).train_cfg.max_epochs
        assert 'Weights' not in model  # nobody has trained them
    paths = [model['Config'] for model in meta['Models']]
    assert sorted(paths) == [
        f'configs/{name}.py' for name in CONFIGS
        if name.startswith(f'{folder}/') and name != CUSTOM_DATA]


def test_model_index_lists_every_metafile():
    path = ROOT.parent / 'model-index.yml'
    index = yaml.safe_load(path.read_text('utf-8'))
    assert {ROOT.parent / path for path in index['Import']} == set(
        ROOT.rglob('metafile.yml'))
