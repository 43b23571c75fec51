import csv
import io
import re
import sys
from html.parser import HTMLParser

import mmcv
import numpy as np
import pytest
from mmengine.config import Config

from acmix_det.evaluation import Complexity, Run, Schedule
from acmix_det.evaluation.benchmark import Timing
from acmix_det.evaluation.html_report import Picture, render
from acmix_det.evaluation.plots import (Boxes, class_differences,
                                        draw_detections, plot_classes,
                                        plot_cost, plot_curves, plot_runs)
from acmix_det.evaluation.report import (Entry, as_csv, as_dict, cells,
                                         class_cells, config_diff, saving,
                                         table)


def make_run(value, epochs=2, seconds=90.):
    metrics = {
        e + 1: {'coco/bbox_mAP': value * (e + 1) / 2,
                'coco/bbox_mAP_50': value * (e + 1) / 2 + 0.1,
                'coco/bbox_mAP_l': -1.}
        for e in range(epochs)
    }
    return Run('dir', Schedule(2), None, epochs, metrics, seconds)


def entry(name, value, params, macs, epochs=2, **kwargs):
    return Entry(name, [make_run(value, epochs)], Complexity(params, macs),
                 **kwargs)


ENTRIES = [
    entry('convolution', 0.5, 2_000_000, 4_000_000_000),
    entry('SASA', 0.45, 1_000_000, 5_000_000_000),
    entry('ACmix', 0.6, 1_500_000, 3_000_000_000, epochs=1)
]
SEEDS = Entry('seeds', [make_run(0.4), make_run(0.5), make_run(0.9, 1)],
              Complexity(1_000_000, 1_000_000_000))


def row_of(text, name):
    row = next(x for x in text.splitlines() if x.startswith(f'| {name}'))
    return [cell.strip() for cell in row.strip('|').split('|')]


def test_savings_are_positive_where_less_is_needed():
    assert saving(80, 100) == '+20 %'
    assert saving(125, 100) == '-25 %'
    assert saving(None, 100) == saving(80, None) == '-'


def test_table_shows_values_savings_and_time():
    text = table(ENTRIES)
    assert row_of(text, 'model') == [
        'model', 'mAP', 'AP50', 'AP75', 'APs', 'APm', 'APl', 'epoch',
        'best mAP', 'parameters', 'saved', 'MACs', 'FLOPs', 'saved',
        'training'
    ]
    assert row_of(text, 'convolution') == [
        'convolution', '0.500', '0.600', '-', '-', '-', '-', '2',
        '0.500 (2)', '2.000 M', '', '4.000 G', '8.000 G', '', '1.5 min'
    ]
    assert row_of(text, 'SASA')[9:] == [
        '1.000 M', '+50 %', '5.000 G', '10.000 G', '-25 %', '1.5 min'
    ]
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert re.fullmatch(r'\| -+ \|( -+: \|)+', lines[1])


def test_unfinished_run_shows_as_such_and_without_final_numbers():
    assert row_of(table(ENTRIES), 'ACmix') == [
        'ACmix, unfinished (1 of 2 epochs)', *6 * ['-'], '1 of 2',
        '0.300 (1)', '1.500 M', '+25 %', '3.000 G', '6.000 G', '+25 %', '-'
    ]
    row = as_dict(ENTRIES)[2]
    assert row['mAP'] is None and row['training_seconds'] is None
    assert row['status'] == 'unfinished (1 of 2 epochs)'
    assert row['runs'][0]['mAP_by_epoch'] == {1: 0.3}


def test_run_that_never_started_has_no_zeros(tmp_path):
    run = Run(tmp_path, Schedule(2), None, 0, {}, 0.)
    text = table([ENTRIES[0], Entry('new', [run], None)])
    assert row_of(text, 'new') == ['new, not started', *14 * ['-']]


