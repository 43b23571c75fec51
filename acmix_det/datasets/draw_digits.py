"""Draw handwritten digits, scans that ship with scikit-learn, on textures.

Every image depends only on ``(seed, split, index, size)``: neither the number
of workers nor the number of images changes what one image shows.
"""
import math
from functools import lru_cache
from typing import List, NamedTuple, Tuple

import numpy as np

SPLITS = ('train', 'val')

# First scan of each sheet in load_digits(). A sheet counts three times from
# 0 to 9 and then repeats one fixed sequence of labels, so the sheets can be
# read off the labels. UCI names 13 writers for these 14 sheets.
SHEET_STARTS = (0, 130, 256, 386, 516, 646, 776, 906, 1029, 1157, 1287, 1415,
                1545, 1667)
FIRST_VAL_SHEET = 12

MIN_IMAGE_SIZE = 80  # the largest digit fits, however turned
MAX_DIGITS = 5
DIGIT_HEIGHT = (20., 52.)  # pixels, before rotation
MAX_ROTATION = 12.  # degrees
MAX_OVERLAP = 0.25  # of the smaller of two boxes
MIN_CONTRAST, MAX_CONTRAST = 90., 150.  # grey levels
EMPTY_EVERY = 33  # every 33rd image has no digits


class PlacedDigit(NamedTuple):
    """One digit of an image.

    Attributes:
        label (int): The digit, 0 to 9.
        scan_id (int): Index of the scan in ``load_digits()``.
        alpha (np.ndarray): Ink cropped to its extent, (h, w) in [0, 1].
        x (int): Column of the left edge.
        y (int): Row of the upper edge.
    """
    label: int
    scan_id: int
    alpha: np.ndarray
    x: int
    y: int

    @property
    def bbox(self) -> List[int]:
        """Tight box as (x, y, width, height)."""
        height, width = self.alpha.shape
        return [self.x, self.y, width, height]


