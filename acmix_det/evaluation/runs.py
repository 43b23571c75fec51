"""Read what mmengine leaves in the work directory of a training."""
import json
import math
import re
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

from mmengine.config import Config

MAP, AP50 = 'coco/bbox_mAP', 'coco/bbox_mAP_50'
CLASS_AP = re.compile(r'coco/(.+)_precision')


class Schedule(NamedTuple):
    """How long a training is to be.

    Attributes:
        total (int): Number of epochs or iterations.
        unit (str): 'epoch' or 'iteration'. Defaults to 'epoch'.
        val_interval (int): Units between two evaluations. Defaults to 1.
    """
    total: int
    unit: str = 'epoch'
    val_interval: int = 1


class Run(NamedTuple):
    """A training, finished or not.

    Attributes:
        work_dir (Path): Its work directory.
        schedule (Schedule): Epochs or iterations that it is to train.
        checkpoint (Path | None): Last checkpoint.
        done (int): Epochs or iterations behind the last checkpoint.
        metrics (dict[int, dict]): Evaluation metrics by epoch or iteration.
        seconds (float): Time of the training iterations, data loading
            included, evaluation excluded. Iterations that an interruption
            lost and that were repeated count once.
    """
    work_dir: Path
    schedule: Schedule
    checkpoint: Optional[Path]
    done: int
    metrics: Dict[int, dict]
    seconds: float

    @property
    def finished(self) -> bool:
        """Whether the last epoch was trained, saved and evaluated."""
        total = self.schedule.total
        return self.done >= total and total in self.metrics

    @property
    def status(self) -> str:
        """'finished', or how far the run got."""
        if self.finished:
            return 'finished'
        total, unit, _ = self.schedule
        if self.done >= total:
            return 'trained, but not evaluated'
        if self.done:
            return f'unfinished ({self.done} of {total} {unit}s)'
        if self.seconds:
            return f'unfinished (less than 1 of {total} {unit}s saved)'
        if not self.work_dir.is_dir():
            return 'no such directory'
        return 'not started'

    def final(self, name: str) -> Optional[float]:
        """A metric of the last epoch; None before the run is finished.

        COCO's -1 (no object of that kind) is None as well.
        """
        if not self.finished:
            return None
        return _known(self.metrics[self.schedule.total].get(name))

    @property
    def best(self) -> Optional[Tuple[float, int]]:
        """Highest mAP so far, and the first epoch that reached it."""
        epochs, values = self.curve(MAP)
        if not values:
            return None
        value = max(values)
        return value, epochs[values.index(value)]

    def curve(self, name: str) -> Tuple[List[int], List[float]]:
        """Epochs and the values of a metric, where it has one."""
        points = [(e, self.metrics[e].get(name)) for e in sorted(self.metrics)]
        points = [p for p in points if _known(p[1]) is not None]
        return [e for e, _ in points], [value for _, value in points]

    @property
    def classes(self) -> Dict[str, Optional[float]]:
        """AP by class of the last epoch, if the evaluator logged it."""
        if not self.finished:
            return {}
        return class_ap(self.metrics[self.schedule.total])


def class_ap(metrics: Dict[str, float]) -> Dict[str, Optional[float]]:
    """AP by class among metrics; None for a class without objects."""
    found = {}
    for key, value in metrics.items():
        if match := CLASS_AP.fullmatch(key):
            found[match[1]] = _known(value)
    return found


def _known(value: Optional[float]) -> Optional[float]:
    if value is None or not 0 <= value < math.inf:
        return None
    return value


def find_config(work_dir: Path) -> Path:
    """Find the config that mmengine wrote for a training.

    Args:
        work_dir (Path): Work directory of the training.

    Returns:
        Path: ``<name>.py`` in it if there is one; otherwise (none, or those
        of several configs) the latest ``*/vis_data/config.py``.

    Raises:
        FileNotFoundError: If there is no directory or no config.
    """
    work_dir = Path(work_dir)
    if not work_dir.is_dir():
        raise FileNotFoundError('work_dir must be a directory, got '
                                f'{work_dir}')
    found = list(work_dir.glob('*.py'))
    if len(found) == 1:
        return found[0]
    dumped = sorted(work_dir.glob('*/vis_data/config.py'))
    if dumped:
        return dumped[-1]
    if found:
        names = ', '.join(sorted(x.name for x in found))
        raise FileNotFoundError('work_dir must hold the config of one run, '
                                f'got {work_dir} with {names}')
    raise FileNotFoundError('work_dir must hold the config of a run '
                            f'(<name>.py or */vis_data/config.py), got '
                            f'{work_dir} without one')


