import json

import cv2
import mmcv
import pytest
from mmengine.config import Config
from PIL import Image

from acmix_det.datasets.check_coco import check_coco
from acmix_det.datasets.data_config import check_classes, coco_splits


@pytest.fixture
def content(tmp_path):
    """A sound set of three images; the last one has no annotation."""
    folder = tmp_path / 'images'
    folder.mkdir()
    images = []
    for i in range(3):
        Image.new('RGB', (40, 30)).save(folder / f'{i}.png')
        images.append(dict(id=i, file_name=f'{i}.png', width=40, height=30))
    annotations = [
        dict(id=10 + i, image_id=i // 2, category_id=1 + i % 2,
             bbox=[5, 6, 10, 12.5], area=125, iscrowd=0) for i in range(4)
    ]
    categories = [dict(id=1, name='cat'), dict(id=2, name='dog')]
    return dict(images=images, annotations=annotations, categories=categories)


@pytest.fixture
def check(tmp_path, content):
    def run(classes=None, images=True, decode=False):
        """(level, kind) to (count, examples), without the usual info."""
        path = tmp_path / 'set.json'
        path.write_text(json.dumps(content))
        report = check_coco(str(path), tmp_path / 'images' if images else None,
                            classes, decode=decode)
        found = {(f.level, f.kind): (f.count, f.examples)
                 for f in report.findings}
        usual = found.pop(('info', 'image without annotations'))
        assert usual[1][-1] == 'image 2: 2.png'
        errors = sum(n for (level, _), (n, _) in found.items()
                     if level == 'error')
        assert report.num_errors == errors
        return found
    return run


def test_sound_set_has_no_finding(check):
    assert check(['cat', 'dog']) == {}


def box(*values, level='error'):
    return [('annotations', 1, 'bbox', list(values))], level


NAN, INF = float('nan'), float('inf')
CASES = {
    'duplicate image id': ([('images', 1, 'id', 0)], 'error', '0, 2 times'),
    'duplicate annotation id': ([('annotations', 1, 'id', 10)], 'error',
                                '10, 2 times'),
    'duplicate category name': ([('categories', 1, 'name', 'cat')], 'error',
                                "'cat', 2 times"),
    'duplicate file_name': ([('images', 1, 'file_name', '0.png')], 'warning',
                            "'0.png', 2 times"),
    'annotation of an unknown image': ([('annotations', 1, 'image_id', 9)],
                                       'error', 'annotation 11: image_id 9'),
    'annotation of an unknown category': (
        [('annotations', 1, 'category_id', '1')], 'error',
        "annotation 11: category_id '1'"),
    'box that is not four numbers': (*box(1, 2, 3), 'bbox [1, 2, 3]'),
    'box that is not finite': (*box(1, NAN, 3, 4), 'bbox [1, nan, 3, 4]'),
    'box of negative width or height': (*box(9, 9, -4, 4), '[9, 9, -4, 4]'),
    'empty box': (*box(9, 9, 4, 0), 'annotation 11: bbox [9, 9, 4, 0]'),
    'box outside its image': (*box(2, 30, 5, 5), 'bbox [2, 30, 5, 5]'),
    'box below one pixel, which mmdet leaves out': (
        *box(1, 2, 0.5, 4, level='warning'), '[1, 2, 0.5, 4]'),
    'box that reaches over the border of its image': (
        *box(30, 2, 13, 4, level='warning'), '[30, 2, 13, 4]'),
    'area that is not positive': ([('annotations', 1, 'area', 0)], 'error',
                                  'annotation 11: area 0'),
    'crowd box': ([('annotations', 1, 'iscrowd', 1)], 'info',
                  'annotation 11'),
    'image without a positive width and height': (
        [('images', 1, 'height', None)], 'error', 'image 1: 40 x None'),
    'image of another size than in the file': (
        [('images', 1, 'width', 41)], 'error',
        '1.png: 41 x 30 in the annotations, 40 x 30 when loaded'),
    'missing image file': ([('images', 1, 'file_name', 'no.png')], 'error',
                           'images/no.png'),
    'image path that leaves the image folder': (
        [('images', 1, 'file_name', 'a/../../1.png')], 'error',
        'image 1: a/../../1.png'),
    'malformed entry': ([('annotations', 1, 'image_id', [1])], 'error',
                        'annotations[1]: image_id is [1]'),
}


