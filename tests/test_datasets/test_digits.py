import hashlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO

from acmix_det.datasets import (DigitsDataset, digits, draw_digits,
                                make_digits)

TOOL = Path(__file__).parents[2] / 'tools' / 'make_digits.py'
SIZE = 80
SMALL = dict(num_train=34, num_val=33, image_size=SIZE)


def digest(root):
    """Hash of the names and contents of all files below ``root``."""
    result = hashlib.sha256()
    for path in sorted(Path(root).rglob('*')):
        result.update(str(path.relative_to(root)).encode())
        if path.is_file():
            result.update(path.read_bytes())
    return result.hexdigest()


def load(root, split):
    return json.loads((root / 'annotations' / f'{split}.json').read_text())


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp('data') / 'digits'
    assert make_digits(root, **SMALL)
    return root


def test_same_seed_gives_same_bytes_with_any_number_of_workers(root, tmp_path):
    make_digits(tmp_path / 'digits', num_workers=2, **SMALL)
    assert digest(tmp_path / 'digits') == digest(root)


def test_seed_and_split_and_index_each_change_the_background():
    images = [
        draw_digits.draw_image(*args, SIZE)[0].tobytes()
        for args in [(0, 'train', 32), (1, 'train', 32), (0, 'val', 32),
                     (0, 'train', 65)]  # all without digits
    ]
    assert len(set(images)) == 4


def test_an_image_does_not_depend_on_how_many_there_are(root, tmp_path):
    few = tmp_path / 'digits'
    make_digits(few, num_train=3, num_val=2, image_size=SIZE)
    for name in ('train/000002.png', 'val/000001.png'):
        assert (few / name).read_bytes() == (root / name).read_bytes()


def test_no_scan_and_no_sheet_is_in_both_splits(root):
    sheets = {}
    for split in draw_digits.SPLITS:
        scan_ids = [a['scan_id'] for a in load(root, split)['annotations']]
        sheets[split] = set(
            np.searchsorted(draw_digits.SHEET_STARTS, scan_ids, 'right'))
    assert sheets['train'] and sheets['val']
    assert not sheets['train'] & sheets['val']


def test_largest_digit_fits_into_the_smallest_image(monkeypatch):
    monkeypatch.setattr(draw_digits, 'DIGIT_HEIGHT', (52., 52.))
    shapes = [
        draw_digits.draw_digit(np.random.default_rng(i), np.ones((8, 8))).shape
        for i in range(200)
    ]
    assert np.max(shapes) <= draw_digits.MIN_IMAGE_SIZE


def test_splits_together_use_every_scan_once():
    train, val = map(draw_digits.split_scan_ids, draw_digits.SPLITS)
    number = len(draw_digits.load_scans()[1])
    assert sorted([*train, *val]) == list(range(number))


def test_every_sheet_repeats_the_same_label_sequence():
    labels = ''.join(map(str, draw_digits.load_scans()[1]))
    bounds = [*draw_digits.SHEET_STARTS, len(labels)]
    for start, stop in zip(bounds, bounds[1:]):
        sheet = labels[start:stop]
        assert sheet.startswith(('0123456789', '123456789'))
        assert sheet.count('7890955650989841773') == 1


@pytest.mark.parametrize('index', range(5))
def test_boxes_are_tight_around_the_painted_pixels(index):
    rng = np.random.default_rng(index)
    for digit in draw_digits.place_digits(rng, 'train', SIZE):
        canvas = np.full((SIZE, SIZE), 128.)
        draw_digits.paint_digit(rng, canvas, digit)
        rows, cols = np.nonzero(np.abs(canvas - 128) > 10)
        x, y, width, height = digit.bbox
        assert (rows.min(), rows.max()) == (y, y + height - 1)
        assert (cols.min(), cols.max()) == (x, x + width - 1)


def test_boxes_lie_inside_the_image_and_match_the_drawing(root):
    for split in draw_digits.SPLITS:
        content = load(root, split)
        boxes = {image['id']: [] for image in content['images']}
        for ann in content['annotations']:
            x, y, width, height = ann['bbox']
            assert 0 <= x < x + width <= SIZE
            assert 0 <= y < y + height <= SIZE
            boxes[ann['image_id']].append(ann['bbox'])
        for index, found in boxes.items():
            _, placed = draw_digits.draw_image(0, split, index, SIZE)
            assert found == [digit.bbox for digit in placed]


def test_boxes_overlap_only_a_little(root):
    content = load(root, 'train')
    for image in content['images']:
        boxes = [
            a['bbox'] for a in content['annotations']
            if a['image_id'] == image['id']
        ]
        for i, box in enumerate(boxes):
            for other in boxes[:i]:
                found = draw_digits.overlap(box, other)
                assert found <= draw_digits.MAX_OVERLAP