def test_several_runs_show_mean_and_deviation_of_the_finished_ones():
    row = row_of(table([ENTRIES[0], SEEDS]), 'seeds')
    assert row[0] == 'seeds (n=2 of 3), unfinished (1 of 2 epochs)'
    assert row[1] == '0.450 ± 0.071' and row[7] == '2, 1 of 2'
    found = as_dict([SEEDS])[0]
    assert found['mAP'] == pytest.approx(0.45)
    assert found['mAP_std'] == pytest.approx(0.05 * 2**0.5)
    assert [run['mAP'] for run in found['runs']] == [0.4, 0.5, None]
    assert SEEDS._replace(runs=SEEDS.runs[:2]).label == 'seeds (n=2)'


def test_speed_and_memory_have_columns_when_measured():
    timed = ENTRIES[1]._replace(
        speed=Timing(12.34, 12., 13., 9), memory=3 * 2**20)
    header, rows = cells([ENTRIES[0], timed])
    assert header[-2:] == ['ms per image', 'memory']
    assert [row[-2:] for row in rows] == [['-', '-'], ['12.3', '3.0 MiB']]
    assert as_dict([timed])[0]['ms_upper_quartile'] == 13.


def test_name_with_a_bar_or_a_line_break_stays_one_cell():
    text = table([ENTRIES[0]._replace(name='a|b\nc')])
    assert text.splitlines()[2].startswith(r'| a\|b c |')


def test_csv_holds_plain_numbers_and_empty_cells():
    classed = ENTRIES[0]._replace(classes={'cat, old': 0.25, 'dog': None})
    rows = list(csv.DictReader(io.StringIO(as_csv([classed, ENTRIES[2]]))))
    assert rows[0]['mAP'] == '0.5' and rows[0]['AP cat, old'] == '0.25'
    assert rows[0]['AP dog'] == rows[1]['mAP'] == ''
    assert rows[1]['flops_saved_percent'] == '25.0'


def classed():
    return [
        ENTRIES[0]._replace(classes={'cat': 0.5, 'dog': 0.2, 'eel': None}),
        ENTRIES[1]._replace(classes={'cat': 0.4, 'dog': None, 'eel': 0.1})
    ]


def test_class_table_shows_differences_to_the_first_entry():
    header, rows = class_cells(classed())
    assert header == ['class', 'convolution', 'SASA']
    assert rows == [['cat', '0.500', '0.400 (-0.100)'], ['dog', '0.200', '-'],
                    ['eel', '-', '0.100']]
    differences = class_differences(classed())
    assert differences == {'cat': [pytest.approx(-0.1)]}


def test_config_diff_lists_what_differs_and_nothing_else():
    base = Config(dict(
        model=dict(backbone=dict(type='ResNet', depth=18), neck=dict(a=1)),
        param_scheduler=[dict(end=200), dict(end=6)], work_dir='x'))
    other = Config(dict(
        model=dict(backbone=dict(type='SASAResNet', depth=18, k=(1, 2)),
                   neck=dict(a=1)),
        param_scheduler=[dict(end=200), dict(end=9)], work_dir='y'))
    assert config_diff(other, base) == [
        ('model.backbone.type', "'ResNet'", "'SASAResNet'"),
        ('param_scheduler.1.end', '6', '9'),
        ('model.backbone.k', '-', '[1, 2]')
    ]
    assert config_diff(base, base) == []


def ink(path):
    return int((mmcv.imread(str(path)) < 250).any(2).sum())


def test_plots_are_written(tmp_path):
    path = tmp_path / 'plot.png'
    plot_runs(ENTRIES, path)
    image = mmcv.imread(str(path))
    assert image.shape[1] > image.shape[0] > 100 and image.std() > 5
    for plot in (plot_curves, lambda e, p: plot_cost(e, p, 'flops')):
        plot(ENTRIES[:1], path)
        fewer = ink(path)
        plot([*ENTRIES, SEEDS], path)
        assert ink(path) > fewer


