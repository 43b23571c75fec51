"""Find what is wrong with a COCO annotation file before training on it."""
import json
import math
import os.path as osp
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple

import cv2
import mmcv
from PIL import Image
from tqdm import tqdm

LEVELS = ('error', 'warning', 'info')
NUM_EXAMPLES = 3
EXIF_ORIENTATION = 0x0112


@dataclass
class Finding:
    """All cases of one kind in a file.

    Attributes:
        level (str): 'error' (training fails or learns something wrong),
            'warning' (something is left out) or 'info'.
        kind (str): What it is.
        count (int): Number of cases.
        examples (list[str]): The first few.
    """
    level: str
    kind: str
    count: int = 0
    examples: List[str] = field(default_factory=list)


class Report:
    """What was found in one annotation file.

    Attributes:
        ann_file (str): The file.
        counts (dict[str, int]): Number of images, annotations, categories.
        findings (list[Finding]): Errors first.
    """

    def __init__(self, ann_file: str) -> None:
        self.ann_file = ann_file
        self.counts: Dict[str, int] = {}
        self._findings: Dict[Tuple[str, str], Finding] = {}

    def add(self, level: str, kind: str, example: str = '') -> None:
        """Count one case."""
        finding = self._findings.setdefault((level, kind),
                                            Finding(level, kind))
        finding.count += 1
        if example and len(finding.examples) < NUM_EXAMPLES:
            finding.examples.append(example)

    @property
    def findings(self) -> List[Finding]:
        return sorted(
            self._findings.values(), key=lambda f: LEVELS.index(f.level))

    @property
    def num_errors(self) -> int:
        return sum(f.count for f in self.findings if f.level == 'error')

    def as_dict(self) -> dict:
        """The report as plain types."""
        return dict(
            ann_file=self.ann_file,
            **self.counts,
            findings=[asdict(finding) for finding in self.findings])


def check_coco(ann_file: str,
               img_root: Optional[str] = None,
               classes: Optional[Sequence[str]] = None,
               progress: bool = False,
               decode: bool = False) -> Report:
    """Check a COCO annotation file, and the headers of its images.

    Args:
        ann_file (str): Annotation file.
        img_root (str | None): Folder of the images; None leaves the files
            alone. Defaults to None.
        classes (Sequence[str] | None): Classes that a detector is trained
            on; None is those of the file. Defaults to None.
        progress (bool): Show a progress bar while headers are read. Defaults
            to False.
        decode (bool): Load every image whole, as a training does: finds files
            that were cut off, and takes as long as an epoch of loading.
            Defaults to False.

    Returns:
        Report: What was found.

    Example:
        >>> from acmix_det.datasets.check_coco import check_coco
        >>> report = check_coco('data/digits/annotations/val.json')
        >>> report.num_errors
        0
    """
    report = Report(str(ann_file))
    content = _read(report)
    if content is None:
        return report
    images = _entries(report, content, 'images', ('id', 'file_name'))
    categories = _entries(report, content, 'categories', ('id', 'name'))
    annotations = _entries(report, content, 'annotations',
                           ('id', 'image_id', 'category_id', 'bbox'))
    report.counts.update(
        images=len(images),
        annotations=len(annotations),
        categories=len(categories))
    _check_unique(report, images, 'image id', 'id')
    _check_unique(report, images, 'file_name', 'file_name', 'warning')
    _check_unique(report, annotations, 'annotation id', 'id')
    _check_unique(report, categories, 'category id', 'id')
    _check_unique(report, categories, 'category name', 'name')
    sized = {}
    for image in images:
        size = image.get('width'), image.get('height')
        if all(_is_number(n) and n > 0 for n in size):
            sized[image['id']] = size
        else:
            report.add('error', 'image without a positive width and height',
                       f'image {image["id"]}: {size[0]} x {size[1]}')
    _check_annotations(report, annotations, {i['id'] for i in images}, sized,
                       {c['id'] for c in categories})
    if classes is not None:
        _check_names(report, categories, annotations, classes)
    _count_empty(report, images, annotations)
    if img_root is not None:
        _check_files(report, images, sized, str(img_root), progress, decode)
    return report