def test_overlap_is_the_covered_part_of_the_smaller_box():
    assert draw_digits.overlap([0, 0, 10, 10], [8, 5, 4, 5]) == 0.5
    assert draw_digits.overlap([0, 0, 10, 10], [10, 0, 5, 5]) == 0


@pytest.mark.parametrize('ground', [20., 128., 235.])
def test_digits_stand_out_from_the_ground_to_either_side(ground, monkeypatch):
    monkeypatch.setattr(draw_digits, 'MAX_CONTRAST', 110.)
    number_lighter = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        digit = draw_digits.place_digits(rng, 'train', SIZE)[0]
        canvas = np.full((SIZE, SIZE), ground)
        draw_digits.paint_digit(rng, canvas, digit)
        assert 0 <= canvas.min() <= canvas.max() <= 255
        change = (canvas - ground)[canvas != ground]
        assert (change > 0).all() or (change < 0).all()
        assert np.abs(change).max() >= 0.9 * draw_digits.MIN_CONTRAST
        number_lighter += bool(change[0] > 0)
    if ground == 128:
        assert 5 <= number_lighter <= 15
    else:
        assert number_lighter == (20 if ground < 128 else 0)


def test_cropped_digit_keeps_its_symmetry(monkeypatch):
    monkeypatch.setattr(draw_digits, 'MAX_ROTATION', 0.)
    alpha = draw_digits.draw_digit(
        np.random.default_rng(0), np.ones((8, 8)))
    np.testing.assert_allclose(alpha, alpha[::-1], atol=1e-9)
    np.testing.assert_allclose(alpha, alpha[:, ::-1], atol=1e-9)
    assert alpha[[0, -1]].any(1).all() and alpha[:, [0, -1]].any(0).all()