def test_class_plot_has_bars_to_both_sides(tmp_path):
    path = tmp_path / 'plot.png'
    assert not plot_classes(ENTRIES, path) and not path.exists()
    many = {str(i): 0.5 for i in range(60)}
    better = {name: 0.5 + i / 200 for i, name in enumerate(many)}
    entries = [ENTRIES[0]._replace(classes=many)]
    assert plot_classes(
        [*entries, ENTRIES[1]._replace(classes=better)], path)
    up = mmcv.imread(str(path))
    worse = {name: 0.5 - i / 200 for i, name in enumerate(many)}
    plot_classes([*entries, ENTRIES[1]._replace(classes=worse)], path)
    down = mmcv.imread(str(path))
    orange = [
        np.argwhere((np.abs(x.astype(int) - (14, 127, 255)) < 8).all(2))[:, 1]
        for x in (up, down)
    ]
    assert orange[0].mean() < up.shape[1] * 0.5 < orange[1].mean()


@pytest.mark.parametrize('name', ['_hidden', '$x', '$x_$', r'\frac'])
def test_any_name_can_be_plotted(tmp_path, name):
    path = tmp_path / 'plot.png'
    entries = [x._replace(name=name, classes={name: 0.1 * (i + 1)})
               for i, x in enumerate(ENTRIES)]
    with_name = []
    for shown in (entries, [x._replace(name='') for x in entries]):
        plot_curves(shown, path)
        with_name.append(ink(path))
    assert with_name[0] > with_name[1]
    assert plot_classes(entries, path)


def test_plots_of_runs_that_never_started_say_so(tmp_path):
    path = tmp_path / 'plot.png'
    run = Run(tmp_path, Schedule(2), None, 0, {}, 0.)
    plot_runs([Entry('new', [run], None)], path)
    assert ink(path) > 0


def test_boxes_are_drawn_where_they_are(tmp_path):
    images = [np.zeros((40, 40, 3), np.uint8)] * 2
    none = Boxes(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0))
    one = Boxes(np.array([[10, 20, 30, 36]]), np.array([1]), np.array([.7]))
    pictures = []
    for name, boxes in (('a', none), ('b', one)):
        path = tmp_path / f'{name}.png'
        draw_detections(images, {'x': [none, boxes], 'y': [none, none]},
                        ['zero', 'one'], path)
        pictures.append(mmcv.imread(str(path)).astype(int))
    changed = np.argwhere(np.abs(pictures[0] - pictures[1]).sum(2))
    height, width = pictures[0].shape[:2]
    top, left = changed.min(0)
    bottom, right = changed.max(0)
    # second image of the first column, and not all of it
    assert top > height / 2 and right < width / 2
    assert (bottom - top) < 0.4 * height and (right - left) < 0.4 * width


@pytest.mark.parametrize('module, call', [
    ('matplotlib', lambda path: plot_runs(ENTRIES, path)),
    ('jinja2', lambda path: render('', cells(ENTRIES), [], ([], []), []))
])
def test_missing_package_is_named(monkeypatch, tmp_path, module, call):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'(?i){module}.*acmix_det\[digits'):
        call(tmp_path / 'x.png')


class Page(HTMLParser):
    """Tags, attributes and text of a page; checks that tags match."""
    VOID = ('meta', 'img')

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], '', []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *x) for x in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != 'style':
            self.text += data


def test_report_escapes_every_text_and_needs_no_other_file(tmp_path):
    evil = '"><script>alert(1)</script>'
    picture = tmp_path / 'x.png'
    plot_curves(ENTRIES[:1], picture)
    shown = [Picture(picture, evil)]
    grid = ([evil], [[evil]])
    text = render(evil, grid, [evil], grid, [(evil, evil)], shown, grid,
                  shown[0], shown[0], 900, [(evil, [(evil, evil, evil)], 3)])
    page = Page(text)
    assert 'script' not in page.tags and 'b' not in page.tags
    assert page.tags.count('img') == 3
    assert page.text.count(evil) >= 15
    links = [x for x in page.attributes if x[1] in ('src', 'href', 'srcset')]
    assert {tag for tag, _, _ in links} == {'img'}
    assert all(x[2].startswith('data:image/png;base64,') for x in links)
    assert 'http' not in re.sub('http-equiv|base64,[^"]*', '', text)
    assert ('meta', 'name', 'viewport') in page.attributes