def _read(report: Report) -> Optional[dict]:
    try:
        with open(report.ann_file, encoding='utf-8') as file:
            content = json.load(file)
    except json.JSONDecodeError as error:
        report.add('error', 'broken JSON',
                   f'line {error.lineno}, column {error.colno}: {error.msg}')
    except UnicodeDecodeError as error:
        report.add('error', 'broken JSON', f'not UTF-8: {error}')
    except (ValueError, RecursionError) as error:  # of a number or nesting
        report.add('error', 'broken JSON', str(error))
    except OSError as error:
        report.add('error', 'annotation file cannot be read',
                   error.strerror or str(error))
    else:
        if isinstance(content, dict):
            return content
        report.add('error', 'not a COCO file',
                   f'holds a {type(content).__name__}, not an object')
    return None


def _entries(report: Report, content: dict, key: str,
             needed: Sequence[str]) -> List[dict]:
    """Usable entries of a list."""
    entries = content.get(key)
    if key == 'annotations' and entries is None:
        report.add('warning', 'no annotations', 'a list for testing only')
        return []
    if not isinstance(entries, list):
        report.add('error', 'not a COCO file', f'{key} is no list')
        return []
    if not entries and key != 'annotations':
        report.add('error', 'not a COCO file', f'{key} is empty')
    usable = []
    for i, entry in enumerate(entries):
        problem = _malformed(entry, needed)
        if problem:
            report.add('error', 'malformed entry', f'{key}[{i}]: {problem}')
        else:
            usable.append(entry)
    return usable


def _malformed(entry: object, needed: Sequence[str]) -> Optional[str]:
    if not isinstance(entry, dict):
        return f'a {type(entry).__name__}, not an object'
    for key in needed:
        if key not in entry:
            return f'no {key}'
        value = entry[key]
        if key.endswith('id') and (isinstance(value, bool)
                                   or not isinstance(value, (int, str))):
            return f'{key} is {value!r}'
        if key.endswith('name') and not (isinstance(value, str) and value):
            return f'{key} is {value!r}'
    return None


def _check_unique(report: Report, entries: Sequence[dict], what: str,
                  key: str, level: str = 'error') -> None:
    counts = Counter(entry[key] for entry in entries)
    for value, count in counts.items():
        if count > 1:
            report.add(level, f'duplicate {what}', f'{value!r}, {count} times')


def _is_number(value: object) -> bool:
    # integers that a float holds exactly; no size or coordinate is larger
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool)
        and abs(value) < 2**53)


def _check_annotations(report: Report, annotations: Sequence[dict],
                       image_ids: set, sized: dict,
                       category_ids: set) -> None:
    for ann in annotations:
        name = f'annotation {ann["id"]}'
        if ann['image_id'] not in image_ids:
            report.add('error', 'annotation of an unknown image',
                       f'{name}: image_id {ann["image_id"]!r}')
        if ann['category_id'] not in category_ids:
            report.add('error', 'annotation of an unknown category',
                       f'{name}: category_id {ann["category_id"]!r}')
        if ann.get('iscrowd'):
            report.add('info', 'crowd box', name)
        problem = _box_problem(ann['bbox'], sized.get(ann['image_id']))
        if problem:
            report.add(*problem, f'{name}: bbox {ann["bbox"]}')
        area = ann.get('area')
        # NaN is not positive either
        if not (_is_number(area) and 0 < area < math.inf):
            report.add('error', 'area that is not positive',
                       f'{name}: area {area}')


