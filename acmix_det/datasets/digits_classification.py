"""Images of single handwritten digits, for classification."""
import math
import os
import shutil
from pathlib import Path
from typing import Tuple

import mmcv
import numpy as np

from .digits import _check_int
from .draw_digits import (SPLITS, PlacedDigit, draw_background, draw_digit,
                          load_scans, paint_digit, split_scan_ids)


def draw_one_digit(seed: int, split: str, index: int,
                   size: int) -> Tuple[np.ndarray, int, int]:
    """Draw one image; a pure function of its arguments.

    Returns:
        tuple: BGR image (size, size, 3) as uint8, its label from 0 to 9, and
        the index of the scan in ``load_digits()``. The scans of the split
        take turns.
    """
    rng = np.random.default_rng(
        np.random.SeedSequence(seed, spawn_key=(SPLITS.index(split), index)))
    scans, labels = load_scans()
    ids = split_scan_ids(split)
    scan_id = ids[index % len(ids)]
    label = int(labels[scan_id])
    alpha = draw_digit(rng, scans[scan_id])
    height, width = alpha.shape
    # a square around the digit with up to a third of its size as margin
    side = math.ceil(max(height, width) * rng.uniform(1.05, 1.33))
    grey = draw_background(rng, side)
    paint_digit(
        rng, grey,
        PlacedDigit(
            label=label,
            scan_id=scan_id,
            alpha=alpha,
            x=int(rng.integers(side - width + 1)),
            y=int(rng.integers(side - height + 1))))
    grey = mmcv.imresize(grey, (size, size))
    image = (grey + rng.normal(0, rng.uniform(2, 9), grey.shape))[..., None]
    image = np.clip(np.rint(image + rng.uniform(-12, 12, 3)), 0, 255)
    return image.astype(np.uint8), label, scan_id


def make_digits_classification(data_root: str = 'data/digits_classification',
                               seed: int = 0,
                               num_train: int = 3000,
                               num_val: int = 500,
                               image_size: int = 64) -> None:
    """Make a data set of digits, one folder for each split and class.

    ``train/3/000017.png`` is a three: the layout of mmpretrain's
    CustomDataset. Ground, digits and splits are those of
    :func:`acmix_det.datasets.make_digits`, so that no sheet of scans appears
    in both splits, and a backbone that is trained on the one may start a
    detector on the other. The folder appears only when it is complete.

    Args:
        data_root (str): Folder to make. Defaults to
            'data/digits_classification'.
        seed (int): Seed of everything random. Defaults to 0.
        num_train (int): Number of training images. Defaults to 3000.
        num_val (int): Number of validation images. Defaults to 500.
        image_size (int): Height and width in pixels. Defaults to 64.

    Raises:
        ValueError: If an argument is out of range.
        FileExistsError: If ``data_root`` exists.

    Example:
        >>> import os, tempfile
        >>> from acmix_det.datasets.digits_classification import (
        ...     make_digits_classification)
        >>> root = os.path.join(tempfile.mkdtemp(), 'digits')
        >>> make_digits_classification(root, num_train=10, num_val=10)
        >>> sorted(os.listdir(root))
        ['train', 'val']
    """
    _check_int('seed', seed, 0)
    # the first ten scans of a sheet show the ten digits
    _check_int('num_train', num_train, 10)
    _check_int('num_val', num_val, 10)
    _check_int('image_size', image_size, 8)
    root = Path(data_root).absolute()
    if root.exists():
        raise FileExistsError('data_root must not exist yet, got '
                              f'{data_root}; remove it or choose another')
    root.parent.mkdir(parents=True, exist_ok=True)
    partial_root = root.with_name(f'{root.name}.partial-{os.getpid()}')
    try:
        for split, number in zip(SPLITS, (num_train, num_val)):
            for index in range(number):
                image, label, _ = draw_one_digit(seed, split, index,
                                                 image_size)
                path = partial_root / split / str(label) / f'{index:06d}.png'
                mmcv.imwrite(image, str(path))  # makes the folders
        os.replace(partial_root, root)
    finally:
        shutil.rmtree(partial_root, ignore_errors=True)