def test_digit_is_not_mirrored_or_turned_over(monkeypatch):
    monkeypatch.setattr(draw_digits, 'MAX_ROTATION', 0.)
    scan = np.zeros((8, 8))
    scan[:, 2] = scan[7, 2:6] = 1.  # an L
    alpha = draw_digits.draw_digit(np.random.default_rng(0), scan)
    ink = alpha > 0.5
    height, width = ink.shape
    assert ink[:height // 2, :width // 3].any()
    assert not ink[:height // 2, width // 2:].any()
    assert ink[height - 2, width // 2:].any()


def test_some_images_have_no_digits_and_stay_listed(root):
    content = load(root, 'val')
    with_digits = {a['image_id'] for a in content['annotations']}
    assert len(content['images']) == SMALL['num_val']
    assert len(content['images']) - len(with_digits) == 1


@pytest.mark.parametrize('split', draw_digits.SPLITS)
def test_coco_reads_the_annotations(root, split):
    coco = COCO(root / 'annotations' / f'{split}.json')
    content = load(root, split)
    assert len(coco.anns) == len(content['annotations']) > 0
    assert len(coco.imgs) == len(content['images']) == SMALL[f'num_{split}']
    names = [c['name'] for c in coco.loadCats(coco.getCatIds())]
    assert tuple(names) == DigitsDataset.METAINFO['classes']
    labels = draw_digits.load_scans()[1]
    for ann in coco.anns.values():
        assert ann['area'] == ann['bbox'][2] * ann['bbox'][3]
        assert ann['iscrowd'] == 0
        name = coco.cats[ann['category_id']]['name']
        assert name == str(labels[ann['scan_id']])


def test_dataset_gives_each_digit_its_own_value_as_label(root):
    dataset = DigitsDataset(
        data_root=str(root),
        ann_file='annotations/val.json',
        data_prefix=dict(img='val/'),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True)
        ])
    assert len(dataset) == SMALL['num_val']
    for index in (0, 1, 32):
        item = dataset[index]
        image, placed = draw_digits.draw_image(0, 'val', index, SIZE)
        assert (item['img'] == image).all()
        assert item['gt_bboxes_labels'].tolist() == [d.label for d in placed]


def test_finished_set_is_left_alone(root):
    before = {p: p.stat().st_mtime_ns for p in root.rglob('*')}
    assert make_digits(root, **SMALL) is False
    assert {p: p.stat().st_mtime_ns for p in root.rglob('*')} == before


def test_other_arguments_are_refused_without_force(root):
    before = digest(root)
    with pytest.raises(FileExistsError, match="'seed': 7.*'seed': 0.*--force"):
        make_digits(root, seed=7, **SMALL)
    assert digest(root) == before


def test_force_replaces_the_set(tmp_path):
    make_digits(tmp_path / 'a', num_train=2, num_val=1)
    make_digits(tmp_path / 'b', num_train=1, num_val=2)
    assert make_digits(tmp_path / 'a', num_train=1, num_val=2, force=True)
    assert digest(tmp_path / 'a') == digest(tmp_path / 'b')


@pytest.mark.parametrize('name', ['thesis.txt', 'meta.json'])
def test_folder_of_something_else_is_never_replaced(tmp_path, name):
    (tmp_path / name).write_text('{"seed": 1}')
    with pytest.raises(FileExistsError, match='data_root must .*meta.json'):
        make_digits(tmp_path, num_train=1, num_val=1, force=True)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def interrupt_at(monkeypatch, name):
    write = digits.mmcv.imwrite

    def imwrite(image, path):
        if path.endswith(name):
            raise KeyboardInterrupt
        return write(image, path)

    monkeypatch.setattr(digits.mmcv, 'imwrite', imwrite)


def test_interruption_leaves_nothing(tmp_path, monkeypatch):
    interrupt_at(monkeypatch, 'val/000000.png')
    with pytest.raises(KeyboardInterrupt):
        make_digits(tmp_path / 'digits', num_train=2, num_val=1)
    assert not list(tmp_path.iterdir())


def test_interrupted_replacement_keeps_the_old_set(tmp_path, monkeypatch):
    root = tmp_path / 'digits'
    make_digits(root, num_train=2, num_val=1)
    before = digest(root)
    interrupt_at(monkeypatch, 'val/000000.png')
    with pytest.raises(KeyboardInterrupt):
        make_digits(root, seed=1, num_train=2, num_val=1, force=True)
    assert digest(root) == before
    assert list(tmp_path.iterdir()) == [root]


@pytest.mark.parametrize('name, value', [
    ('seed', -1),
    ('seed', 0.5),
    ('num_train', 0),
    ('num_val', True),
    ('image_size', 79),
    ('num_workers', -2),
])
def test_bad_argument_is_named_with_its_value(tmp_path, name, value):
    with pytest.raises(ValueError, match=f'{name} must .*got {name}={value}'):
        make_digits(tmp_path / 'digits', **{name: value})
    assert not list(tmp_path.iterdir())


def test_unknown_split_is_named():
    with pytest.raises(ValueError, match="split must .*got 'test'"):
        draw_digits.split_scan_ids('test')


def test_missing_scikit_learn_is_explained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    draw_digits.load_scans.cache_clear()
    with pytest.raises(
            ImportError, match=r"scikit-learn.*'acmix_det\[digits\]'"):
        make_digits(tmp_path / 'digits')
    assert not list(tmp_path.iterdir())


def run_tool(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', [str(TOOL), *map(str, args)])
    runpy.run_path(str(TOOL), run_name='__main__')


def test_tool_makes_the_set_and_then_finds_it(root, tmp_path, monkeypatch,
                                              capsys):
    args = [
        tmp_path / 'digits', '--num-train', 34, '--num-val', 33,
        '--image-size', SIZE
    ]
    run_tool(monkeypatch, *args)
    captured = capsys.readouterr()
    assert captured.out.startswith('Wrote')
    assert 'train: 100%' in captured.err and 'val: 100%' in captured.err
    assert digest(tmp_path / 'digits') == digest(root)
    run_tool(monkeypatch, *args)
    assert capsys.readouterr().out.startswith('Found')


def test_tool_reports_a_bad_argument_without_a_traceback(
        tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match='2'):
        run_tool(monkeypatch, tmp_path / 'digits', '--image-size', 8)
    assert 'image_size=8' in capsys.readouterr().err


def test_link_to_another_disk_stays_a_link(tmp_path):
    (tmp_path / 'disk').mkdir()
    link = tmp_path / 'digits'
    link.symlink_to(tmp_path / 'disk', target_is_directory=True)
    assert make_digits(str(link), num_train=2, num_val=1)
    assert link.is_symlink() and (tmp_path / 'disk/meta.json').is_file()
    assert make_digits(str(link), num_train=3, num_val=1, force=True)
    assert link.is_symlink()


def test_remains_of_a_killed_process_are_removed(tmp_path):
    process = subprocess.Popen(['sleep', '0'])
    process.wait()
    dead = tmp_path / f'digits.partial-{process.pid}'
    alive = tmp_path / f'digits.partial-{os.getppid()}'
    for path in (dead, alive):
        path.mkdir()
    make_digits(str(tmp_path / 'digits'), num_train=1, num_val=1)
    assert not dead.exists() and alive.exists()
