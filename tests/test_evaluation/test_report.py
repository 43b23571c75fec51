import re
import sys

import mmcv
import numpy as np
import pytest

from acmix_det.evaluation import Complexity, Run
from acmix_det.evaluation.report import (Boxes, Entry, as_dict,
                                         draw_detections, plot_runs, saving,
                                         table)


def entry(name, value, params, macs, epochs=2, checkpoint=True):
    metrics = {
        e + 1: {'coco/bbox_mAP': value * (e + 1) / 2,
                'coco/bbox_mAP_50': value * (e + 1) / 2 + 0.1}
        for e in range(epochs)
    }
    run = Run('dir', 2, 'x.pth' if checkpoint else None, epochs, metrics, 90.)
    return Entry(name, run, Complexity(params, macs))


ENTRIES = [
    entry('convolution', 0.5, 2_000_000, 4_000_000_000),
    entry('SASA', 0.45, 1_000_000, 5_000_000_000),
    entry('ACmix', 0.6, 1_500_000, 3_000_000_000, epochs=1)
]


def cells(text, name):
    row = next(x for x in text.splitlines() if x.startswith(f'| {name}'))
    return [cell.strip() for cell in row.strip('|').split('|')]


def test_savings_are_positive_where_less_is_needed():
    assert saving(80, 100) == '+20 %'
    assert saving(125, 100) == '-25 %'
    assert saving(None, 100) == saving(80, None) == '-'


def test_table_shows_values_savings_and_time():
    text = table(ENTRIES)
    assert cells(text, 'convolution') == [
        'convolution', '0.500', '0.600', '2.000 M', '', '4.000 G', '8.000 G',
        '', '1.5 min'
    ]
    assert cells(text, 'SASA') == [
        'SASA', '0.450', '0.550', '1.000 M', '+50 %', '5.000 G', '10.000 G',
        '-25 %', '1.5 min'
    ]
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert re.fullmatch(r'\| -+ \|( -+: \|)+', lines[1])


def test_unfinished_run_shows_as_such_and_without_numbers():
    assert cells(table(ENTRIES), 'ACmix') == [
        'ACmix, unfinished (1 of 2 epochs)', '-', '-', '1.500 M', '+25 %',
        '3.000 G', '6.000 G', '+25 %', '-'
    ]
    row = as_dict(ENTRIES)[2]
    assert row['mAP'] is None and row['training_seconds'] is None
    assert row['status'] == 'unfinished (1 of 2 epochs)'
    assert row['mAP_by_epoch'] == {1: 0.3}


def test_plot_is_written(tmp_path):
    path = tmp_path / 'curves.png'
    plot_runs(ENTRIES, path)
    image = mmcv.imread(str(path))
    assert image.shape[1] > image.shape[0] > 100 and image.std() > 5


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


def test_missing_matplotlib_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(ImportError, match=r'matplotlib.*acmix_det\[digits\]'):
        plot_runs(ENTRIES, tmp_path / 'x.png')
