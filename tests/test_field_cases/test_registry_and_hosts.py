"""Field cases of registries, configs, hosts, freezing, norms, packaging.

What each id is about stands in docs/field_cases.md.
"""
import copy
import runpy
import warnings

import numpy as np
import pytest
import torch
from mmcv.cnn import build_conv_layer
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.registry import MODELS as ROOT_MODELS
from mmengine.registry import DefaultScope, Registry
from mmengine.runner import Runner
from torch import nn

from acmix_det.evaluation import build_detector
from acmix_det.evaluation.inference import detect, load_detector
from acmix_det.layers import ACmix2d, AttentionConv2d
from acmix_det.models import ACmixFPN, ACmixResNet, SASAFPN, SASAResNet
from tests.test_configs import CONFIGS, ROOT, load
from tests.test_models.test_detectors import batch

ALL = (True, True, True, True)
LATE = (False, False, True, True)


def norms_of(model):
    return [m for m in model.modules()
            if isinstance(m, nn.modules.batchnorm._NormBase)]


# --- registry


@pytest.mark.parametrize('imports', ['acmix_det', ['acmix_det']],
                         ids=['string', 'list'])
def test_f55_custom_imports_take_a_string_too(imports, tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(f'custom_imports = dict(imports={imports!r}, '
                    'allow_failed_imports=False)\n')
    assert Config.fromfile(path).custom_imports.imports == imports


@pytest.fixture(scope='module')
def other_scope():
    """The registry of a downstream package without such layers."""
    return Registry('model', parent=ROOT_MODELS, scope='field_case').scope


@pytest.mark.parametrize('kind', ['SASA', 'ACmix'])
@pytest.mark.parametrize('scope', [None, 'mmdet', 'field_case'], ids=str)
def test_f57_mmcv_finds_the_layers_in_every_scope(kind, scope, other_scope):
    with DefaultScope.overwrite_default_scope(scope):
        layer = build_conv_layer(dict(type=kind, num_heads=4), 16, 16, 3,
                                 padding=1)
    assert isinstance(layer, AttentionConv2d)
    assert ROOT_MODELS.get(kind) is type(layer)


# --- config


def lazy_config(tmp_path):
    path = tmp_path / 'lazy.py'
    path.write_text("""
from acmix_det.layers import StandAloneSelfAttention2d
from acmix_det.models import SASAFPN, SASAResNet
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)
backbone = dict(type=SASAResNet, depth=26, base_channels=16,
                attn_cfg=dict(type=StandAloneSelfAttention2d, num_heads=4))
neck = dict(type=SASAFPN, in_channels=[64, 128, 256, 512], out_channels=32,
            num_outs=5)
""")
    return path


def test_f87_classes_work_as_types_of_a_pure_python_config(tmp_path):
    cfg = Config.fromfile(lazy_config(tmp_path), lazy_import=True)
    cfg.dump(tmp_path / 'dumped.py')
    again = Config.fromfile(tmp_path / 'dumped.py')
    for config in (cfg, again):
        backbone = MODELS.build(config.backbone)
        neck = MODELS.build(config.neck)
        assert type(backbone) is SASAResNet and type(neck) is SASAFPN
        assert backbone.layer1[0].conv2.num_heads == 4
        outs = neck(backbone(torch.rand(2, 3, 32, 32)))
        assert [x.shape[1] for x in outs] == [32] * 5


def test_f87_pure_python_base_takes_our_classes(tmp_path):
    (tmp_path / 'base.py').write_text("""
from mmdet.models import FPN, ResNet
model = dict(
    backbone=dict(type=ResNet, depth=50, frozen_stages=1),
    neck=dict(type=FPN, in_channels=[256, 512, 1024, 2048], out_channels=256,
              num_outs=5))
""")
    (tmp_path / 'child.py').write_text("""
from mmengine.config import read_base
with read_base():
    from .base import *
from acmix_det.models import ACmixFPN, ACmixResNet
model.update(dict(backbone=dict(type=ACmixResNet, frozen_stages=-1),
                  neck=dict(type=ACmixFPN)))
""")
    cfg = Config.fromfile(tmp_path / 'child.py')
    cfg.dump(tmp_path / 'dumped.py')
    for config in (cfg, Config.fromfile(tmp_path / 'dumped.py')):
        with torch.device('meta'):
            backbone = MODELS.build(config.model.backbone)
            neck = MODELS.build(config.model.neck)
        assert type(backbone) is ACmixResNet and type(neck) is ACmixFPN
        assert backbone.depth == 50 and backbone.frozen_stages == -1


# --- host


def in_slot_of_dcn(**backbone):
    """Attention in C4 and C5 by the host's own slot."""
    return MODELS.build(dict(depth=50, stage_with_dcn=LATE, **backbone))


@pytest.mark.parametrize('kind', ['SASA', 'ACmix'])
def test_f58_grouped_hosts_are_refused_by_name(kind):
    with pytest.raises(ValueError, match='groups must be 1, got 32; .*ResNeXt'):
        in_slot_of_dcn(type='ResNeXt', groups=32, base_width=4,
                       dcn=dict(type=kind))
    with pytest.raises(TypeError, match="ResNet.*'groups'"):
        MODELS.build(dict(type=f'{kind}ResNet', depth=50, groups=32,
                          base_width=4, stage_with_attn=LATE))


@pytest.mark.parametrize('host, widths', [
    (dict(type='ResNet'), [256, 512]),
    (dict(type='ResNeXt', groups=1, base_width=32), [256, 512]),
    (dict(type='Res2Net', scales=4, base_width=26), [104, 208]),
], ids=lambda x: x['type'] if isinstance(x, dict) else '')
def test_f58_attention_has_the_width_of_the_layer_it_replaces(host, widths):
    model = in_slot_of_dcn(dcn=dict(type='SASA', num_heads=2), **host)
    found = {
        stage: {m.out_channels for m in getattr(model, stage).modules()
                if isinstance(m, AttentionConv2d)}
        for stage in model.res_layers
    }
    assert found == {'layer1': set(), 'layer2': set(), 'layer3': {widths[0]},
                     'layer4': {widths[1]}}
    model.eval()  # mmdet's returns None
    assert all(x.isfinite().all() for x in model(torch.rand(1, 3, 64, 64)))


@pytest.mark.parametrize('backbone, neck', [(SASAResNet, SASAFPN),
                                            (ACmixResNet, ACmixFPN)])
def test_f60_both_numbers_of_maps_are_named(backbone, neck):
    channels = [256, 512, 1024, 2048]
    with torch.device('meta'):
        model = backbone(depth=50, out_indices=(1, 2, 3))
        fpn = neck(in_channels=channels, out_channels=256, num_outs=5)
        outs = model(torch.empty(2, 3, 64, 64))
        assert [x.shape[1] for x in outs] == channels[1:]
        with pytest.raises(ValueError, match='each of the 4 .*got 3'):
            fpn(outs)
        with pytest.raises(ValueError, match='each of the 4 .*got 5'):
            fpn(tuple(outs) + outs[:2])


@pytest.mark.parametrize('out_indices', [(0, ), (1, 3), (0, 1, 2, 3)],
                         ids=str)
def test_f60_maps_follow_out_indices(out_indices):
    with torch.device('meta'):
        model = SASAResNet(50, out_indices=out_indices)
        outs = model(torch.empty(1, 3, 64, 64))
    assert [x.shape[1] for x in outs] == [256 * 2**i for i in out_indices]


EDITED = """
_base_ = 'mmdet::{base}'
model = dict(backbone=dict(type='{kind}ResNet'), neck=dict(type='{kind}FPN'))
"""


@pytest.mark.filterwarnings('ignore:frozen_stages')
@pytest.mark.parametrize('kind', ['SASA', 'ACmix'])
def test_f61_types_are_the_only_edit_of_an_inherited_config(kind, tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(EDITED.format(
        base='retinanet/retinanet_r50_fpn_1x_coco.py', kind=kind))
    cfg = Config.fromfile(path)
    assert {'depth', 'frozen_stages', 'init_cfg'} <= set(cfg.model.backbone)
    model = build_detector(cfg)
    assert type(model.backbone).__name__ == f'{kind}ResNet'
    scores, boxes = model(torch.rand(1, 3, 64, 64), mode='tensor')
    assert all(x.isfinite().all() for x in (*scores, *boxes))


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('base', [
    'faster_rcnn/faster-rcnn_r50-caffe_fpn_1x_coco.py',
    'mask_rcnn/mask-rcnn_r101_fpn_1x_coco.py',
    'cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py',
    'atss/atss_r50_fpn_1x_coco.py',
    'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py',
    'ghm/retinanet_r50_fpn_ghm-1x_coco.py',
    'gfl/gfl_r50_fpn_1x_coco.py',
], ids=lambda path: path.split('/')[0])
def test_f61_other_detectors_take_the_types_too(base, tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(EDITED.format(base=base, kind='SASA'))
    with torch.device('meta'):
        model = build_detector(Config.fromfile(path))
    assert type(model.backbone) is SASAResNet and type(model.neck) is SASAFPN


# --- freeze


def assert_frozen(model, names):
    for module in (m for n in names for m in getattr(model, n).modules()):
        assert not module.training or not norms_of(module)
        assert not any(p.requires_grad for p in module.parameters())
    free = [p for name in model.res_layers if name not in names
            for p in getattr(model, name).parameters()]
    assert free and all(p.requires_grad for p in free)
    stats = {name: copy.deepcopy(getattr(model, name).state_dict())
             for name in names}
    model(torch.rand(2, 3, 64, 64))
    for name, before in stats.items():
        for key, value in getattr(model, name).state_dict().items():
            assert torch.equal(value, before[key]), f'{name}.{key}'


@pytest.mark.filterwarnings('ignore:frozen_stages')
@pytest.mark.parametrize('make, names', [
    (lambda: ACmixResNet(26, frozen_stages=1, norm_eval=False),
     ['conv1', 'bn1', 'layer1']),
    (lambda: SASAResNet(18, base_channels=16, frozen_stages=2, attn_stem={},
                        norm_eval=False),
     ['conv1', 'bn1', 'layer1', 'layer2']),
    (lambda: SASAResNet(26, base_channels=16, frozen_stages=0,
                        norm_eval=False), ['conv1', 'bn1']),
], ids=['acmix', 'stem', 'stage-0'])
def test_f63_frozen_layers_are_frozen_before_and_after_train(make, names):
    model = make()
    attention = [m for name in names for m in getattr(model, name).modules()
                 if isinstance(m, ACmix2d)]
    for m in attention:
        assert not m.alpha.requires_grad and not m.beta.requires_grad
        assert not m.pos_weight.requires_grad
    assert_frozen(model, names)
    for _ in range(2):
        assert_frozen(model.train(), names)
    assert_frozen(model.eval().train(), names)


def test_f64_frozen_attention_without_weights_is_told():
    weights = dict(type='Pretrained', checkpoint='torchvision://resnet50')
    with torch.device('meta'), pytest.warns(UserWarning, match='layer1'):
        SASAResNet(50, stage_with_attn=ALL, frozen_stages=1, init_cfg=weights)


@pytest.mark.parametrize('cls', [SASAResNet, ACmixResNet])
@pytest.mark.parametrize('frozen', [0, 1, 2, 4])
@pytest.mark.parametrize('stages', [ALL, LATE], ids=['all', 'late'])
@pytest.mark.parametrize('stem', [None, {}], ids=['conv-stem', 'attn-stem'])
def test_f64_warning_names_exactly_the_frozen_attention(cls, frozen, stages,
                                                        stem):
    expected = ['stem'] * (stem is not None) + [
        f'layer{i + 1}' for i in range(frozen) if stages[i]]
    with warnings.catch_warnings(record=True) as caught, torch.device('meta'):
        warnings.simplefilter('always')
        cls(26, frozen_stages=frozen, stage_with_attn=stages, attn_stem=stem)
    told = [str(w.message) for w in caught if 'freezes' in str(w.message)]
    assert len(told) == bool(expected)
    for text in told:
        assert f'attention of {", ".join(expected)} in' in text


# --- norm


def sync_bn_config(tmp_path):
    sync = dict(type='SyncBN', requires_grad=True)
    cfg = copy.deepcopy(load('digits/retinanet_r18-sasa_fpn-sasa_digits'))
    cfg.model.backbone.norm_cfg = cfg.model.neck.norm_cfg = sync
    cfg.work_dir = str(tmp_path)
    cfg.default_scope = 'mmdet'
    return cfg


def test_f67_one_norm_cfg_reaches_every_layer(tmp_path):
    model = build_detector(sync_bn_config(tmp_path))
    for part in (model.backbone, model.neck):
        norms = norms_of(part)
        assert norms and all(isinstance(m, nn.SyncBatchNorm) for m in norms)
        assert not any(isinstance(m, nn.GroupNorm) for m in part.modules())


def test_f67_detections_need_no_gpu(tmp_path):
    cfg = sync_bn_config(tmp_path)
    meta = dict(dataset_meta=dict(classes=tuple('0123456789')))
    torch.save(dict(state_dict=build_detector(cfg).state_dict(), meta=meta),
               tmp_path / 'epoch_1.pth')
    model = load_detector(cfg, tmp_path / 'epoch_1.pth', 'cpu')
    assert norms_of(model) and not any(
        isinstance(m, nn.SyncBatchNorm) for m in norms_of(model))
    image = np.zeros((60, 80, 3), np.uint8)
    assert len(detect(model, image, 0.).labels) > 0


def test_f67_runner_of_the_tools_reverts_the_norms(tmp_path):
    model = build_detector(sync_bn_config(tmp_path))
    runner = Runner(model, str(tmp_path), experiment_name=tmp_path.name,
                    default_scope='mmdet')
    assert norms_of(runner.model) and not any(
        isinstance(m, nn.SyncBatchNorm) for m in norms_of(runner.model))
    runner.model.train()
    losses = runner.model.loss(*batch([(64, 64)] * 2, num_classes=10))
    assert sum(losses['loss_cls']).isfinite()


def test_f67_training_step_of_the_benchmark_needs_no_gpu(tmp_path):
    tool = runpy.run_path(
        str(ROOT.parent / 'tools' / 'benchmark_detector.py'), run_name='tool')
    step = tool['make_run'](sync_bn_config(tmp_path), True, 'detector',
                            (64, 64), 2, 'cpu')
    assert all(g.isfinite().all() for g in step())


# --- package


@pytest.mark.filterwarnings('ignore')
def test_f86_configs_are_found_by_the_name_of_the_package(tmp_path):
    for folder in ('acmix', 'digits', 'sasa'):
        name = next(n for n in CONFIGS if n.startswith(f'{folder}/'))
        path = tmp_path / f'{folder}.py'
        path.write_text(f"_base_ = 'acmix_det::{name}.py'\n")
        child = Config.fromfile(path)
        assert child.model == load(name).model
        assert get_config(f'acmix_det::{name}.py').model == child.model