@pytest.mark.parametrize('kind', CASES)
def test_one_bad_entry_is_the_one_finding(kind, content, check):
    changes, level, example = CASES[kind]
    for key, i, name, value in changes:
        content[key][i][name] = value
    found = check()
    found.pop(('info', 'crowd box'), None) if kind != 'crowd box' else None
    if kind == 'duplicate image id':
        # the annotations of the lost id
        assert found.pop(('error', 'annotation of an unknown image'))[0] == 2
    assert list(found) == [(level, kind)]
    count, examples = found[level, kind]
    assert count == 1 and examples[0].endswith(example), examples


@pytest.mark.parametrize('values', [(40, 2, 5, 5), (-5, 2, 5, 5),
                                    (2, -9, 5, 9)],
                         ids=['right', 'left', 'above'])
def test_box_that_touches_the_border_from_outside_is_outside(
        values, content, check):
    content['annotations'][0]['bbox'] = list(values)
    assert list(check()) == [('error', 'box outside its image')]


def test_rounded_box_at_the_border_is_no_finding(content, check):
    content['annotations'][0]['bbox'] = [-0.6, 0, 41.2, 30.5]
    assert check() == {}


@pytest.mark.parametrize('area', [None, NAN, INF, 'x', -2])
def test_area_must_be_a_positive_number(area, content, check):
    content['annotations'][0]['area'] = area
    assert list(check()) == [('error', 'area that is not positive')]


@pytest.mark.parametrize('key, value, problem', [
    ('images', 7, 'images[3]: a int, not an object'),
    ('images', dict(id=5), 'images[3]: no file_name'),
    ('images', dict(id=5, file_name=''), "images[3]: file_name is ''"),
    ('categories', dict(id=True, name='x'), 'categories[2]: id is True'),
    ('annotations', dict(id=1, image_id=0, category_id=1),
     'annotations[4]: no bbox')])
def test_malformed_entry_is_named_and_left_out(key, value, problem, content,
                                               check):
    content[key].append(value)
    assert check() == {('error', 'malformed entry'): (1, [problem])}


def test_many_cases_are_counted_and_the_first_shown(content, check):
    for ann in content['annotations']:
        ann['bbox'] = [0, 0, 0, 0]
    count, examples = check()['error', 'empty box']
    assert count == 4 and [e.split(':')[0] for e in examples] == [
        'annotation 10', 'annotation 11', 'annotation 12'
    ]


def test_images_are_left_alone_without_a_folder(content, check):
    content['images'][0]['file_name'] = '/no.png'
    content['images'][1].update(width=60)
    assert check(images=False) == {}
    kinds = [kind for _, kind in check()]
    assert kinds == ['image path that leaves the image folder',
                     'image of another size than in the file']


def test_unreadable_image_is_not_missing(tmp_path, check):
    (tmp_path / 'images' / '1.png').write_text('text')
    (finding, (count, examples)), = check().items()
    assert finding == ('error', 'image file that cannot be read')
    assert count == 1 and 'images/1.png: cannot identify' in examples[0]


def test_cut_image_is_found_by_decoding_alone(tmp_path, check):
    path = tmp_path / 'images' / '1.png'
    path.write_bytes(path.read_bytes()[:60])
    assert check() == {}
    assert check(decode=True) == {
        ('error', 'image file that cannot be decoded'): (1, [str(path)])
    }


