"""A small real detection data set, drawn from scikit-learn's digit scans."""
import glob
import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Dict, List, Optional

import mmcv
import numpy as np
from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS
from tqdm import tqdm

from .draw_digits import MIN_IMAGE_SIZE, SPLITS, PlacedDigit, draw_image

CLASSES = tuple('0123456789')
META_FILE = 'meta.json'
META_NAME = 'acmix_det digits'
FORMAT_VERSION = 1  # raise when the same arguments draw other images


@DATASETS.register_module()
class DigitsDataset(CocoDataset):
    """Detection of handwritten digits; made by :func:`make_digits`."""

    METAINFO = dict(
        classes=CLASSES,
        palette=[(220, 20, 60), (0, 130, 200), (60, 180, 75), (245, 130, 48),
                 (145, 30, 180), (70, 240, 240), (240, 50, 230),
                 (210, 245, 60), (170, 110, 40), (128, 128, 128)])


def _write_image(index: int, folder: Path, seed: int, split: str,
                 size: int) -> List[PlacedDigit]:
    image, digits = draw_image(seed, split, index, size)
    mmcv.imwrite(image, str(folder / f'{index:06d}.png'))
    return digits


def _write_split(root: Path, split: str, num_images: int, seed: int,
                 size: int, num_workers: int) -> None:
    """Write the images and the COCO file of one split."""
    folder = root / split
    folder.mkdir()
    write = partial(
        _write_image, folder=folder, seed=seed, split=split, size=size)
    progress = partial(tqdm, total=num_images, desc=split, unit='image')
    if num_workers == 0:
        digits = list(progress(map(write, range(num_images))))
    else:
        with ProcessPoolExecutor(num_workers) as pool:
            digits = list(
                progress(pool.map(write, range(num_images), chunksize=8)))
    (root / 'annotations').mkdir(exist_ok=True)
    _write_json(root / 'annotations' / f'{split}.json',
                to_coco(digits, size))


def to_coco(digits: List[List[PlacedDigit]], size: int) -> Dict[str, list]:
    """COCO dictionary of a split, from the digits of each image.

    Boxes hold the whole digit, also where a later one covers it. Besides
    COCO's keys every annotation has ``scan_id``.
    """
    images = [
        dict(id=i, file_name=f'{i:06d}.png', width=size, height=size)
        for i in range(len(digits))
    ]
    annotations = []
    for image_id, placed in enumerate(digits):
        for digit in placed:
            _, _, width, height = digit.bbox
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=image_id,
                    category_id=digit.label + 1,
                    bbox=digit.bbox,
                    area=width * height,
                    iscrowd=0,
                    scan_id=digit.scan_id))
    categories = [dict(id=i + 1, name=name) for i, name in enumerate(CLASSES)]
    return dict(images=images, annotations=annotations, categories=categories)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + '\n')


def _check_int(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) \
            or value < minimum:
        raise ValueError(f'{name} must be an integer of at least {minimum}, '
                         f'got {name}={value!r}')


def _read_meta(root: Path) -> Optional[dict]:
    """Parameters of the set in ``root``; None if ``root`` holds no set."""
    try:
        meta = json.loads((root / META_FILE).read_text())
    except (OSError, ValueError):
        return None
    ours = isinstance(meta, dict) and meta.get('name') == META_NAME
    return meta if ours else None


def _remove_remains(root: Path) -> None:
    """Remove what processes left that were killed."""
    for path in root.parent.glob(f'{glob.escape(root.name)}.partial-*'):
        pid = path.name.rpartition('-')[2]
        try:
            os.kill(int(pid), 0)
            alive = int(pid) != os.getpid()
        except (ValueError, PermissionError):
            alive = True
        except ProcessLookupError:
            alive = False
        if not alive:
            shutil.rmtree(path, ignore_errors=True)


def make_digits(data_root: str = 'data/digits',
                seed: int = 0,
                num_train: int = 2800,
                num_val: int = 200,
                image_size: int = 128,
                num_workers: int = 0,
                force: bool = False) -> bool:
    """Make the data set, unless the same one is there already.

    The folder appears only when it is complete: the set is written beside
    ``data_root`` and renamed. The same arguments give the same bytes, with
    any number of workers, for the same versions of numpy, scikit-learn and
    OpenCV (which writes the PNG files).

    No scan and no sheet of scans appears in both splits. Who wrote a sheet
    is not recorded: the source speaks of 13 writers and the labels show 14
    sheets, so that no *writer* appears in both is likely but not certain.

    Args:
        data_root (str): Folder to make. Defaults to 'data/digits'.
        seed (int): Seed of everything random. Defaults to 0.
        num_train (int): Number of training images. Defaults to 2800.
        num_val (int): Number of validation images. Defaults to 200.
        image_size (int): Height and width in pixels. Defaults to 128.
        num_workers (int): Worker processes; 0 draws in this process.
            Defaults to 0.
        force (bool): Replace a set made with other arguments. Defaults to
            False.

    Returns:
        bool: True if the set was written, False if it was there.

    Raises:
        ValueError: If an argument is out of range.
        FileExistsError: If ``data_root`` holds something else.

    Example:
        >>> import tempfile
        >>> from acmix_det.datasets import make_digits
        >>> root = tempfile.mkdtemp()
        >>> make_digits(f'{root}/digits', num_train=8, num_val=2)
        True
    """
    _check_int('seed', seed, 0)
    _check_int('num_train', num_train, 1)
    _check_int('num_val', num_val, 1)
    _check_int('image_size', image_size, MIN_IMAGE_SIZE)
    _check_int('num_workers', num_workers, 0)
    meta = dict(
        name=META_NAME,
        format_version=FORMAT_VERSION,
        seed=int(seed),
        num_train=int(num_train),
        num_val=int(num_val),
        image_size=int(image_size))
    root = Path(data_root).resolve()  # a link stays a link
    if root.exists() and not (root.is_dir() and not any(root.iterdir())):
        found = _read_meta(root)
        if found is None:
            raise FileExistsError(
                f'data_root must be a digits data set or not exist, got '
                f'{data_root}, which has no {META_FILE} of such a set; '
                'remove it or choose another folder')
        if found == meta and not force:
            return False
        if not force:
            raise FileExistsError(
                f'data_root must be a data set made with {meta}, got '
                f'{data_root}, made with {found}; use --force (force=True) '
                'to replace it')

    root.parent.mkdir(parents=True, exist_ok=True)
    _remove_remains(root)
    partial_root = root.with_name(f'{root.name}.partial-{os.getpid()}')
    try:
        partial_root.mkdir()
        for split, number in zip(SPLITS, (num_train, num_val)):
            _write_split(partial_root, split, number, int(seed),
                         int(image_size), num_workers)
        _write_json(partial_root / META_FILE, meta)
        if root.exists():
            shutil.rmtree(root)
        os.replace(partial_root, root)
    finally:
        shutil.rmtree(partial_root, ignore_errors=True)
    return True
