"""Field cases of training: recipes, weights, data, environment, speed.

What each id is about stands in docs/field_cases.md.
"""
import ast
import copy
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.model import ExponentialMovingAverage
from mmengine.optim import build_optim_wrapper
from mmengine.registry import PARAM_SCHEDULERS

from acmix_det.compat import mmdet_tools
from acmix_det.datasets import check_classes, make_digits
from acmix_det.datasets.check_coco import check_coco
from acmix_det.evaluation import build_detector
from acmix_det.layers import ACmix2d, SASAStem2d, StandAloneSelfAttention2d
from acmix_det.models import ACmixResNet, SASAResNet
from tests.test_configs import CONFIGS, load
from tests.test_models.test_detectors import batch

ROOT = Path(__file__).parents[2]
NO_GPU = dict(os.environ, CUDA_VISIBLE_DEVICES='-1', OMP_NUM_THREADS='1')
both_kinds = pytest.mark.parametrize('kind', ['sasa', 'acmix'])


def digits(kind):
    """Attention of one kind in backbone, FPN and head."""
    return copy.deepcopy(load(
        f'digits/retinanet-{kind}_r18-{kind}_fpn-{kind}_digits'))


def detector(kind):
    torch.manual_seed(0)
    model = build_detector(digits(kind))
    model.init_weights()
    return model


def total_loss(model, images, samples):
    return sum(sum(x) for x in model.loss(images, samples).values())


def python(*args, **kwargs):
    options = dict(capture_output=True, text=True, env=NO_GPU)
    done = subprocess.run([sys.executable, *map(str, args)],
                          **{**options, **kwargs})
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


# --- recipe


@pytest.mark.slow
@both_kinds
def test_f17_shipped_recipe_learns_two_images(kind):
    cfg, model = digits(kind), detector(kind)
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    warmup = PARAM_SCHEDULERS.build(
        dict(cfg.param_scheduler[0], optimizer=wrapper))
    images, samples = batch([(64, 64)] * 2, num_classes=10)
    totals = []
    for _ in range(60):
        loss = total_loss(model, images, samples)
        wrapper.update_params(loss)
        warmup.step()
        totals.append(loss.item())
    assert np.isfinite(totals).all()
    assert totals[-1] < 0.5 * totals[0]


def test_f65_configs_from_scratch_train_their_norms():
    names = [name for name in CONFIGS
             if load(name).model.backbone.get('init_cfg') is None]
    assert len(names) > 20
    for name in names:
        backbone = load(name).model.backbone
        assert backbone.norm_eval is False, name
        assert backbone.get('frozen_stages', -1) == -1, name
        assert backbone.norm_cfg.type in ('GN', 'SyncBN'), name


# --- weights


@pytest.mark.parametrize('cls', [SASAResNet, ACmixResNet])
def test_f18_keys_that_stay_random_are_those_of_the_attention(cls):
    from mmdet.models.backbones import ResNet
    with torch.device('meta'):
        model = cls(50, stage_with_attn=(False, False, True, True))
        plain = ResNet(50).state_dict()
        own = model.state_dict()
    result = model.load_state_dict(plain, strict=False, assign=True)
    attention = {f'{name}.{key}' for name, m in model.named_modules()
                 if isinstance(m, (StandAloneSelfAttention2d, ACmix2d))
                 for key in m.state_dict()}
    assert set(result.missing_keys) == attention and len(attention) > 9
    assert set(result.unexpected_keys) == {
        key for key in plain
        if key.startswith(('layer3', 'layer4')) and 'conv2' in key}
    assert len(result.unexpected_keys) == 6 + 3
    assert len(own) == len(plain) - 9 + len(attention)