def _box_problem(
        box: object,
        size: Optional[Tuple[float, float]]) -> Optional[Tuple[str, str]]:
    """Level and kind of what is wrong with a box [x, y, width, height]."""
    if not (isinstance(box, list) and len(box) == 4
            and all(map(_is_number, box))):
        return 'error', 'box that is not four numbers'
    if not all(map(math.isfinite, box)):
        return 'error', 'box that is not finite'
    x, y, w, h = box
    if w < 0 or h < 0:
        return 'error', 'box of negative width or height'
    if w == 0 or h == 0:
        return 'error', 'empty box'
    if size is not None:
        if x >= size[0] or y >= size[1] or x + w <= 0 or y + h <= 0:
            return 'error', 'box outside its image'
    if w < 1 or h < 1:
        return 'warning', 'box below one pixel, which mmdet leaves out'
    if size is not None:
        # coordinates are often rounded
        if min(x, y) < -1 or x + w > size[0] + 1 or y + h > size[1] + 1:
            return 'warning', 'box that reaches over the border of its image'
    return None


def _check_names(report: Report, categories: Sequence[dict],
                 annotations: Sequence[dict], classes: Sequence[str]) -> None:
    """Compare the classes of a config with the categories of a file."""
    boxes = Counter(ann['category_id'] for ann in annotations)
    names = [category['name'] for category in categories]
    for name in classes:
        if name not in names:
            report.add('error', 'class without a category in the file',
                       f'{name!r}, the file has {names[:NUM_EXAMPLES]} ...')
    for category in categories:
        if category['name'] not in classes:
            report.add('warning', 'category that is no class and left out',
                       f'{category["name"]!r} with '
                       f'{boxes[category["id"]]} annotations')
    # mmdet numbers labels in the order of the file, and names them in the
    # order of the classes
    named = zip((name for name in dict.fromkeys(names) if name in classes),
                (name for name in dict.fromkeys(classes) if name in names))
    for name, label in named:
        if name != label:
            report.add('error', 'classes in another order than the categories',
                       f'{name!r} in the file would be called {label!r}')


def _count_empty(report: Report, images: Sequence[dict],
                 annotations: Sequence[dict]) -> None:
    used = {ann['image_id'] for ann in annotations}
    for image in images:
        if image['id'] not in used:
            report.add('info', 'image without annotations',
                       f'image {image["id"]}: {image["file_name"]}')


def _check_files(report: Report, images: Sequence[dict], sized: dict,
                 root: str, progress: bool, decode: bool) -> None:
    what = 'images' if decode else 'headers'
    for image in tqdm(images, what, unit='image', disable=not progress):
        name = image['file_name']
        inside = osp.normpath(name)
        if osp.isabs(inside) or inside.split(osp.sep)[0] == osp.pardir:
            report.add('error', 'image path that leaves the image folder',
                       f'image {image["id"]}: {name}')
            continue
        try:
            size = _loaded_size(osp.join(root, name))
        except FileNotFoundError:
            report.add('error', 'missing image file', osp.join(root, name))
            continue
        except (OSError, SyntaxError, ValueError,
                Image.DecompressionBombError) as error:
            report.add('error', 'image file that cannot be read',
                       f'{osp.join(root, name)}: {error}')
            continue
        if decode and not _decodes(osp.join(root, name)):
            report.add('error', 'image file that cannot be decoded',
                       osp.join(root, name))
        known = sized.get(image['id'])
        if known is not None and tuple(known) != size:
            report.add(
                'error', 'image of another size than in the file',
                f'{name}: {known[0]} x {known[1]} in the annotations, '
                f'{size[0]} x {size[1]} when loaded')


def _loaded_size(path: str) -> Tuple[int, int]:
    """Width and height as OpenCV loads the image; reads the header only."""
    with Image.open(path) as image:
        size = image.size
        # OpenCV turns photographs upright
        if image.format in ('JPEG', 'MPO') and image.getexif().get(
                EXIF_ORIENTATION, 1) >= 5:
            size = size[::-1]
    return size


def _decodes(path: str) -> bool:
    """Whether OpenCV loads the image as mmdet has it loaded."""
    with open(path, 'rb') as file:
        content = file.read()
    try:
        return mmcv.imfrombytes(content) is not None
    except cv2.error:
        return False