def read_schedule(cfg: Config) -> Schedule:
    """Length of a training, from its config.

    Raises:
        ValueError: If ``train_cfg`` has neither epochs nor iterations.
    """
    train_cfg = cfg.get('train_cfg') or {}
    # mmengine's own defaults
    if 'max_epochs' in train_cfg:
        return Schedule(train_cfg['max_epochs'], 'epoch',
                        train_cfg.get('val_interval', 1))
    if 'max_iters' in train_cfg:
        return Schedule(train_cfg['max_iters'], 'iteration',
                        train_cfg.get('val_interval', 1000))
    raise ValueError('train_cfg must have max_epochs (EpochBasedTrainLoop) or '
                     f'max_iters (IterBasedTrainLoop), got {dict(train_cfg)}')


def read_run(work_dir: Path, schedule: Schedule) -> Run:
    """Read the logs and checkpoints below a work directory.

    After a resume there are several logs. A log replaces what earlier ones
    tell of its first epoch (iteration-based: its first logged iteration) and
    of all later ones, so that neither repeated work nor an older training in
    the same directory counts. Lines that an interruption cut, or that are
    broken in another way, are left out.

    Args:
        work_dir (Path): It need not exist.
        schedule (Schedule): Length of the training.

    Returns:
        Run: What is there.
    """
    work_dir = Path(work_dir)
    checkpoint = _last_checkpoint(work_dir)
    done = 0
    if checkpoint:
        numbers = re.findall(r'\d+', checkpoint.stem)
        if not numbers:
            raise ValueError('last_checkpoint must name a file with its '
                             f'epoch or iteration, got {checkpoint}')
        done = int(numbers[-1])
        if schedule.unit == 'iteration' and checkpoint.stem.startswith('epoch'):
            done = schedule.total  # the whole training is one epoch to mmengine
    by_epoch = schedule.unit == 'epoch'
    iterations, metrics = {}, {}
    for log in sorted(work_dir.glob('*/vis_data/scalars.json')):
        lines = _read_lines(log)
        first = next((x for x in lines if 'loss' in x), None)
        if first is not None:
            key = 'epoch' if by_epoch else 'step'
            start = first.get(key, 0)
            iterations = {
                step: line
                for step, line in iterations.items()
                if line.get(key, 0) < start
            }
            metrics = {e: x for e, x in metrics.items() if e < start}
        step = 0
        for line in lines:
            if 'loss' in line:
                step = line['step']
                iterations[step] = line
                continue
            # without a single detection there are no metrics in it
            position = line['step']
            if not by_epoch and not position:
                # LoggerHook counts epochs here, of which there is one
                interval = schedule.val_interval
                position = min(-(-step // interval) * interval, schedule.total)
            metrics[position] = line
    # a line tells the mean time of the iterations since the line before it
    seconds, previous = 0., 0
    for step in sorted(iterations):
        time = _known(iterations[step].get('time')) or 0.
        seconds += time * (step - previous)
        previous = step
    return Run(work_dir, schedule, checkpoint, done, metrics, seconds)


def _last_checkpoint(work_dir: Path) -> Optional[Path]:
    try:
        text = (work_dir / 'last_checkpoint').read_text().strip()
        # the folder may have been moved since
        path = work_dir / Path(text).name
        return path if path.is_file() else None
    except (OSError, ValueError):  # no text, or none that can be a name
        return None


def _read_lines(log: Path) -> List[dict]:
    lines = []
    for text in log.read_text(errors='replace').splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(line, dict):
            continue
        numbers = {key: x for key, x in line.items() if _is_number(x)}
        step = numbers.get('step')
        # a line of the trainer or of the evaluator, as it was written
        if isinstance(step, int) and step >= 0 and all(
                key in numbers for key in ('loss', 'time', 'epoch')
                if key in line):
            lines.append(numbers)
    return lines


def _is_number(value: object) -> bool:
    # integers that a float holds; what mmengine writes is far smaller
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool)
        and abs(value) < 2**53)
