"""tools/benchmark_local_attention.py and tools/benchmark_detector.py."""
import json
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from acmix_det.evaluation import (backend_check, benchmark_peers,
                                  build_detector)
from acmix_det.evaluation.benchmark_report import number
from acmix_det.ops import cpu_backend, torch_backend

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / 'configs' / 'digits'
CONV = str(DIGITS / 'retinanet_r18_fpn_digits.py')
ACMIX = str(DIGITS / 'retinanet_r18-acmix_fpn-acmix_digits.py')
TINY = ('--shape', '8', '6', '7', '--num-heads', '2', '--repeats', '2',
        '--no-peers')


@pytest.fixture
def run(monkeypatch, capsys):

    def run(tool, *args):
        monkeypatch.setattr(sys, 'argv', [tool, *map(str, args)])
        code = 0
        try:
            runpy.run_path(str(ROOT / 'tools' / tool), run_name='__main__')
        except SystemExit as error:
            code = error.code
        return code, capsys.readouterr()

    return run


def operation(run, *args):
    return run('benchmark_local_attention.py', *args)


def detector(run, *args):
    return run('benchmark_detector.py', *args)


def table_cells(text):
    """Rows of the last Markdown table, without its rule."""
    rows = [[x.strip() for x in line.strip('|').split('|')]
            for line in text.splitlines() if line.startswith('|')]
    start = max(i for i, row in enumerate(rows) if row[0].startswith('---'))
    return rows[start - 1], rows[start + 1:]


def assert_table_shows(found, text):
    """Every number of the table is in the JSON, and the other way round."""
    titles, rows = table_cells(text)
    assert titles[0] == found['title']
    assert [row[0] for row in rows] == [x['name'] for x in found['rows']]
    for row, want in zip(rows, found['rows']):
        cells = iter(row[1:])
        for x in want['passes'].values():
            assert next(cells) == number(x['median_ms'])
            assert next(cells) == (f'{number(x["lower_quartile_ms"])} to '
                                   f'{number(x["upper_quartile_ms"])}')
            assert next(cells) == str(x['repeats'])
            assert next(cells) == number(x['time_ratio'])
            if 'peak_mib' in x:
                assert next(cells) == number(x['peak_mib'])
                assert next(cells) == number(x['peak_ratio'])
                assert next(cells) == number(x['extra_mib'])
        assert next(cells, None) is None


def test_operation_puts_every_backend_beside_the_convolution(run, tmp_path):
    path = tmp_path / 'op.json'
    code, out = operation(run, *TINY, '--shape', '4', '1', '3', '--json', path)
    assert code == 0
    saved = json.loads(path.read_text())
    assert [t['title'] for t in saved['tables']] == [
        '(1, 8, 6, 7) float32', '(1, 4, 1, 3) float32'
    ]
    backends = ['reference', 'torch']
    if cpu_backend.can_use(torch.empty(0)) is None:
        backends.append('cpu')
    for found in saved['tables']:
        names = [row['name'] for row in found['rows']]
        assert names == ['nn.Conv2d 3x3', *backends]
        for row in found['rows']:
            assert list(row['passes']) == ['forward', 'forward + backward']
            for x in row['passes'].values():
                assert x['repeats'] == 2 and x['median_ms'] > 0
        notes = '\n'.join(found['notes'])
        assert re.search('^triton: cannot run, it needs ', notes, re.M)
        assert notes in out.out.replace('\n- ', '\n')
    assert_table_shows(saved['tables'][-1], out.out)
    assert saved['environment']['torch'] == torch.__version__
    assert f'torch {torch.__version__}' in out.out
    assert saved['arguments']['repeats'] == 2


def test_layers_stand_beside_the_convolution(run):
    _, out = operation(run, *TINY, '--layer', '--backends', 'auto', 'torch',
                       '--backward', 'only', '--position', 'none')
    titles, rows = table_cells(out.out)
    assert [row[0] for row in rows] == ['nn.Conv2d 3x3', 'SASA', 'ACmix',
                                        'SASA torch', 'ACmix torch']
    assert titles[1] == 'forward + backward (ms)'
    assert 'forward (ms)' not in titles
    assert all('-' not in row[1:] for row in rows)


@pytest.fixture
def few_checks(monkeypatch):
    monkeypatch.setattr(backend_check, 'CASES', backend_check.CASES[:1])


def test_check_comes_before_the_table(run, few_checks):
    code, out = operation(run, *TINY, '--check', '--backends', 'torch')
    assert code == 0
    assert re.search(r'\| torch +\| +float32 .* right ', out.out)
    assert out.out.index(' right ') < out.out.index('forward (ms)')


