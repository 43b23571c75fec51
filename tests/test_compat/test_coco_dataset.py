"""Data that CocoDataset refuses, and data that it still takes."""
import json
import logging
import os
import shutil

import numpy as np
import pytest
from mmcv import imwrite
from mmcv.transforms import LoadImageFromFile
from mmdet.datasets import CocoDataset

from acmix_det.compat.coco_dataset import check_categories, enable_data_checks
from acmix_det.compat.faults import FaultError

CLASSES = ['cat', 'dog', 'traffic light']
LOAD = dict(type='LoadImageFromFile')


@pytest.fixture
def data(tmp_path):
    """Two images, the second without a box."""
    for i in range(2):
        imwrite(np.full((20, 30, 3), 9, np.uint8), str(tmp_path / f'images/{i}.png'))
    write(tmp_path, dict(
        images=[dict(id=i, file_name=f'{i}.png', width=30, height=20) for i in range(2)],
        annotations=[dict(id=1, image_id=0, category_id=1, bbox=[1, 1, 9, 9], area=81, iscrowd=0)],
        categories=[dict(id=i, name=name) for i, name in enumerate(CLASSES)]))
    return tmp_path


def write(folder, content):
    (folder / 'a.json').write_text(json.dumps(content))


def edit(folder, change):
    content = json.loads((folder / 'a.json').read_text())
    change(content)
    write(folder, content)


def load(folder, classes=CLASSES, img='images', pipeline=(LOAD, ), **kwargs):
    return CocoDataset(data_root=str(folder), ann_file='a.json', data_prefix=dict(img=img),
                       metainfo=dict(classes=classes), pipeline=list(pipeline), **kwargs)


def refused(*args, **kwargs):
    with pytest.raises(FaultError) as caught:
        load(*args, **kwargs)
    message = str(caught.value)
    assert isinstance(caught.value, FileNotFoundError) == ('missing' in message or 'must be a file' in message)
    return message


BROKEN = {
    'cut': (lambda b: b[:50], 'broken JSON: line 1, column '),
    'empty file': (lambda b: b'', 'broken JSON: line 1, column 1: Expecting value'),
    'list': (lambda b: b'[]', 'not a COCO file: holds a list, not an object'),
    'utf-16': (lambda b: b.decode().encode('utf-16'), 'broken JSON: not UTF-8: '),
    'byte order mark': (lambda b: b'\xef\xbb\xbf' + b, 'broken JSON: line 1, column 1: Unexpected UTF-8 BOM'),
    'no images': (lambda b: b.replace(b'"images"', b'"pictures"'), 'no images. '),
    'images empty': (lambda b: b'{"images": [], "annotations": [], "categories": [{"id": 1, "name": "cat"}]}',
                     'images is empty. '),
    'no annotations': (lambda b: b.replace(b'"annotations"', b'"boxes"'), 'no annotations. '),
    'annotations null': (lambda b: b.replace(b'"annotations"', b'"annotations": null, "boxes"'),
                         'no annotations: a list for testing only. '),
    'no categories': (lambda b: b.replace(b'"categories"', b'"classes"'),
                      'not a COCO file: categories is no list; annotation of an unknown category: annotation 1'),
    'no bbox': (lambda b: b.replace(b'"bbox"', b'"box"'), 'malformed entry: annotations[0]: no bbox. '),
    'two numbers': (lambda b: b.replace(b'9, 9]', b']').replace(b'1, 1, ', b'1, 1'),
                    'box that is not four numbers: annotation 1: bbox [1, 1]. '),
    # a warning, the file name that comes twice, is not in the message
    'no width': (lambda b: b.replace(b'"width"', b'"w"', 1).replace(b'1.png', b'0.png'),
                 'image without a positive width and height: image 0: None x 20. '),
}


@pytest.mark.parametrize('damage, problem', BROKEN.values(), ids=BROKEN)
def test_broken_annotation_file_is_named_with_its_fault(damage, problem, data):
    path = data / 'a.json'
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before
    message = refused(data)
    assert message.startswith(f'ann_file must be a COCO file, got {path}: {problem}')
    assert message.endswith('. python tools/check_dataset.py CONFIG lists all that is wrong')


def test_missing_annotation_file_is_named(data):
    (data / 'a.json').unlink()
    assert refused(data) == f'ann_file must be a file, got {data}/a.json'


def test_second_installation_changes_nothing():
    functions = [CocoDataset.load_data_list, LoadImageFromFile.transform]
    enable_data_checks()
    assert functions == [CocoDataset.load_data_list, LoadImageFromFile.transform]


def test_error_that_is_no_fault_of_the_file_stays_as_it_is(data, monkeypatch):

    def parse_data_info(self, raw_data_info):
        raise KeyError('mine')

    monkeypatch.setattr(CocoDataset, 'parse_data_info', parse_data_info)
    with pytest.raises(KeyError, match='mine'):
        load(data)


def test_file_of_another_api_is_not_judged_as_boxes(data, monkeypatch):

    class Panoptic(CocoDataset):

        @staticmethod
        def COCOAPI(path):
            raise KeyError('segments_info')

    edit(data, lambda c: c['annotations'][0].pop('bbox'))
    with pytest.raises(KeyError, match='segments_info'):
        Panoptic(data_root=str(data), ann_file='a.json')


def test_list_of_images_for_testing_needs_no_annotations(data):
    edit(data, lambda c: c.pop('annotations'))
    assert len(load(data, test_mode=True)) == 2


def test_data_set_can_still_be_sent_to_a_worker(data):
    assert 'COCOAPI' not in vars(load(data))


@pytest.mark.parametrize('filter_cfg', [dict(filter_empty_gt=True), dict(min_size=21)],
                         ids=['no boxes', 'too small'])
