"""Run the last checkpoints of trainings: detections, speed, AP by class."""
import copy
import hashlib
import itertools
import json
import os
import tempfile
import uuid
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence

import mmcv
import mmdet.engine.hooks  # noqa: F401
import mmdet.visualization  # noqa: F401
import numpy as np
import torch
from mmcv.transforms import Compose
from mmdet.apis import init_detector
from mmdet.registry import DATASETS
from mmdet.utils import get_test_pipeline_cfg
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from torch import nn

from acmix_det.version import __version__
from .benchmark import Memory, Timing, measure, peak_memory, summary
from .plots import Boxes


class Sample(NamedTuple):
    """A validation image, RGB (H, W, 3), and its ground truth."""
    path: Path
    image: np.ndarray
    boxes: Boxes


@contextmanager
def _no_output():
    """The host prints its progress on the standard output."""
    with open(os.devnull, 'w') as nowhere, redirect_stdout(nowhere):
        yield


def default_device() -> str:
    """CUDA if there is a device, otherwise the CPU."""
    return 'cuda' if torch.cuda.is_available() else 'cpu'


def safe_image_path(path: str, roots: Sequence[Optional[str]]) -> Path:
    """Refuse an image outside of the data set.

    The names of images come from annotation files of any origin, and a report
    shows the images to others. Links in the data set are followed.

    Args:
        path (str): Path of the image, with the name that the annotation file
            gives.
        roots (Sequence[str | None]): Folders that may hold it.

    Returns:
        Path: Absolute path without '..'.

    Raises:
        ValueError: If it is in none of ``roots``.
    """
    full = Path(os.path.abspath(path))
    for root in filter(None, roots):
        if full.is_relative_to(os.path.abspath(root)):
            return full
    raise ValueError('file_name must be inside the data set, got '
                     f'{path!r} from its annotation file')