def test_wrong_backend_is_not_timed(run, few_checks, monkeypatch):
    original = torch_backend.local_attention
    monkeypatch.setattr(torch_backend, 'local_attention',
                        lambda *args: original(*args) + 1e-3)
    code, out = operation(run, *TINY, '--check')
    assert code == 'A backend is wrong; nothing was timed.'
    assert re.search(r'\| torch +\| +float32 .* WRONG ', out.out)
    assert 'forward (ms)' not in out.out


FAKE_NATTEN = '''
def na2d(query, key, value, kernel_size, scale):
    assert query.shape == (1, 6, 7, 2, 4)
    if kernel_size == 5:
        raise RuntimeError('no such kernel\\nand more')
    return query * scale
'''


def without_flex(monkeypatch):
    monkeypatch.delitem(benchmark_peers.PEERS, 'FlexAttention')


def test_peer_that_is_not_installed_is_one_line(run, monkeypatch):
    without_flex(monkeypatch)
    monkeypatch.setattr(benchmark_peers.importlib.util, 'find_spec',
                        lambda name: None)
    code, out = operation(run, *TINY[:-1], '--backends', 'torch')
    assert code == 0 and '\n- NATTEN: not installed\n' in out.out


@pytest.mark.parametrize('kernel', [3, 5], ids=['able', 'unable'])
def test_peer_is_a_row_or_a_reason(kernel, run, monkeypatch, tmp_path):
    without_flex(monkeypatch)
    for name in ('natten', 'natten.functional'):
        monkeypatch.delitem(sys.modules, name, raising=False)
    package = tmp_path / 'natten'
    package.mkdir()
    (package / '__init__.py').touch()
    (package / 'functional.py').write_text(FAKE_NATTEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out = operation(run, *TINY[:-1], '--backends', 'torch', '--backward',
                          'no', '--attn-kernel-size', kernel)
    for name in ('natten', 'natten.functional'):
        sys.modules.pop(name, None)
    assert code == 0
    rows = table_cells(out.out)[1]
    assert ('NATTEN' in [row[0] for row in rows]) == (kernel == 3)
    failed = ('\n- NATTEN, forward: cannot run here, RuntimeError: no such '
              'kernel\n')
    assert (failed in out.out) == (kernel == 5)
    assert ('\n- NATTEN: without relative' in out.out) == (kernel == 3)


@pytest.mark.skipif(sys.platform != 'linux', reason='needs /proc')
def test_memory_is_in_table_and_json(run, tmp_path):
    path = tmp_path / 'op.json'
    code, out = operation(
        run, '--shape', '16', '90', '91', '--repeats', '1', '--backends',
        'reference', '--no-peers', '--backward', 'no', '--memory', '--json',
        path)
    assert code == 0
    table = json.loads(path.read_text())['tables'][0]
    assert_table_shows(table, out.out)
    # the reference unfolds keys and values, 49 times each
    forward = table['rows'][1]['passes']['forward']
    unfolded = 49 * 16 * 90 * 91 * 4 / 2**20
    assert unfolded < forward['extra_mib'] < 6 * unfolded
    assert forward['peak_mib'] > forward['extra_mib']


@pytest.mark.parametrize('args, message', [
    (('--shape', '30', '6', '7'), '--num-heads 8 divides, got 30'),
    (('--shape', '8', '0', '7'), '--shape must be positive, got (8, 0, 7)'),
    (('--shape', '8', '6'), '--shape: expected 3 arguments'),
    (('--num-heads', '0'), '--num-heads must be positive, got 0'),
    (('--attn-kernel-size', '4'), 'must be positive and odd, got 4'),
    (('--backends', 'fast'), "invalid choice: 'fast'"),
    (('--dtype', 'int8'), "invalid choice: 'int8'"),
    (('--repeats', '0'), '--repeats must be positive, got 0'),
    (('--batch-size', '-1'), '--batch-size must be positive, got -1'),
    (('--threads', '0'), '--threads must be positive, got 0'),
    (('--seconds', 'nan'), '--seconds must be positive, got nan'),
    (('--json', 'no/such/a.json'), 'exists, got no/such/a.json'),
])
def test_bad_arguments_of_the_operation_are_named(args, message, run):
    code, out = operation(run, *args)
    assert code == 2 and message in out.err


@pytest.mark.parametrize('tool', ['benchmark_local_attention.py',
                                  'benchmark_detector.py'])
def test_missing_cuda_is_a_message(tool, run, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    code, out = run(tool, '--device', 'cuda')
    assert code == 2 and '--device must be cpu' in out.err


def test_detectors_stand_beside_the_first_config(run, tmp_path):
    path = tmp_path / 'detectors.json'
    code, out = detector(run, CONV, ACMIX, '--shape', '64', '96', '--repeats',
                         '2', '--json', path)
    assert code == 0
    saved = json.loads(path.read_text())
    found = saved['tables'][0]
    assert found['title'] == 'detector, 1 x 3 x 64 x 96'
    assert [row['name'] for row in found['rows']] == [
        Path(CONV).stem, Path(ACMIX).stem
    ]
    for row in found['rows']:
        assert list(row['passes']) == ['inference', 'training step']
    assert_table_shows(found, out.out)
    assert 'ratio: to retinanet_r18_fpn_digits.' in out.out


@pytest.mark.skipif(sys.platform != 'linux', reason='needs /proc')
def test_backbone_alone_and_its_memory(run, tmp_path):
    path = tmp_path / 'backbone.json'
    code, out = detector(run, CONV, '--part', 'backbone', '--shape', '128',
                         '--training', 'only', '--memory', '--repeats', '1',
                         '--json', path)
    assert code == 0
    found = json.loads(path.read_text())['tables'][0]
    assert found['title'] == 'backbone, 1 x 3 x 128 x 128'
    assert_table_shows(found, out.out)
    step = found['rows'][0]['passes']['training step']
    # at least the gradients of the backbone's 0.7 M parameters
    assert step['peak_mib'] - step['extra_mib'] > 2.5
    assert step['extra_mib'] > 0


@pytest.fixture
def tool():
    path = ROOT / 'tools' / 'benchmark_detector.py'
    return runpy.run_path(str(path), run_name='tool')


def test_default_detectors_differ_in_their_layers_alone(tool, monkeypatch):

    def refuse(*args):
        raise AssertionError('the network was touched')

    monkeypatch.setattr(socket.socket, 'connect', refuse)
    configs = tool['default_configs']()
    types = [(c.model.backbone.type, c.model.neck.type, c.model.bbox_head.type)
             for c in configs.values()]
    assert types == [
        ('ResNet', 'FPN', 'RetinaHead'),
        ('SASAResNet', 'FPN', 'RetinaHead'),
        ('SASAResNet', 'SASAFPN', 'SASARetinaHead'),
        ('SASAResNet', 'SASAFPN', 'SASARetinaHead'),
        ('ACmixResNet', 'FPN', 'RetinaHead'),
        ('ACmixResNet', 'ACmixFPN', 'RetinaHead'),
    ]
    norms = []
    for cfg in configs.values():
        model = build_detector(cfg).train()
        assert all(p.requires_grad for p in model.parameters())
        found = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        assert all(m.training for m in found)
        norms.append([m.num_features for m in found])
    assert norms == [norms[0]] * 6 and len(norms[0]) == 53


def test_training_step_returns_every_gradient_and_leaves_none(tool):
    from mmengine.config import Config
    cfg = Config.fromfile(ACMIX)
    step = tool['make_run'](cfg, True, 'detector', (64, 64), 2, 'cpu')
    first = [g.clone() for g in step()]
    second = step()
    params = list(build_detector(cfg).parameters())
    assert [g.shape for g in first] == [p.shape for p in params]
    for a, b in zip(first, second):  # not added to the first
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    infer = tool['make_run'](cfg, False, 'detector', (64, 64), 2, 'cpu')
    scores = infer()[0]
    assert scores.shape[0] == 2 and not scores.requires_grad


@pytest.mark.parametrize('args, message', [
    (('no.py', ), 'configs must be files, got no.py'),
    ((CONV, CONV), 'configs must differ, got '),
    (('--shape', '1', '2', '3'), 'one or two positive numbers, got [1, 2, 3]'),
    (('--shape', '0'), 'one or two positive numbers, got [0]'),
    (('--part', 'head'), "invalid choice: 'head'"),
    (('--seconds', '0'), '--seconds must be positive, got 0'),
])
def test_bad_arguments_of_the_detector_are_named(args, message, run):
    code, out = detector(run, *args)
    assert code == 2 and message in out.err


def test_config_without_a_detector_is_named(run, tmp_path):
    path = tmp_path / 'empty.py'
    path.write_text('lr = 1\n')
    code, out = detector(run, path)
    assert code == 2
    assert f'configs must hold a detector with a backbone, got {path}' in (
        out.err)