@lru_cache(maxsize=None)
def load_scans() -> Tuple[np.ndarray, np.ndarray]:
    """Load the scans that ship with scikit-learn.

    Returns:
        tuple: Ink of shape (1797, 8, 8) in [0, 1] and labels of shape
        (1797, ).
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise ImportError(
            'the digits data set is drawn from scans of scikit-learn, which '
            "could not be imported; run: pip install 'acmix_det[digits]'"
        ) from e
    scans = load_digits()
    return scans.images / 16., scans.target


def split_scan_ids(split: str) -> range:
    """Indices of the scans that may appear in one split.

    Whole sheets go to one split: 12 sheets (1,545 scans) to 'train', the
    last 2 (252 scans) to 'val'.
    """
    if split not in SPLITS:
        raise ValueError(f'split must be one of {SPLITS}, got {split!r}')
    first_val = SHEET_STARTS[FIRST_VAL_SHEET]
    return range(first_val) if split == 'train' else range(first_val, 1797)


def sample_bilinear(grid: np.ndarray, y: np.ndarray,
                    x: np.ndarray) -> np.ndarray:
    """Read ``grid`` (h, w) at real positions; the border value continues."""
    y = np.clip(y, 0, grid.shape[0] - 1)
    x = np.clip(x, 0, grid.shape[1] - 1)
    y0 = np.minimum(y.astype(int), grid.shape[0] - 2)
    x0 = np.minimum(x.astype(int), grid.shape[1] - 2)
    fy, fx = y - y0, x - x0
    upper = grid[y0, x0] * (1 - fx) + grid[y0, x0 + 1] * fx
    lower = grid[y0 + 1, x0] * (1 - fx) + grid[y0 + 1, x0 + 1] * fx
    return upper * (1 - fy) + lower * fy


def draw_background(rng: np.random.Generator, size: int) -> np.ndarray:
    """Draw smooth noise, a gradient, stripes or a checkerboard.

    Returns:
        np.ndarray: Grey levels of shape (size, size), without pixel noise.
    """
    base, amplitude = rng.uniform(80, 175), rng.uniform(8, 30)
    angle = rng.uniform(0, 2 * math.pi)
    period = rng.uniform(10, 40)
    y, x = np.mgrid[:size, :size].astype(float)
    along = x * math.cos(angle) + y * math.sin(angle)
    across = y * math.cos(angle) - x * math.sin(angle)
    kind = rng.integers(4)
    if kind == 0:
        cells = int(rng.integers(3, 13))
        grid = rng.uniform(-1, 1, (cells + 1, cells + 1))
        texture = sample_bilinear(grid, y * cells / size, x * cells / size)
    elif kind == 1:
        low, high = along.min(), along.max()
        texture = 2 * (along - low) / (high - low) - 1
    elif kind == 2:
        texture = np.sin(2 * math.pi * along / period)
    else:
        parity = np.floor(along / period) + np.floor(across / period)
        texture = 2. * (parity % 2) - 1
    return base + amplitude * texture


def draw_digit(rng: np.random.Generator, scan: np.ndarray) -> np.ndarray:
    """Enlarge and turn one scan (8, 8), and crop it to its ink.

    Returns:
        np.ndarray: Opacity of the ink, (h, w) in [0, 1]; each side of the
        array touches ink.
    """
    height = rng.uniform(*DIGIT_HEIGHT)
    scale_y = height / 8
    scale_x = scale_y * rng.uniform(0.85, 1.15)
    angle = math.radians(rng.uniform(-MAX_ROTATION, MAX_ROTATION))
    half = math.ceil(height)
    y, x = np.mgrid[-half:half + 1, -half:half + 1].astype(float)
    scan_y = (y * math.cos(angle) - x * math.sin(angle)) / scale_y
    scan_x = (x * math.cos(angle) + y * math.sin(angle)) / scale_x
    padded = np.pad(scan, 1)  # 10 x 10, centre at 4.5
    ink = sample_bilinear(padded, scan_y + 4.5, scan_x + 4.5)
    alpha = np.clip((ink - 0.1) / 0.8, 0, 1)
    alpha[alpha < 0.2] = 0
    rows, cols = np.flatnonzero(alpha.any(1)), np.flatnonzero(alpha.any(0))
    return alpha[rows[0]:rows[-1] + 1, cols[0]:cols[-1] + 1]


def overlap(a: List[int], b: List[int]) -> float:
    """Intersection of two (x, y, w, h) boxes over the smaller area."""
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    smaller = min(a[2] * a[3], b[2] * b[3])
    return max(width, 0) * max(height, 0) / smaller


def place_digits(rng: np.random.Generator, split: str,
                 size: int) -> List[PlacedDigit]:
    """Choose 1 to 5 digits of a split and where they lie in the image.

    A digit that finds no place in 20 tries is left out; the first always
    finds one.
    """
    scans, labels = load_scans()
    placed = []
    number = int(rng.integers(1, MAX_DIGITS + 1))
    for scan_id in rng.choice(
            split_scan_ids(split), number, replace=False).tolist():
        alpha = draw_digit(rng, scans[scan_id])
        height, width = alpha.shape
        for _ in range(20):
            digit = PlacedDigit(
                label=int(labels[scan_id]),
                scan_id=scan_id,
                alpha=alpha,
                x=int(rng.integers(size - width + 1)),
                y=int(rng.integers(size - height + 1)))
            if all(
                    overlap(digit.bbox, other.bbox) <= MAX_OVERLAP
                    for other in placed):
                placed.append(digit)
                break
    return placed


def paint_digit(rng: np.random.Generator, image: np.ndarray,
                digit: PlacedDigit) -> None:
    """Paint dark on light or light on dark, in place, on grey (H, W)."""
    x, y, width, height = digit.bbox
    patch = image[y:y + height, x:x + width]
    below = patch.mean()
    contrast = rng.uniform(MIN_CONTRAST, MAX_CONTRAST)
    level = below + contrast if rng.random() < 0.5 else below - contrast
    if not 0 <= level <= 255:
        level = 2 * below - level
    patch += digit.alpha * (np.clip(level, 0, 255) - patch)


def draw_image(seed: int, split: str, index: int,
               size: int) -> Tuple[np.ndarray, List[PlacedDigit]]:
    """Draw one image; a pure function of its arguments.

    Returns:
        tuple: BGR image (size, size, 3) as uint8, and the digits on it in
        painting order.
    """
    rng = np.random.default_rng(
        np.random.SeedSequence(seed, spawn_key=(SPLITS.index(split), index)))
    grey = draw_background(rng, size)
    empty = index % EMPTY_EVERY == EMPTY_EVERY - 1
    digits = [] if empty else place_digits(rng, split, size)
    for digit in digits:
        paint_digit(rng, grey, digit)
    tint = rng.uniform(-12, 12, 3)
    noise = rng.normal(0, rng.uniform(2, 9), grey.shape)
    image = (grey + noise)[..., None] + tint
    return np.clip(np.rint(image), 0, 255).astype(np.uint8), digits