def test_image_that_opencv_refuses_is_found_by_decoding(
        monkeypatch, check):

    def imfrombytes(content):
        raise cv2.error('too many pixels')

    monkeypatch.setattr(mmcv, 'imfrombytes', imfrombytes)
    (finding, (count, _)), = check(decode=True).items()
    assert finding == ('error', 'image file that cannot be decoded')
    assert count == 3


@pytest.mark.parametrize('orientation, fits', [(1, False), (6, True)])
def test_photograph_is_measured_upright_as_it_is_loaded(
        orientation, fits, tmp_path, content, check):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new('RGB', (30, 40)).save(tmp_path / 'images' / '0.jpg', exif=exif)
    content['images'][0]['file_name'] = '0.jpg'
    assert (check() == {}) is fits


def test_class_without_category_and_the_reverse_are_found(check):
    assert check(['cat', 'bird']) == {
        ('error', 'class without a category in the file'):
        (1, ["'bird', the file has ['cat', 'dog'] ..."]),
        ('warning', 'category that is no class and left out'):
        (1, ["'dog' with 2 annotations"])
    }


def test_classes_in_another_order_are_found(check):
    assert check(['dog', 'cat']) == {
        ('error', 'classes in another order than the categories'):
        (2, ["'cat' in the file would be called 'dog'",
             "'dog' in the file would be called 'cat'"])
    }


@pytest.mark.parametrize('text, kind, example', [
    ('{"images": [],\n "annotations": [1, }', 'broken JSON',
     'line 2, column 21: '),
    ('[' * 10**5, 'broken JSON', ''),
    ('[1]', 'not a COCO file', 'holds a list, not an object'),
    ('{"images": 3, "categories": [{"id": 1, "name": "a"}]}',
     'not a COCO file', 'images is no list'),
    ('{"images": [], "categories": [{"id": 1, "name": "a"}]}',
     'not a COCO file', 'images is empty')],
    ids=['broken', 'nested', 'list', 'no images', 'empty'])
def test_file_that_is_not_coco_is_an_error(text, kind, example, tmp_path):
    (tmp_path / 'set.json').write_text(text)
    first = check_coco(str(tmp_path / 'set.json')).findings[0]
    assert (first.level, first.kind, first.count) == ('error', kind, 1)
    assert first.examples[0].startswith(example)


def test_number_of_any_length_is_a_finding(tmp_path, content):
    for digits, kinds in ((400, ('box that is not four numbers', )),
                          (5000, ('box that is not four numbers',
                                  'broken JSON'))):  # by Python's version
        content['annotations'][0]['bbox'] = [5, 6, 10, 7]
        text = json.dumps(content).replace('[5, 6, 10, 7]',
                                           f'[5, 6, 10, 1{"0" * digits}]')
        (tmp_path / 'set.json').write_text(text)
        report = check_coco(str(tmp_path / 'set.json'))
        assert report.findings[0].kind in kinds


def test_missing_file_is_an_error(tmp_path):
    finding, = check_coco(str(tmp_path / 'no.json')).findings
    assert finding.kind == 'annotation file cannot be read'
    assert finding.examples == ['No such file or directory']


def test_file_for_testing_only_is_no_error(tmp_path, content):
    del content['annotations']
    (tmp_path / 'set.json').write_text(json.dumps(content))
    report = check_coco(str(tmp_path / 'set.json'))
    assert report.num_errors == 0
    assert [(f.level, f.kind, f.count) for f in report.findings] == [
        ('warning', 'no annotations', 1),
        ('info', 'image without annotations', 3)
    ]
    assert report.as_dict()['findings'][0] == dict(
        level='warning', kind='no annotations', count=1,
        examples=['a list for testing only'])


def config(classes=('cat', 'dog'), num_classes=2, **model):
    dataset = dict(type='CocoDataset', data_root='data', ann_file='a.json',
                   data_prefix=dict(img='images/'),
                   metainfo=dict(classes=classes))
    return Config(
        dict(default_scope='mmdet',
             model=dict(bbox_head=dict(num_classes=num_classes), **model),
             train_dataloader=dict(dataset=dict(
                 type='RepeatDataset', times=2, dataset=dataset)),
             val_dataloader=dict(dataset=dict(
                 type='ConcatDataset', datasets=[dataset, dataset]))))


