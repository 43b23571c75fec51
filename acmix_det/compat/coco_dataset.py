"""Name what is wrong with COCO data before the first batch.

mmdet 3.3 meets a broken annotation file with the error of whatever line it breaks in, numbers labels by what it
finds of the classes (nothing at all makes a training on background), and opens an image file in the first batch that
needs it.
"""
import functools
import logging
import os
import os.path as osp
import re
from collections import Counter
from contextlib import suppress

import cv2
from mmcv.transforms import LoadImageFromFile
from mmdet.datasets import CocoDataset
from mmdet.datasets.api_wrappers import COCO
from mmengine.fileio import get_local_path
from mmengine.logging import print_log

from ..datasets.check_coco import NUM_EXAMPLES, check_coco
from .faults import FaultError, MissingFileError, is_local

SEE_ALL = 'python tools/check_dataset.py CONFIG lists all that is wrong'


def explain_annotations(ann_file, backend_args=None):
    """Say why an annotation file does not load.

    Args:
        ann_file (str): The file.
        backend_args (dict, optional): As in `mmengine.fileio.get`. Defaults to None.

    Returns:
        str: The first errors of `check_coco`, or its warnings if there are no errors; '' if it has nothing to say.
    """
    with get_local_path(ann_file, backend_args=backend_args) as path:
        findings = [f for f in check_coco(path).findings if f.level != 'info']
    # Sorted: errors come first.
    return '; '.join(': '.join((f.kind, *f.examples[:1])) for f in findings[:NUM_EXAMPLES]
                     if f.level == findings[0].level)


def check_categories(content, classes, ann_file):
    """Compare the classes of a config with the categories of an annotation file, and warn of unequal labels.

    Args:
        content (dict): What the file holds.
        classes (Sequence[str]): Classes of the config.
        ann_file (str): Name of the file.

    Raises:
        FaultError: None of the classes is a category, one differs from a category by case, spaces, `_` or `-` only, one
            that is no category would shift the labels of others, or two categories have the name of one class.
    """
    names = [category['name'] for category in content['categories']]
    wanted, found, spare = set(classes), [], {}
    for name in names:
        if isinstance(name, str) and name in wanted:
            found.append(name)
        else:
            spare[_letters(name)] = name
    there = set(found)
    missing = [name for name in classes if name not in there]
    similar = [(name, spare[_letters(name)]) for name in missing if _letters(name) in spare]
    if similar or not found:
        raise FaultError(f'classes must be categories of {ann_file}, got classes={list(classes)}, and the categories '
                         f'are {names}' + (': {!r} is not {!r}'.format(*similar[0]) if similar else ''))
    twice = [name for name, count in Counter(found).items() if count > 1]
    if twice:
        raise FaultError(f'categories of {ann_file} must have different names, got {twice[0]!r} more than once')
    warnings = [f'the classes {missing} are no categories'] if missing else []
    unequal = [(label, *pair) for label, pair in enumerate(zip(classes, found)) if pair[0] != pair[1]]
    if missing and unequal:
        raise FaultError(f'classes must be categories of {ann_file}, got classes={list(classes)}, and the categories '
                         f'are {names}: without {missing[0]!r} label {unequal[0][0]} is {unequal[0][2]!r} and not '
                         f'{unequal[0][1]!r}')
    if unequal:
        warnings.append('label {} is {!r} by the classes of the config and {!r} in the file: mmdet numbers the '
                        'categories that are classes, in the order of the file'.format(*unequal[0]))
    if warnings:
        print_log(f'{ann_file}: ' + '; '.join(warnings), logger='current', level=logging.WARNING)


def _letters(name):
    return re.sub(r'[\s_-]', '', str(name)).casefold()


def check_image_files(paths, ann_file):
    """See that image files are there, by the listings of their folders.

    Args:
        paths (Iterable[str]): Image files.
        ann_file (str): The annotation file that names them.

    Raises:
        MissingFileError: Some are missing.
    """
    listed = {}
    missing = []
    for path in paths:
        folder, name = osp.split(path)
        if folder not in listed:
            listed[folder] = set()
            with suppress(OSError), os.scandir(folder or '.') as entries:
                listed[folder].update(entry.name for entry in entries if entry.is_file())
        # Some file systems find a file by other names than those that they list.
        if name not in listed[folder] and not osp.isfile(path):
            missing.append(path)
    if missing:
        raise MissingFileError(
            f'{len(missing)} image files of {ann_file} are missing, the first is {missing[0]}. {SEE_ALL}')


def _check_loading(load):

    @functools.wraps(load)
    def load_data_list(self):
        loaded = []

        def keep(path, api=self.COCOAPI):
            loaded.append(api(path))
            return loaded[0]

        self.COCOAPI = keep
        try:
            data_list = load(self)
        except FileNotFoundError as error:
            raise MissingFileError(f'ann_file must be a file, got {self.ann_file}') from error
        except Exception as error:  # whatever the line raises that meets the fault
            # Other APIs, such as the panoptic one, read other files.
            problem = type(self).COCOAPI is COCO and explain_annotations(self.ann_file, self.backend_args)
            if not problem:
                raise
            raise FaultError(f'ann_file must be a COCO file, got {self.ann_file}: {problem}. {SEE_ALL}') from error
        finally:
            del self.COCOAPI
        content, classes = loaded[0].dataset, self.metainfo['classes']
        needed = ('images', ) if self.test_mode else ('images', 'annotations')
        lacking = [key for key in needed if key not in content]
        if lacking or not data_list:
            raise FaultError(f'ann_file must be a COCO file, got {self.ann_file}: '
                             + (f'no {lacking[0]}' if lacking else 'images is empty') + f'. {SEE_ALL}')
        if isinstance(classes, (list, tuple)):  # anything else is refused by mmdet
            check_categories(content, classes, self.ann_file)
        return data_list

    return load_data_list


def _check_what_is_left(serialize):

    @functools.wraps(serialize)
    def serialize_data(self):
        if not self.data_list:
            raise FaultError(
                f'filter_cfg must leave images of {self.ann_file}, got filter_cfg={self.filter_cfg}, which leaves '
                'none: min_size drops images with a smaller side, filter_empty_gt=True those without a box of the classes')
        first = next(iter(self.pipeline.transforms), None)
        paths = [info['img_path'] for info in self.data_list]
        # Other transforms may change the path, or expect to find nothing there.
        if (type(first) is LoadImageFromFile and not first.ignore_empty and first.file_client_args is None
                and all(is_local(path, first.backend_args) for path in paths)):
            check_image_files(paths, self.ann_file)
        return serialize(self)

    return serialize_data


def _name_image(transform):

    @functools.wraps(transform)
    def load_image(self, results):
        try:
            return transform(self, results)
        except (AssertionError, cv2.error) as error:  # an OSError names the file itself
            raise FaultError(f'image {results["img_path"]} cannot be decoded: it is empty, cut off, or no image. '
                             'python tools/check_dataset.py CONFIG --decode finds all such files') from error

    return load_image


def enable_data_checks():
    """Let mmdet's CocoDataset check what it loads, and mmcv name images that it cannot decode."""
    if hasattr(CocoDataset.load_data_list, '__wrapped__'):
        return
    CocoDataset.load_data_list = _check_loading(CocoDataset.load_data_list)
    CocoDataset._serialize_data = _check_what_is_left(CocoDataset._serialize_data)
    LoadImageFromFile.transform = _name_image(LoadImageFromFile.transform)
