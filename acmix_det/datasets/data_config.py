"""Data sets and classes that a config names."""
import os.path as osp
from collections import Counter
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.fileio import list_from_file
from mmengine.registry import DefaultScope


class Split(NamedTuple):
    """One data set of a config."""
    name: str
    ann_file: str
    img_root: str
    classes: Optional[Sequence[str]]


def coco_splits(cfg: Config, names: Sequence[str]) -> List[Split]:
    """COCO data sets of a config.

    Args:
        cfg (Config): Config of a detector.
        names (Sequence[str]): Any of 'train', 'val', 'test'.

    Returns:
        list[Split]: The data sets, those inside wrappers as well.

    Raises:
        ValueError: If one of them isn't in COCO format, its ``metainfo``
            isn't a dict with ``classes``, or there is none.
    """
    splits = []
    for name in names:
        for dataset in _datasets(cfg, name):
            kind = _dataset_class(cfg, dataset)
            if kind is None or not issubclass(kind, CocoDataset):
                raise ValueError(
                    f'{name}_dataloader must have data in COCO format, got '
                    f'type={dataset.get("type")!r}')
            root = dataset.get('data_root') or ''
            prefix = dataset.get('data_prefix') or {}
            splits.append(
                Split(name, osp.join(root, dataset.get('ann_file', '')),
                      osp.join(root, prefix.get('img', '')),
                      _classes(cfg, dataset)))
    if not splits:
        raise ValueError('config must have data sets for one of '
                         f'{", ".join(names)}, got none')
    return splits


def _datasets(cfg: Config, split: str) -> Iterator[dict]:
    """Configs of the data sets of a split, without their wrappers."""
    loader = cfg.get(f'{split}_dataloader') or {}
    waiting = [loader['dataset']] if 'dataset' in loader else []
    while waiting:
        dataset = waiting.pop(0)
        if 'dataset' in dataset:
            waiting.append(dataset['dataset'])
        elif 'datasets' in dataset:
            waiting.extend(dataset['datasets'])
        else:
            yield dataset


def _dataset_class(cfg: Config, dataset: dict) -> Optional[type]:
    kind = dataset.get('type')
    if isinstance(kind, str):
        with DefaultScope.overwrite_default_scope(
                cfg.get('default_scope', 'mmdet')):
            return DATASETS.get(kind)
    return kind


def _classes(cfg: Config, dataset: dict) -> Optional[Sequence[str]]:
    """Classes as the data set takes them: its config's, or its own."""
    metainfo = dataset.get('metainfo') or {}
    if not isinstance(metainfo, dict) or 'CLASSES' in metainfo:
        raise ValueError("metainfo must be a dict with the key 'classes', in "
                         f'lower case, got {metainfo!r}')
    classes = metainfo.get('classes')
    if classes is None:
        kind = _dataset_class(cfg, dataset)
        return getattr(kind, 'METAINFO', {}).get('classes')
    if isinstance(classes, str) and osp.isfile(classes):
        return list_from_file(classes)
    return classes


def _num_classes(config: object, path: str = '') -> Iterator[Tuple[str, int]]:
    """Name and value of the ``num_classes`` of the heads in a model."""
    if isinstance(config, (list, tuple)):
        for i, item in enumerate(config):
            yield from _num_classes(item, f'{path}[{i}]')
    elif isinstance(config, dict):
        for key, value in config.items():
            # an RPN tells objects from background only; stuff is not boxes
            if key.endswith(('head', 'detector')) and key not in (
                    'rpn_head', 'semantic_head'):
                yield from _num_classes(value, f'{path}.{key}'.lstrip('.'))
        if path and isinstance(config.get('num_classes'), int):
            yield f'{path}.num_classes', config['num_classes']


def check_classes(cfg: Config) -> None:
    """Check the classes of the data sets against those of the heads.

    Reads nothing but the config, and takes no time.

    Args:
        cfg (Config): Config of a detector.

    Raises:
        ValueError: If ``metainfo`` of a data set is not a dict with
            ``classes``, these are not a list or tuple of different names (or
            the file of such a list), or a head's ``num_classes`` is another
            number.
    """
    heads = list(_num_classes(cfg.get('model') or {}))
    for split in ('train', 'val', 'test'):
        for dataset in _datasets(cfg, split):
            classes = _classes(cfg, dataset)
            if classes is None:
                continue
            name = f'classes of {split}_dataloader'
            if isinstance(classes, str):
                raise ValueError(
                    f'{name} must be a list or tuple, got the string '
                    f'{classes!r}; write [{classes!r}], a tuple of one needs '
                    'a comma')
            if not isinstance(classes, (list, tuple)) or not all(
                    isinstance(c, str) for c in classes):
                raise ValueError(f'{name} must be a list or tuple of names, '
                                 f'got {classes!r}')
            twice = [c for c, n in Counter(classes).items() if n > 1]
            if twice:
                raise ValueError(f'{name} must be different names, got '
                                 f'{twice[0]!r} more than once')
            for head, number in heads:
                if number != len(classes):
                    raise ValueError(
                        f'num_classes must be the number of classes in '
                        f'{split}_dataloader, {len(classes)}, got '
                        f'{head}={number}')
