"""Comparisons of two trainings of one epoch on eight images."""
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import mmcv
import pytest
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.runner import Runner

from acmix_det.datasets import make_digits
from acmix_det.evaluation import inference

ROOT = Path(__file__).parents[2]
CONFIGS = dict(
    conv='retinanet_r18_fpn_digits.py',
    sasa='retinanet_r18-sasa_fpn-sasa_digits.py')
SCRIPT = '<script>'


def load_tool():
    spec = importlib.util.spec_from_file_location(
        'compare', ROOT / 'tools' / 'compare.py')
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope('mmdet'):
        yield


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Folder with data/ and the work directories conv/ and sasa/."""
    root = tmp_path_factory.mktemp('runs')
    make_digits(str(root / 'data'), num_train=8, num_val=6, image_size=96)
    with DefaultScope.overwrite_default_scope('mmdet'):
        for name, file in CONFIGS.items():
            cfg = Config.fromfile(ROOT / 'configs' / 'digits' / file)
            changes = {
                'train_cfg.max_epochs': 1, 'default_hooks.logger.interval': 1,
                'work_dir': str(root / name), 'log_level': 'ERROR',
                'experiment_name': f'compare-{name}',
                'visualizer.name': f'compare-{name}'
            }
            for split in ('train', 'val', 'test'):
                data = f'{split}_dataloader.dataset'
                changes[f'{data}.data_root'] = str(root / 'data')
                for step in cfg[f'{split}_dataloader'].dataset.pipeline:
                    if step.type == 'Resize':
                        step.scale = (64, 64)
            changes['val_evaluator.ann_file'] = str(
                root / 'data' / 'annotations' / 'val.json')
            cfg.merge_from_dict(changes)
            Runner.from_cfg(cfg).train()
    return root


@pytest.fixture
def runs(trained, tmp_path):
    """A copy of the work directories, to change at will."""
    for name in CONFIGS:
        shutil.copytree(trained / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def compare(monkeypatch, capsys):
    tool = load_tool()

    def call(*args):
        monkeypatch.setattr(sys, 'argv', ['compare.py', *map(str, args)])
        code = 0
        try:
            tool.main()
        except SystemExit as error:
            code = error.code
            if isinstance(code, str):  # what Python does with a message
                print(code, file=sys.stderr)
                code = 1
        return code, *capsys.readouterr()

    return call


def edit_config(work_dir, **changes):
    path, = work_dir.glob('*.py')
    cfg = Config.fromfile(path)
    cfg.merge_from_dict(changes)
    cfg.dump(path)


def edit_metrics(work_dir, **changes):
    """Change the evaluation of the last epoch in the log."""
    log, = work_dir.glob('*/vis_data/scalars.json')
    lines = [json.loads(x) for x in log.read_text().splitlines()]
    lines = [x for x in lines if 'loss' in x]
    lines.append({'step': 1, **changes})
    log.write_text('\n'.join(map(json.dumps, lines)))


def row_of(text, name):
    row = next(x for x in text.splitlines() if x.startswith(f'| {name}'))
    return [cell.strip() for cell in row.strip('|').split('|')]


def test_table_of_two_trainings(runs, compare):
    for name, value in (('conv', 0.4), ('sasa', 0.5)):
        edit_metrics(runs / name, **{'coco/bbox_mAP': value,
                                     'coco/bbox_mAP_s': -1.})
    code, out, err = compare(runs / 'conv', runs / 'sasa')
    assert code == 0 and not err
    conv, sasa = row_of(out, 'conv'), row_of(out, 'sasa')
    assert conv[1] == '0.400' and sasa[1] == '0.500'
    assert conv[4] == sasa[4] == '-'  # -1 of COCO
    assert conv[7:9] == ['1', '0.400 (1)']
    assert conv[9:11] == ['1.000 M', ''] and sasa[10] == '+50 %'
    assert 'one image of 64 x 64' in out

    _, out, _ = compare(runs / 'conv', runs / 'sasa', '--baseline', 'sasa',
                        '--shape', 96, '--format', 'json')
    models = json.loads(out)['models']
    assert [m['model'] for m in models] == ['sasa', 'conv']
    assert models[1]['params_saved_percent'] == pytest.approx(-100, abs=1)
    _, out, err = compare(runs / 'conv', '--format', 'csv')
    assert len(out.splitlines()) == 2 and 'conv,finished,1,0.4' in out
    assert 'one image of 64 x 64' in err


def test_unfinished_unstarted_and_missing_runs_show_as_such(runs, compare):
    edit_config(runs / 'conv', **{'train_cfg.max_epochs': 3})
    new = runs / 'new'
    new.mkdir()
    config, = (runs / 'sasa').glob('*.py')
    shutil.copy(config, new)
    code, out, err = compare(runs / 'conv', new)
    assert code == 0
    assert row_of(out, 'conv, unfinished (1 of 3 epochs)')[1] == '-'
    assert row_of(out, 'new, not started')[1:9] == 8 * ['-']

    code, _, err = compare(new, runs / 'none')
    assert code == 1 and 'work_dir must be a directory, got ' in err
    code, out, err = compare(new, runs / 'none', '--allow-missing')
    assert code == 0
    assert set(row_of(out, 'none, no such directory')[1:]) == {'-'}


def test_repeated_names_are_seeds_of_one_model(runs, compare):
    shutil.copytree(runs / 'conv', runs / 'conv2')
    for name, value in (('conv', 0.4), ('conv2', 0.6)):
        edit_metrics(runs / name, **{'coco/bbox_mAP': value})
    dirs = runs / 'conv', runs / 'conv2'
    code, out, err = compare(*dirs, '--names', 'c', 'c')
    assert code == 0 and row_of(out, 'c (n=2)')[1] == '0.500 ± 0.141'
    code, _, err = compare(runs / 'conv', runs / 'sasa', '--names', 'c', 'c')
    assert code == 1 and '--names must be the same only for' in err


def test_report_shows_everything_and_escapes_names(runs, compare):
    edit_metrics(runs / 'conv', **{
        'coco/bbox_mAP': 0.4, f'coco/{SCRIPT}_precision': 0.3,
        'coco/1_precision': 0.5
    })
    edit_metrics(runs / 'sasa', **{
        'coco/bbox_mAP': 0.3, f'coco/{SCRIPT}_precision': 0.1,
        'coco/1_precision': 0.7
    })
    out_dir = runs / 'new' / 'report'
    code, _, err = compare(runs / 'conv', runs / 'sasa', '--names', SCRIPT,
                           '$a_', '--out', out_dir, '--images', 2)
    assert code == 0, err
    html = (out_dir / 'report.html').read_text()
    assert '<script' not in html and '&lt;script&gt;' in html
    assert html.count('data:image/png;base64,') == 5
    for text in ('epoch_1.pth', 'model.backbone.stage_with_attn',
                 '0.700 (+0.200)', 'mmengine', CONFIGS['sasa'], 'ground truth'):
        assert text in html
    for name in ('curves', 'map_params', 'map_flops', 'classes',
                 'detections'):
        assert mmcv.imread(str(out_dir / f'{name}.png')).std() > 5
    for kind in ('md', 'csv', 'json'):
        assert SCRIPT in (out_dir / f'results.{kind}').read_text()


def test_ap_by_class_is_evaluated_once_per_checkpoint(runs, compare,
                                                      monkeypatch):
    calls = []

    def evaluate(cfg, checkpoint):
        calls.append(checkpoint.parent.name)
        return {'coco/bbox_mAP': 0.5, 'coco/7_precision': 0.25}

    monkeypatch.setattr(inference, 'evaluate_classes', evaluate)
    edit_metrics(runs / 'conv', **{'coco/bbox_mAP': 0.5})
    edit_metrics(runs / 'sasa', **{'coco/bbox_mAP': 0.4})
    args = (runs / 'conv', runs / 'sasa', '--per-class', '--out',
            runs / 'out', '--images', 0)
    code, out, err = compare(*args)
    assert code == 0, err
    assert row_of(out, '7') == ['7', '0.250', '0.250 (+0.000)']
    assert 'mAP is 0.400 in the log, but 0.500' in out
    assert 'mAP is 0.500' not in out
    assert calls == ['conv', 'sasa']
    assert compare(*args)[1] == out and len(calls) == 2

    shutil.copy(runs / 'conv' / 'epoch_1.pth', runs / 'sasa')
    compare(*args)
    assert calls[2:] == ['sasa']
    compare(*args, '--cfg-options', 'val_dataloader.dataset.test_mode=False')
    assert calls[3:] == ['conv', 'sasa']
    (runs / 'out' / 'evaluations.json').write_text('{')
    compare(*args)
    assert calls[5:] == ['conv', 'sasa']


def test_ap_by_class_comes_from_the_evaluator_of_mmdet(runs, trained):
    config, = (runs / 'conv').glob('*.py')
    cfg = Config.fromfile(config)
    cfg.model.test_cfg.score_thr = 0.
    cfg.work_dir = str(runs / 'conv')
    before = sorted((runs / 'conv').rglob('*'))
    metrics = inference.evaluate_classes(cfg, runs / 'conv' / 'epoch_1.pth')
    assert {f'coco/{i}_precision' for i in range(10)} < set(metrics)
    assert 0 <= metrics['coco/bbox_mAP'] <= 1
    assert sorted((runs / 'conv').rglob('*')) == before
    cfg.val_evaluator = dict(type='VOCMetric')
    with pytest.raises(ValueError, match="val_evaluator must.*'VOCMetric'"):
        inference.evaluate_classes(cfg, runs / 'conv' / 'epoch_1.pth')


@pytest.mark.parametrize('name', ['../../secret.png', '{}/secret.png',
                                  '../../data2/secret.png'])
def test_image_outside_the_data_set_is_refused(runs, trained, compare, name):
    data = runs / 'data'
    shutil.copytree(trained / 'data', data)
    for folder in (runs, runs / 'data2'):  # 'data2' begins like 'data'
        folder.mkdir(exist_ok=True)
        shutil.copy(data / 'val' / '000001.png', folder / 'secret.png')
    path = data / 'annotations' / 'val.json'
    content = json.loads(path.read_text())
    for image in content['images']:
        image['file_name'] = name.format(runs)
    path.write_text(json.dumps(content))
    code, _, err = compare(
        runs / 'conv', '--out', runs / 'out', '--cfg-options',
        f'val_dataloader.dataset.data_root={data}')
    assert code == 1 and 'file_name must be inside the data set, got' in err
    assert not (runs / 'out' / 'detections.png').exists()


def test_missing_data_leaves_out_only_the_pictures(runs, compare):
    args = (runs / 'conv', '--cfg-options',
            f'val_dataloader.dataset.data_root={runs}/nowhere', '--out',
            runs / 'out')
    code, out, err = compare(*args)
    assert code == 0 and 'Detections are not drawn: ' in err
    assert 'Detections are not drawn: ' in out
    assert 'Detections' in (runs / 'out' / 'report.html').read_text()
    code, _, err = compare(*args, '--speed')
    assert code == 1 and 'nowhere' in err


def test_evaluation_on_another_data_set_is_pointed_out(runs, compare):
    edit_config(runs / 'sasa',
                **{'val_dataloader.dataset.ann_file': 'other.json'})
    _, out, _ = compare(runs / 'conv', runs / 'sasa')
    assert 'sasa was evaluated on another data set than conv' in out


@pytest.mark.parametrize('args, message', [
    (['conv', 'conv'], 'WORK_DIR must be given once'),
    (['conv', 'deep/conv'], 'WORK_DIR must differ in the last part'),
    (['conv', '--names', 'a', 'b'], 'must be one for each WORK_DIR (1), got 2'),
    (['conv', '--names', ' '], '--names must not be empty'),
    (['conv', '--baseline', 'x'], '--baseline must be one of conv, got x'),
    (['conv', '--shape', '0'], '--shape must be one or two positive'),
    (['conv', '--images', '-1'], '--images must be positive'),
    (['conv', '--images', '0', '--speed'], '--images must be positive'),
    (['conv', '--out', 'conv/epoch_1.pth'], '--out must be a folder, got'),
    (['conv', '--out', 'conv/epoch_1.pth/x'], '--out must be a folder, got'),
    (['.'], 'work_dir must hold the config of a run'),
])
def test_wrong_arguments_end_with_a_message(runs, compare, monkeypatch, args,
                                            message):
    monkeypatch.chdir(runs)
    (runs / 'deep').mkdir()
    shutil.copytree('conv', 'deep/conv')
    code, out, err = compare(*args)
    assert code in (1, 2) and message in err and not out
    assert 'Traceback' not in err


@pytest.mark.parametrize('text, message', [
    ('x = (', 'SyntaxError'), ('model = dict()', 'train_cfg must have'),
    ("custom_imports = dict(imports=['no_such_module'])", 'no_such_module')
])
def test_config_that_cannot_be_used_is_named(runs, compare, text, message):
    config, = (runs / 'conv').glob('*.py')
    config.write_text(text)
    code, _, err = compare(runs / 'conv')
    assert code == 1 and f'{config} could not be used: ' in err
    assert message in err


@pytest.mark.parametrize('length', [0, 10, 10_000])
def test_checkpoint_that_was_cut_is_an_error(runs, compare, length):
    path = runs / 'conv' / 'epoch_1.pth'
    path.write_bytes(path.read_bytes()[:length])
    code, _, err = compare(runs / 'conv', '--out', runs / 'out', '--images', 1)
    assert code == 1 and str(path) in err
    assert not (runs / 'out' / 'report.html').exists()


def test_model_that_cannot_be_built_has_no_cost(runs, compare):
    edit_config(runs / 'sasa', **{'model.backbone.type': 'NoSuchNet'})
    code, out, err = compare(runs / 'conv', runs / 'sasa')
    assert code == 0 and 'The cost of sasa could not be counted' in err
    assert row_of(out, 'sasa')[9:14] == 5 * ['-']


@pytest.mark.slow
def test_speed_and_memory_are_measured(runs, compare):
    code, out, err = compare(runs / 'sasa', '--speed', '--images', 1,
                             '--format', 'json')
    assert code == 0, err
    model, = json.loads(out)['models']
    assert 0 < model['ms_lower_quartile'] <= model['ms_per_image']
    if sys.platform == 'linux':
        assert model['peak_bytes'] > 2**16