def test_filter_that_leaves_no_image_is_named(filter_cfg, data):
    edit(data, lambda c: c['annotations'].clear())
    assert f'filter_cfg must leave images of {data}/a.json, got filter_cfg={filter_cfg}, which leaves none' in refused(
        data, filter_cfg=filter_cfg)


def test_classes_that_are_no_categories_are_refused_with_both_lists(data):
    assert refused(data, ('cow', 'cats')) == (
        f"classes must be categories of {data}/a.json, got classes=['cow', 'cats'], and the categories are "
        "['cat', 'dog', 'traffic light']")


def test_class_that_would_shift_the_labels_of_others_is_refused(data):
    assert refused(data, ['cat', 'cow', 'traffic light']).endswith(
        "['cat', 'dog', 'traffic light']: without 'cow' label 1 is 'traffic light' and not 'cow'")


@pytest.mark.parametrize('name, category', [('Cat', 'cat'), ('dog ', 'dog'), ('traffic_light', 'traffic light'),
                                            ('Traffic-Light', 'traffic light')])
def test_class_that_differs_in_spelling_alone_is_refused(name, category, data):
    classes = [name if c == category else c for c in CLASSES]
    assert refused(data, classes).endswith(f"'traffic light']: {name!r} is not {category!r}")


def test_number_as_name_of_a_category_is_refused(data):
    edit(data, lambda c: c['categories'].append(dict(id=9, name=3)))
    assert refused(data, [*CLASSES, '3']).endswith("'traffic light', 3]: '3' is not 3")


def test_two_categories_of_one_class_are_refused(data):
    edit(data, lambda c: c['categories'].append(dict(id=9, name='dog')))
    assert refused(data) == f"categories of {data}/a.json must have different names, got 'dog' more than once"


@pytest.mark.parametrize('classes, warning', [
    (['cat', 'dog', 'cow'], "a.json: the classes ['cow'] are no categories"),
    (['dog', 'cat'], "a.json: label 0 is 'dog' by the classes of the config and 'cat' in the file: "
     'mmdet numbers the categories that are classes, in the order of the file'),
    (['cat', 'traffic light'], None),
    (CLASSES, None),
], ids=['last', 'order', 'some', 'all'])
def test_labels_that_mmdet_numbers_otherwise_give_a_warning(classes, warning, monkeypatch):
    logged = []
    monkeypatch.setattr('acmix_det.compat.coco_dataset.print_log',
                        lambda *args, **kwargs: logged.append((args, kwargs)))
    check_categories(dict(categories=[dict(name=name) for name in CLASSES]), classes, 'a.json')
    assert logged == ([((warning, ), dict(logger='current', level=logging.WARNING))] if warning else [])


def test_missing_images_are_counted_and_the_first_is_named(data):
    shutil.rmtree(data / 'images')
    assert refused(data) == (
        f'2 image files of {data}/a.json are missing, the first is {data}/images/0.png. '
        'python tools/check_dataset.py CONFIG lists all that is wrong')


def test_link_to_nothing_and_a_folder_are_missing_images(data):
    for i in range(2):
        (data / f'images/{i}.png').unlink()
    (data / 'images/0.png').symlink_to('nowhere.png')
    (data / 'images/1.png').mkdir()
    assert refused(data).startswith('2 image files')


def test_links_to_images_and_to_their_folder_are_followed(data):
    (data / 'images/0.png').rename(data / 'elsewhere.png')
    (data / 'images/0.png').symlink_to(data / 'elsewhere.png')
    (data / 'link').symlink_to(data / 'images')
    assert len(load(data, img='link')) == 2


def test_image_that_opens_under_a_name_that_is_not_listed_is_there(data, monkeypatch):

    def scandir(folder):
        raise PermissionError(13, 'Permission denied', folder)

    monkeypatch.setattr(os, 'scandir', scandir)
    assert len(load(data)) == 2


class ZipLoader(LoadImageFromFile):
    pass


@pytest.mark.parametrize('kwargs', [
    dict(pipeline=[dict(type='LoadImageFromFile', backend_args=dict(backend='petrel'))]),
    dict(img='s3://bucket/images'),
    dict(pipeline=[dict(type='LoadImageFromFile', file_client_args=dict(backend='disk'))]),
    dict(pipeline=[dict(type='LoadImageFromFile', ignore_empty=True)]),
    dict(pipeline=[dict(type=ZipLoader)]),
    dict(pipeline=[]),
    dict(indices=[1]),
    dict(filter_cfg=dict(filter_empty_gt=False, min_size=21)),
], ids=['backend', 'address', 'file client', 'ignore_empty', 'own loader', 'no pipeline', 'not chosen', 'filtered'])
@pytest.mark.filterwarnings('ignore:"file_client_args" will be deprecated')
def test_images_are_looked_for_only_where_they_will_be_loaded(kwargs, data):
    edit(data, lambda c: c['images'][1].update(height=30))
    (data / 'images/0.png').unlink()
    assert refused(data).startswith('1 image files')
    assert len(load(data, **kwargs)) in (1, 2)


@pytest.mark.parametrize('content', [b'', b'GIF?', None], ids=['empty', 'no image', 'cut'])
def test_image_that_cannot_be_decoded_is_named(content, data):
    path = data / 'images/0.png'
    path.write_bytes(path.read_bytes()[:70] if content is None else content)
    with pytest.raises(FaultError) as caught:
        load(data)[0]
    assert str(caught.value) == (f'image {path} cannot be decoded: it is empty, cut off, or no image. '
                                 'python tools/check_dataset.py CONFIG --decode finds all such files')


def test_image_that_disappears_is_still_a_file_not_found(data):
    loaded = load(data)
    (data / 'images/0.png').unlink()
    with pytest.raises(FileNotFoundError, match='images/0.png'):
        loaded[0]