def pick_samples(cfg: Config, number: int) -> List[Sample]:
    """Choose validation images spread over the set.

    Images with several objects are preferred. The same data set gives the
    same images.

    Args:
        cfg (Config): Config of a training; relative paths in it start at the
            current directory.
        number (int): Number of images.

    Returns:
        list[Sample]: At most ``number`` samples.

    Raises:
        FileNotFoundError: If the data set is not there.
        ValueError: If an image lies outside of the data set.
    """
    with _no_output(), DefaultScope.overwrite_default_scope(
            cfg.get('default_scope')):
        dataset = DATASETS.build(copy.deepcopy(cfg.val_dataloader.dataset))
    everything = range(len(dataset))
    several = [
        i for i in everything
        if len(dataset.get_data_info(i).get('instances', [])) >= 2
    ] or list(everything)
    chosen = several[::max(len(several) // max(number, 1), 1)][:number]
    roots = [dataset.data_prefix.get('img'), dataset.data_root]
    samples = []
    for i in chosen:
        info = dataset.get_data_info(i)
        path = safe_image_path(info['img_path'], roots)
        if not path.is_file():
            raise FileNotFoundError(f'img_path must be a file, got {path}')
        image = mmcv.imread(str(path))
        if image is None:
            raise ValueError(f'img_path must be an image, got {path}')
        shown = [x for x in info['instances'] if not x.get('ignore_flag')]
        boxes = Boxes(
            np.array([x['bbox'] for x in shown]).reshape(-1, 4),
            np.array([x['bbox_label'] for x in shown], int))
        samples.append(Sample(path, image[..., ::-1], boxes))
    return samples


def class_names(cfg: Config) -> List[str]:
    """Names of the classes of the validation set."""
    dataset = copy.deepcopy(cfg.val_dataloader.dataset)
    dataset.lazy_init = True
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope')):
        return list(DATASETS.build(dataset).metainfo['classes'])


def load_detector(cfg: Config, checkpoint: Path, device: str) -> nn.Module:
    """Build a detector for the validation set, with trained weights.

    Raises:
        ValueError: If the model or its weights cannot be loaded, as where a
            checkpoint was cut while it was written.
    """
    cfg = copy.deepcopy(cfg)
    cfg.test_dataloader = cfg.val_dataloader
    try:
        with _no_output():
            return init_detector(cfg, str(checkpoint), device=device)
    except (OSError, RuntimeError, EOFError, KeyError) as error:
        raise ValueError(f'{checkpoint} could not be loaded: '
                         f'{summary(error)}') from error


def _model_input(model: nn.Module, image: np.ndarray) -> dict:
    """What ``model.test_step`` takes, from an RGB image."""
    steps = [
        step for step in get_test_pipeline_cfg(model.cfg.copy())
        if not step['type'].endswith('LoadAnnotations')
    ]
    steps[0] = dict(type='mmdet.LoadImageFromNDArray')
    with DefaultScope.overwrite_default_scope(model.cfg.get('default_scope')):
        data = Compose(steps)(dict(img=image[..., ::-1], img_id=0))
    return {name: [value] for name, value in data.items()}


@torch.no_grad()
def detect(model: nn.Module, image: np.ndarray,
           score_threshold: float) -> Boxes:
    """Detections on an RGB image (H, W, 3), from a threshold on."""
    sample, = model.test_step(_model_input(model, image))
    found = sample.pred_instances.numpy()
    found = found[found.scores >= score_threshold]
    return Boxes(found.bboxes, found.labels, found.scores)


def measure_speed(models: Dict[str, nn.Module], images: Sequence[np.ndarray],
                  device: str, rounds: int = 5) -> Dict[str, Timing]:
    """Time of one image, box decoding and NMS included, loading excluded.

    The models take turns on the same image, then on the next one.
    """

    def case(model):
        inputs = itertools.cycle([_model_input(model, x) for x in images])
        return torch.no_grad()(lambda: model.test_step(next(inputs)))

    return measure({name: case(model) for name, model in models.items()},
                   repeats=rounds * len(images), warmup=len(images),
                   device=device)


def measure_memory(cfg: Config, checkpoint: Path, image: np.ndarray,
                   device: str) -> Optional[Memory]:
    """Peak memory of one image, in a process of its own.

    Returns:
        Memory | None: None where the system does not tell it.
    """
    return peak_memory(_memory_case, cfg.to_dict(), str(checkpoint), image,
                       device, device=device,
                       threads=torch.get_num_threads())


def _memory_case(cfg: dict, checkpoint: str, image: np.ndarray, device: str):
    model = load_detector(Config(cfg), checkpoint, device)

    @torch.no_grad()
    def run(image=image):
        sample, = model.test_step(_model_input(model, image))
        return [sample.pred_instances.bboxes]

    return lambda: run(image[:64, :64]), run


def _coco_metric(cfg: Config) -> dict:
    evaluators = cfg.get('val_evaluator') or []
    if isinstance(evaluators, dict):
        evaluators = [evaluators]
    for evaluator in evaluators:
        if evaluator['type'].split('.')[-1] == 'CocoMetric':
            return copy.deepcopy(evaluator)
    raise ValueError('val_evaluator must have a CocoMetric for AP by class, '
                     f'got {[x["type"] for x in evaluators]}')


def evaluate_classes(cfg: Config, checkpoint: Path) -> Dict[str, float]:
    """Evaluate a checkpoint on the validation set with mmdet's evaluator.

    Args:
        cfg (Config): Config of the training.
        checkpoint (Path): Its checkpoint.

    Returns:
        dict[str, float]: Metrics, those of every class among them; empty if
        nothing was detected.

    Raises:
        ValueError: If the evaluator is not mmdet's CocoMetric.
    """
    evaluator = _coco_metric(cfg)
    evaluator.update(classwise=True, metric='bbox')
    cfg = copy.deepcopy(cfg)
    if 'backbone' in cfg.model:
        cfg.model.backbone.init_cfg = None
    with tempfile.TemporaryDirectory() as work_dir, _no_output():
        cfg.merge_from_dict(
            dict(work_dir=work_dir, load_from=str(checkpoint), resume=False,
                 launcher='none', log_level='ERROR',
                 experiment_name=uuid.uuid4().hex))
        # averaged weights are in the checkpoint, no hook is needed for them
        cfg.custom_hooks = []
        cfg.visualizer = dict(
            type='mmdet.DetLocalVisualizer', name=uuid.uuid4().hex)
        cfg.test_dataloader = cfg.val_dataloader
        cfg.test_evaluator = evaluator
        cfg.test_cfg = dict(type='TestLoop')
        metrics = Runner.from_cfg(cfg).test()
    return {name: float(value) for name, value in metrics.items()}


def evaluation_key(cfg: Config, checkpoint: Path) -> str:
    """Digest of everything that an evaluation depends on."""
    digest = hashlib.sha256(__version__.encode())
    with open(checkpoint, 'rb') as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    for part in ('model', 'val_dataloader', 'val_evaluator'):
        digest.update(repr(cfg.to_dict().get(part)).encode())
    annotations = Path(_coco_metric(cfg).get('ann_file') or '')
    if annotations.is_file():
        digest.update(annotations.read_bytes())
    return digest.hexdigest()


def cached_evaluation(cfg: Config, checkpoint: Path,
                      cache: Optional[Path]) -> Dict[str, float]:
    """:func:`evaluate_classes`, from a JSON file if it is in there.

    A changed checkpoint, config or annotation file is evaluated again.

    Args:
        cfg (Config): Config of the training.
        checkpoint (Path): Its checkpoint.
        cache (Path | None): The file; None evaluates always.
    """
    if cache is None:
        return evaluate_classes(cfg, checkpoint)
    key = evaluation_key(cfg, checkpoint)
    try:
        known = json.loads(cache.read_text())
        return dict(known[key])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, not ours, or of another checkpoint
    metrics = evaluate_classes(cfg, checkpoint)
    try:
        known = dict(json.loads(cache.read_text()))
    except (OSError, ValueError, TypeError):
        known = {}
    known[key] = metrics
    written = cache.with_name(f'{cache.name}.{os.getpid()}')
    written.write_text(json.dumps(known, indent=1))
    os.replace(written, cache)
    return metrics