@pytest.mark.parametrize('cls', [SASAResNet, ACmixResNet])
def test_f81_wrong_prefix_is_an_error_and_the_right_one_a_summary(
        cls, tmp_path, monkeypatch):
    from acmix_det.models import backbones
    told = []
    monkeypatch.setattr(backbones, 'print_log',
                        lambda text, **kwargs: told.append(text))
    path = str(tmp_path / 'weights.pth')
    stages = (False, False, True, True)
    small = dict(base_channels=16, stage_with_attn=stages)
    from mmdet.models.backbones import ResNet
    plain = ResNet(50, base_channels=16).state_dict()
    torch.save({f'backbone.{key}': x for key, x in plain.items()}, path)

    def start(prefix):
        model = cls(50, **small, init_cfg=dict(
            type='Pretrained', checkpoint=path, prefix=prefix))
        model.init_weights()
        return model.state_dict()

    for prefix in (None, 'neck', 'back'):
        with pytest.raises(ValueError, match='0 of [0-9]+ tensors loaded'):
            start(prefix)
    assert told == []
    own = start('backbone')
    loaded = sum(key in plain and torch.equal(x, plain[key])
                 for key, x in own.items())
    summary, = told
    assert f'{loaded} of {len(own)} tensors loaded' in summary
    assert re.search(rf'; {len(own) - loaded} \(.*\) start new; '
                     r'9 \(.*\) of the checkpoint not used', summary)


# --- resume


@pytest.mark.parametrize('layer', [
    StandAloneSelfAttention2d(16, 16, 3, padding=1),
    StandAloneSelfAttention2d(16, 16, 3, padding=1, position='absolute'),
    ACmix2d(16, 16, 3, padding=1), SASAStem2d(3, 16)],
    ids=['sasa', 'absolute', 'acmix', 'stem'])
def test_f83_layers_hold_nothing_of_a_size(layer):
    assert list(layer.buffers()) == []
    shapes = {k: v.shape for k, v in layer.state_dict().items()}
    for size in ((8, 8), (5, 13)):
        layer(torch.rand(1, layer.in_channels, *size))
        assert {k: v.shape for k, v in layer.state_dict().items()} == shapes


@both_kinds
def test_f83_averaged_weights_load_and_predict_at_another_size(kind, tmp_path):
    model = detector(kind)
    average = ExponentialMovingAverage(model, momentum=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):
        total_loss(model, *batch([(64, 64)] * 2, num_classes=10)).backward()
        optimizer.step()
        average.update_parameters(model)
    torch.save(average.module.state_dict(), tmp_path / 'ema.pth')
    torch.manual_seed(1)
    fresh = build_detector(digits(kind))
    fresh.load_state_dict(torch.load(tmp_path / 'ema.pth'), strict=True)
    fresh.eval(), average.module.eval()
    images, samples = batch([(96, 72)], num_classes=10)
    with torch.no_grad():
        maps = [m(images, mode='tensor') for m in (fresh, average.module)]
        boxes = fresh.predict(images, samples)[0].pred_instances.bboxes
    assert boxes.isfinite().all()
    for a, b in zip(*([*scores, *deltas] for scores, deltas in maps)):
        assert torch.equal(a, b)


# --- optim


def test_f84_custom_keys_reach_positions_and_mixing_alone():
    cfg = digits('sasa')
    cfg.model.neck.type = 'ACmixFPN'
    cfg.model.backbone.attn_stem = {}
    model = build_detector(cfg)
    names = {id(p): name for name, p in model.named_parameters()}
    kinds = ('rel_pos_h', 'rel_pos_w', 'alpha')
    wanted = {
        f'{name}.{key}' for name, m in model.named_modules()
        for key, _ in m.named_parameters(recurse=False) if key in kinds
    }
    parts = {name.split('.')[0] for name in wanted}
    assert parts == {'backbone', 'neck', 'bbox_head'}

    def undecayed(**paramwise_cfg):
        wrapper = build_optim_wrapper(model, dict(
            optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.01),
            paramwise_cfg=paramwise_cfg))
        groups = wrapper.optimizer.param_groups
        assert sum(len(g['params']) for g in groups) == len(names)
        return {names[id(p)] for g in groups if g['weight_decay'] == 0
                for p in g['params']}

    keys = {'rel_pos': dict(decay_mult=0.), 'alpha': dict(decay_mult=0.)}
    assert undecayed(custom_keys=keys) == wanted
    # no norm and no bias has such a name: their rules still hold
    others = undecayed(norm_decay_mult=0., bias_decay_mult=0.)
    assert others and not others & wanted
    assert undecayed(custom_keys=keys, norm_decay_mult=0.,
                     bias_decay_mult=0.) == others | wanted


# --- data


DATA = """
default_scope = 'mmdet'
data = dict(type='CocoDataset', metainfo=dict(classes={classes}))
model = dict(bbox_head=dict(num_classes={number}))
train_dataloader = dict(dataset=data)
"""


