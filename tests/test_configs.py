"""Every shipped config loads, builds and runs; folders agree with their texts."""
import copy
import re
from pathlib import Path

import pytest
import torch
import yaml
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import DefaultScope

from acmix_det.layers import AttentionConv2d
from tests.test_models.test_detectors import batch

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / 'configs').glob('*/*.py'))
FOLDERS = sorted({path.parent for path in CONFIGS})


@pytest.fixture(scope='module', params=CONFIGS,
                ids=lambda p: f'{p.parent.name}/{p.stem}')
def config(request):
    return request.param, Config.fromfile(request.param)


def build(cfg):
    model = copy.deepcopy(cfg.model)
    model.backbone.init_cfg = None  # no download
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmdet'):
        return MODELS.build(model)


def test_config_swaps_what_its_name_says(config, recwarn):
    path, cfg = config
    model = build(cfg)
    backbone, neck = path.stem.split('_')[1:3]
    for part, name in (('backbone', backbone), ('neck', neck)):
        kinds = {type(m).__name__ for m in getattr(model, part).modules()
                 if isinstance(m, AttentionConv2d)}
        expected = {'sasa': {'StandAloneSelfAttention2d'},
                    'acmix': {'ACmix2d'}}
        kind = re.search('sasa|acmix', name)
        assert kinds == (expected[kind.group()] if kind else set()), part
    assert not [w for w in recwarn if 'frozen_stages' in str(w.message)]


def test_config_trains_and_predicts_on_tiny_images(config):
    _, cfg = config
    model = build(cfg)
    model.init_weights()
    num_classes = cfg.model.bbox_head.num_classes
    images, samples = batch([(64, 64), (50, 33)], num_classes=num_classes)
    losses = model.loss(images, samples)
    total = sum(sum(x) for x in losses.values())
    total.backward()
    assert torch.isfinite(total)
    model.eval()
    with torch.no_grad():
        result = model.predict(*batch([(64, 64)]))[0].pred_instances
    assert (result.labels < num_classes).all()


def test_random_attention_is_never_frozen_nor_kept_in_eval(config):
    _, cfg = config
    backbone = cfg.model.backbone
    if backbone.get('init_cfg') is None:
        assert backbone.norm_eval is False
        assert backbone.frozen_stages == -1
        assert backbone.norm_cfg.type in ('GN', 'SyncBN')


def test_dumped_config_reloads_to_the_same(config, tmp_path):
    _, cfg = config
    dumped = tmp_path / 'config.py'
    cfg.dump(dumped)
    assert Config.fromfile(dumped).to_dict() == cfg.to_dict()


@pytest.mark.parametrize('folder', FOLDERS, ids=lambda p: p.name)
def test_readme_links_every_config_of_its_folder(folder):
    text = (folder / 'README.md').read_text(encoding='utf-8')
    linked = set(re.findall(r'\]\(\.?/?([\w.+-]+\.py)\)', text))
    assert linked == {p.name for p in folder.glob('*.py')}


@pytest.mark.parametrize('folder', [f for f in FOLDERS if f.name != 'digits'],
                         ids=lambda p: p.name)
def test_metafile_names_every_config_of_its_folder(folder):
    meta = yaml.safe_load((folder / 'metafile.yml').read_text('utf-8'))
    collection = meta['Collections'][0]['Name']
    for model in meta['Models']:
        path = ROOT / model['Config']
        assert path.stem == model['Name'] and path.parent == folder
        assert model['In Collection'] == collection
        assert 'Weights' not in model  # nobody has trained them
    names = {model['Name'] for model in meta['Models']}
    assert names == {p.stem for p in folder.glob('*.py')}


def test_model_index_lists_every_metafile():
    index = yaml.safe_load((ROOT / 'model-index.yml').read_text('utf-8'))
    assert {ROOT / path for path in index['Import']} == set(
        (ROOT / 'configs').glob('*/metafile.yml'))
