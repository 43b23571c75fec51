"""tools/get_complexity.py, and the published figures."""
import csv
import io
import json
import runpy
import sys
from pathlib import Path

import pytest

from acmix_det.evaluation import papers

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / 'configs' / 'digits'
CONV = str(DIGITS / 'retinanet_r18_fpn_digits.py')
SASA = str(DIGITS / 'retinanet_r18-sasa_fpn-sasa_digits.py')


def run(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, 'argv', ['get_complexity.py', *args])
    code = 0
    try:
        runpy.run_path(str(ROOT / 'tools' / 'get_complexity.py'),
                       run_name='__main__')
    except SystemExit as error:
        code = error.code
    return code, capsys.readouterr()


@pytest.fixture(scope='module')
def tables():
    return dict(papers.all_cells())


@pytest.mark.slow
def test_every_published_figure_with_a_definition_is_reproduced(tables):
    cells = [cell for table in tables.values() for cell in table]
    assert [c for c in cells if not c.fits] == []
    assert len(cells) == 59
    exact = [c for c in cells if c.quantity == 'params']
    assert [c.computed for c in exact] == [
        18_012_200, 18_038_632, 10_487_816, 14_410_896, 18_333_976
    ]
    # only the attention stem's FLOPs and the attention head are excused
    excused = {c.model for c in cells if c.note}
    assert all('stem' in model for model in excused), excused
    by_name = {(c.model, c.quantity): c.computed for c in cells}
    assert by_name['RetinaNet: conv', 'FLOPs (G)'] == pytest.approx(182.3,
                                                                    abs=.05)
    assert by_name['RetinaNet: attention everywhere, conv stem',
                   'params (M)'] == pytest.approx(20.0, abs=.05)


@pytest.mark.parametrize('quantity, published, computed, note, fits', [
    ('params', 100, 101, '', False), ('params', 100, 100, '', True),
    ('params (M)', 7.2, 7.31, '', False), ('params (M)', 7.2, 7.3, '', True),
    ('FLOPs (G)', 173, 171.9, '', False), ('FLOPs (G)', 173, 172.1, '', True),
    ('FLOPs (G)', 7.2, 9.0, 'explained', True)
])
def test_one_unit_of_the_last_published_place_is_tolerated(
        quantity, published, computed, note, fits):
    assert papers.Cell('x', quantity, published, computed,
                       note).fits is fits


@pytest.mark.parametrize('difference, code', [(0.0, 0), (0.5, 1)])
def test_papers_exits_non_zero_on_a_difference(difference, code, monkeypatch,
                                               capsys):
    cell = papers.Cell('model', 'params (M)', 7.0, 7.0 + difference)
    noted = papers.Cell('other', 'FLOPs (G)', 7.0, 9.0, 'the reason')
    monkeypatch.setattr(papers, 'all_cells',
                        lambda: [('Table', [cell, noted])])
    result, out = run(monkeypatch, capsys, '--papers')
    assert result == code
    assert ('NOT REPRODUCED' in out.out) == bool(code)
    assert '[1] the reason' in out.out


def test_components_add_up_to_the_total(monkeypatch, capsys):
    code, out = run(monkeypatch, capsys, CONV, SASA, '--shape', '128',
                    '--format', 'json')
    assert code == 0
    rows = json.loads(out.out)
    for name in ('retinanet_r18_fpn_digits',
                 'retinanet_r18-sasa_fpn-sasa_digits'):
        mine = {r['component']: r for r in rows if r['config'] == name}
        assert list(mine) == ['stem', 'layer1', 'layer2', 'layer3', 'layer4',
                              'neck', 'bbox_head', 'total']
        total = mine.pop('total')
        for key in ('params (M)', 'MACs (G)', 'FLOPs (G)'):
            assert sum(r[key] for r in mine.values()) == pytest.approx(
                total[key], abs=0.004)
        assert total['FLOPs (G)'] == pytest.approx(2 * total['MACs (G)'],
                                                   abs=0.001)
    saved = rows[-1]['params saved']
    assert saved == f'{100 * (1 - 500_986 / 999_994):.1f} %'


def test_size_is_one_number_or_two(monkeypatch, capsys):
    totals = []
    for shape in (('64', ), ('64', '64'), ('64', '128')):
        _, out = run(monkeypatch, capsys, CONV, '--total', '--shape', *shape)
        assert f'One image of 64 x {shape[-1]}' in out.out
        totals.append(out.out.splitlines()[2])
    assert totals[0] == totals[1] != totals[2]


def test_convention_of_the_paper_counts_every_offset(monkeypatch, capsys):
    macs = []
    for convention in ('executed', 'paper'):
        _, out = run(monkeypatch, capsys, SASA, '--total', '--shape', '512',
                     '--format', 'csv', '--convention', convention)
        row = list(csv.DictReader(io.StringIO(out.out)))[0]
        macs.append(float(row['MACs (G)']))
    assert macs[1] > macs[0]


@pytest.mark.parametrize('args, message', [
    ((), 'configs must name at least one file'),
    (('no.py', ), 'configs must be files, got no.py'),
    ((CONV, '--shape', '0'), r'--shape must be one or two positive numbers'),
    ((CONV, '--shape', '1', '2', '3'), r'got [1, 2, 3]'),
    ((CONV, '--convention', 'mine'), "invalid choice: 'mine'"),
])
def test_bad_arguments_are_named(args, message, monkeypatch, capsys):
    code, out = run(monkeypatch, capsys, *args)
    assert code == 2 and message in out.err