@pytest.mark.parametrize('classes, number, message', [
    ("('cat')", 1, "classes of train_dataloader must be .*string 'cat'"),
    ("('cat', 'dog')", 3, 'num_classes must be .*2, got .*num_classes=3'),
    ("('cat', )", 80, 'num_classes must be .*1, got .*num_classes=80'),
    ("('cat', 3)", 2, 'classes of train_dataloader must be .*names'),
], ids=['no comma', 'other count', 'count of COCO', 'no name'])
def test_f77_classes_that_do_not_fit_stop_before_the_first_batch(
        classes, number, message, tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(DATA.format(classes=classes, number=number))
    with pytest.raises(ValueError, match=message):
        check_classes(Config.fromfile(path))
    train = runpy.run_path(str(ROOT / 'tools' / 'train.py'), run_name='tool')
    with pytest.raises(SystemExit, match=message):
        train['check_config']([str(path), '--work-dir', 'x'])


def test_f77_one_class_with_its_comma_passes(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(DATA.format(classes="('cat', )", number=1))
    check_classes(Config.fromfile(path))


@both_kinds
def test_f79_batch_without_boxes_gives_every_gradient(kind):
    model = detector(kind)
    losses = model.loss(*batch([(64, 64)] * 2, boxes=0))
    assert sum(losses['loss_bbox']).item() == 0
    total = sum(sum(x) for x in losses.values())
    total.backward()
    assert total.isfinite()
    assert [n for n, p in model.named_parameters()
            if p.grad is None or not p.grad.isfinite().all()] == []


def test_f79_duplicate_image_ids_are_reported(tmp_path):
    image = dict(id=1, width=64, height=64)
    path = tmp_path / 'set.json'
    path.write_text(json.dumps(dict(
        images=[dict(image, file_name='a.png'), dict(image, file_name='b.png')],
        annotations=[], categories=[dict(id=1, name='cat')])))
    report = check_coco(str(path))
    assert report.num_errors == 1
    assert 'duplicate image id' in [f.kind for f in report.findings]


# --- cpu and env


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Two images, one epoch with mmdet's own script, no GPU in sight."""
    pytest.importorskip('sklearn')
    folder = tmp_path_factory.mktemp('trained')
    data = folder / 'digits'
    make_digits(str(data), num_train=2, num_val=1, image_size=96)
    cfg = digits('acmix')
    for split in ('train', 'val', 'test'):
        cfg[f'{split}_dataloader'].dataset.data_root = f'{data}/'
        if split != 'train':
            cfg[f'{split}_evaluator'].ann_file = str(
                data / 'annotations/val.json')
    cfg.train_dataloader.batch_size = 1
    cfg.train_cfg.max_epochs = 1
    cfg.dump(folder / 'config.py')
    log = python(mmdet_tools.mmdet_tools_dir() / 'train.py',
                 folder / 'config.py', '--work-dir', folder / 'work',
                 env=dict(NO_GPU, PYTHONPATH=str(ROOT)))
    return folder, log


@pytest.mark.slow
def test_f88_detector_trains_an_epoch_without_gpu(trained):
    folder, log = trained
    assert (folder / 'work' / 'epoch_1.pth').is_file()
    assert 'Epoch(val) [1][1/1]' in log
    readme = (ROOT / 'README.md').read_text('utf-8')
    assert 'one GPU (or the CPU)\npython tools/train.py ' in readme


@pytest.mark.slow
def test_f71_training_resumes_in_another_process(trained):
    folder, _ = trained
    work = folder / 'work'
    environment = {k: v for k, v in NO_GPU.items()
                   if k != 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'}
    log = python(ROOT / 'tools' / 'train.py', folder / 'config.py',
                 '--work-dir', work, '--resume', '--cfg-options',
                 'train_cfg.max_epochs=2', env=environment)
    assert 'resumed epoch: 1, iter: 2' in log
    last = torch.load(work / 'epoch_2.pth', weights_only=False)
    assert last['meta']['iter'] == 4
    torch.save(last['state_dict'], work / 'weights.pth')
    state = torch.load(work / 'weights.pth', weights_only=True)
    assert state and all(isinstance(x, torch.Tensor) for x in state.values())
    build_detector(digits('acmix')).load_state_dict(state)


# --- env and install: a wheel built with what an old and a new machine lack


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """Built without a compiler and without pkg_resources."""
    folder = tmp_path_factory.mktemp('wheel')
    shutil.copytree(ROOT, folder / 'source', ignore=shutil.ignore_patterns(
        '.*', 'work_dirs', 'data', 'build', '__pycache__', '*.egg-info',
        '*.so'))
    (folder / 'pkg_resources.py').write_text(
        "raise ModuleNotFoundError('pkg_resources')\n")
    python('-m', 'pip', 'wheel', '.', '--no-deps', '--no-build-isolation',
           '--no-index', '--wheel-dir', folder, cwd=folder / 'source',
           env=dict(NO_GPU, CC='false', CXX='false', PYTHONPATH=str(folder)))
    built, = folder.glob('*.whl')
    return built


@pytest.fixture(scope='module')
def installed(wheel):
    """Folder with the wheel in it, and no other acmix_det on the path."""
    folder = wheel.parent / 'site-packages'
    python('-m', 'pip', 'install', '--no-deps', '--no-index', '--target',
           folder, wheel)
    assert not list(folder.rglob('*.so'))
    return folder


WITHOUT_COMPILER = """
import sys, warnings
sys.modules['triton'] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    import acmix_det
assert acmix_det.__file__.startswith(sys.argv[1]), acmix_det.__file__
told = [str(w.message) for w in caught if 'acmix_det' in w.filename]
import torch
from acmix_det.layers import StandAloneSelfAttention2d
layer, other = (StandAloneSelfAttention2d(16, 16, 3, padding=1,
                                          backend=backend).double()
                for backend in ('auto', 'reference'))
other.load_state_dict(layer.state_dict())
x = torch.randn(2, 16, 9, 7, dtype=torch.float64, requires_grad=True)
results = []
for module in (layer, other):
    out = module(x)
    results.append((out, *torch.autograd.grad(
        out.square().sum(), (x, *module.parameters()))))
torch.testing.assert_close(*results)
print('warnings:', len(told), told[0])
"""


@pytest.mark.slow
def test_f38_package_without_compiler_warns_once_and_computes_the_same(
        installed):
    out = python('-c', WITHOUT_COMPILER, installed, cwd=installed,
                 env=dict(NO_GPU, PYTHONPATH=str(installed)))
    warning, = [x for x in out.splitlines() if x.startswith('warnings: ')]
    assert warning.startswith(
        "warnings: 1 backend='cpu' of local attention cannot run")
    assert 'needs a C++ compiler' in warning


@pytest.mark.slow
def test_f74_package_builds_without_pkg_resources(wheel):
    assert wheel.name.startswith('acmix_det-')
    for path in (ROOT / 'setup.py', *(ROOT / 'acmix_det').rglob('*.py'),
                 *(ROOT / 'tools').rglob('*.py')):
        names = {
            name.split('.')[0] for node in ast.walk(ast.parse(
                path.read_text('utf-8')))
            for name in (
                [a.name for a in node.names] if isinstance(node, ast.Import)
                else [node.module or ''] if isinstance(node, ast.ImportFrom)
                else [])
        }
        assert not names & {'pkg_resources', 'distutils'}, path
    requirement = (ROOT / 'pyproject.toml').read_text('utf-8')
    assert 'requires = ["setuptools>=64"]' in requirement  # no upper end


def numpy_names():
    """Every np.name of the package and the tools."""
    for folder in ('acmix_det', 'tools'):
        for path in (ROOT / folder).rglob('*.py'):
            if '.mim' in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text('utf-8'))):
                if isinstance(node, ast.Attribute) and ast.unparse(
                        node.value) in ('np', 'numpy'):
                    yield node.attr, path


# removed by numpy 2, and unknown to numpy 1.26
NUMPY_1 = {'float_', 'complex_', 'string_', 'unicode_', 'Inf', 'Infinity',
           'NaN', 'NINF', 'PINF', 'product', 'cumproduct', 'sometrue',
           'alltrue', 'in1d', 'trapz', 'row_stack', 'cast', 'asfarray',
           'find_common_type', 'issubclass_', 'obj2sctype', 'bool', 'int',
           'float', 'complex', 'object', 'str', 'msort', 'round_'}
NUMPY_2 = {'astype', 'concat', 'permute_dims', 'matrix_transpose', 'isdtype',
           'unstack', 'vecdot', 'matvec', 'vecmat', 'bitwise_count',
           'trapezoid',
           'cumulative_sum', 'cumulative_prod', 'unique_values', 'pow', 'acos',
           'asin', 'atan', 'atan2', 'long', 'ulong'}


def test_f75_numpy_names_exist_in_both_generations():
    names = set(numpy_names())
    assert len(names) > 10
    wrong = [(name, path) for name, path in names
             if name in NUMPY_1 | NUMPY_2 or not hasattr(np, name)]
    assert wrong == []


STRICT = """
import warnings
warnings.filterwarnings('error', category=DeprecationWarning,
                        module=r'acmix_det(\\.|$)')
warnings.filterwarnings('error', category=PendingDeprecationWarning,
                        module=r'acmix_det(\\.|$)')
import acmix_det, acmix_det.evaluation.inference, acmix_det.evaluation.plots
print('imported')
"""


@pytest.mark.slow
def test_f75_import_uses_nothing_deprecated():
    assert 'imported' in python('-c', STRICT, cwd=ROOT)


def test_f75_result_file_goes_through_the_evaluator(tmp_path):
    from mmdet.evaluation import CocoMetric
    from mmengine.fileio import load as load_file
    box, classes = [8., 6., 30., 20.], ('cat', 'dog')
    truth = dict(
        images=[dict(id=7, file_name='a.png', width=64, height=48)],
        annotations=[dict(id=1, image_id=7, category_id=2, bbox=box,
                          area=600., iscrowd=0)],
        categories=[dict(id=1, name='cat'), dict(id=2, name='dog')])
    (tmp_path / 'val.json').write_text(json.dumps(truth))
    prefix = str(tmp_path / 'results')
    metric = CocoMetric(ann_file=str(tmp_path / 'val.json'), metric='bbox',
                        outfile_prefix=prefix)
    metric.dataset_meta = dict(classes=classes)
    corners = torch.tensor([[8., 6., 38., 26.]])
    metric.process({}, [dict(
        img_id=7, ori_shape=(48, 64),
        pred_instances=dict(bboxes=corners, scores=torch.tensor([0.9]),
                            labels=torch.tensor([1])))])
    assert metric.evaluate(size=1)['coco/bbox_mAP'] == 1.
    saved, = load_file(f'{prefix}.bbox.json')
    assert saved['bbox'] == box and saved['category_id'] == 2
    assert saved['image_id'] == 7


def test_f76_optimizer_registered_twice_is_explained(tmp_path):
    stub = tmp_path / 'mmengine'
    stub.mkdir()
    (stub / '__init__.py').write_text(
        "__version__ = '0.10.4'\n"
        "raise KeyError('Adafactor is already registered in optimizer at "
        "torch.optim')\n")
    done = subprocess.run(
        [sys.executable, '-c', 'import acmix_det'], cwd=tmp_path,
        env=dict(NO_GPU, PYTHONPATH=os.pathsep.join([str(tmp_path),
                                                     str(ROOT)])),
        capture_output=True, text=True)
    assert done.returncode == 1
    message = done.stderr[done.stderr.rindex('ImportError:'):]
    assert 'acmix_det needs mmengine>=0.10.7,<1.0.0' in message
    assert 'Adafactor is already registered' in message
    assert "pip install 'mmengine>=0.10.7,<1.0.0'" in message


# --- speed


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='needs /proc')
def test_f20_convolution_stands_in_the_table_of_the_layers(tmp_path,
                                                           monkeypatch):
    path = tmp_path / 'layers.json'
    tool = ROOT / 'tools' / 'benchmark_local_attention.py'
    monkeypatch.setattr(sys, 'argv', [
        tool.name, '--layer', '--shape', '64', '32', '32', '--repeats', '2',
        '--no-peers', '--memory', '--json', str(path)])
    runpy.run_path(str(tool), run_name='__main__')
    saved = json.loads(path.read_text())
    rows = saved['tables'][0]['rows']
    assert [row['name'] for row in rows] == ['nn.Conv2d 3x3', 'SASA', 'ACmix']
    for row in rows:
        assert list(row['passes']) == ['forward', 'forward + backward']
        for x in row['passes'].values():
            assert x['lower_quartile_ms'] <= x['median_ms'] <= (
                x['upper_quartile_ms'])
            assert x['peak_mib'] > 0 and x['time_ratio'] > 0
    assert saved['environment']['torch'] == torch.__version__