def test_data_sets_are_found_inside_their_wrappers():
    splits = coco_splits(config(), ('train', 'val', 'test'))
    assert [s.name for s in splits] == ['train', 'val', 'val']
    assert {s[1:3] for s in splits} == {('data/a.json', 'data/images/')}
    assert list(splits[0].classes) == ['cat', 'dog']


def test_own_classes_of_a_data_set_count_without_metainfo():
    cfg = config(num_classes=3)
    del cfg.train_dataloader.dataset.dataset.metainfo
    assert len(coco_splits(cfg, ['train'])[0].classes) == 80
    with pytest.raises(ValueError, match='train_dataloader, 80, got '
                       'bbox_head.num_classes=3'):
        check_classes(cfg)


def test_other_formats_and_no_data_are_refused():
    cfg = config()
    cfg.train_dataloader.dataset.dataset.type = 'VOCDataset'
    with pytest.raises(ValueError, match='train_dataloader must have data in '
                       "COCO format, got type='VOCDataset'"):
        coco_splits(cfg, ['train'])
    with pytest.raises(ValueError, match='one of test, got none'):
        coco_splits(cfg, ['test'])


@pytest.mark.parametrize('classes', [('cat', 'dog'), ['cat', 'dog']])
def test_sound_classes_pass(classes):
    check_classes(config(classes, rpn_head=dict(num_classes=1),
                         semantic_head=dict(num_classes=183),
                         backbone=dict(num_classes=1000)))


@pytest.mark.parametrize('cfg, message', [
    (config('cat', 1), r"classes of train_dataloader must be a list or tuple, "
     r"got the string 'cat'; write \['cat'\]"),
    (config(3), 'classes of train_dataloader must be a list .* got 3'),
    (config([1, 2]), r'list or tuple of names, got \[1, 2\]'),
    (config(['cat', 'dog', 'cat'], 3),
     "must be different names, got 'cat' more than once"),
    (config(num_classes=3), 'num_classes must be the number of classes in '
     'train_dataloader, 2, got bbox_head.num_classes=3'),
    (config(roi_head=dict(bbox_head=[dict(num_classes=2),
                                     dict(num_classes=80)])),
     r'got roi_head.bbox_head\[1\].num_classes=80'),
    (config(detector=dict(bbox_head=dict(num_classes=5))),
     'got detector.bbox_head.num_classes=5'),
], ids=['string', 'int', 'no names', 'twice', 'head', 'cascade', 'wrapped'])
def test_bad_classes_are_named(cfg, message):
    with pytest.raises(ValueError, match=message):
        check_classes(cfg)


@pytest.mark.parametrize('metainfo', [['cat', 'dog'],
                                      dict(CLASSES=['cat', 'dog'])])
def test_classes_under_another_name_are_refused(metainfo):
    cfg = config()
    cfg.train_dataloader.dataset.dataset.metainfo = metainfo
    for function in (check_classes, lambda cfg: coco_splits(cfg, ['train'])):
        with pytest.raises(ValueError) as caught:
            function(cfg)
        assert str(caught.value) == (
            "metainfo must be a dict with the key 'classes', in lower case, "
            f'got {metainfo!r}')


def test_classes_of_validation_count_as_well():
    cfg = config()
    cfg.val_dataloader.dataset.datasets[1].metainfo.classes = ['cat']
    with pytest.raises(ValueError, match='in val_dataloader, 1, got'):
        check_classes(cfg)


def test_classes_may_be_in_a_file(tmp_path):
    (tmp_path / 'classes.txt').write_text('cat\ndog\n')
    check_classes(config(str(tmp_path / 'classes.txt')))
    with pytest.raises(ValueError, match='num_classes=3'):
        check_classes(config(str(tmp_path / 'classes.txt'), 3))
