"""Read what mmengine leaves in the work directory of a training."""
import json
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

MAP, AP50 = 'coco/bbox_mAP', 'coco/bbox_mAP_50'


class Run(NamedTuple):
    """A training, finished or not.

    Attributes:
        work_dir (Path): Its work directory.
        max_epochs (int): Epochs that it is to train.
        checkpoint (Path | None): Last checkpoint.
        epochs (int): Epochs behind the last checkpoint.
        metrics (dict[int, dict]): Evaluation metrics by epoch.
        seconds (float): Time of the training iterations, data loading
            included, evaluation excluded. Iterations that an interruption
            lost and that were repeated count once.
    """
    work_dir: Path
    max_epochs: int
    checkpoint: Optional[Path]
    epochs: int
    metrics: Dict[int, dict]
    seconds: float

    @property
    def finished(self) -> bool:
        """Whether the last epoch was trained, saved and evaluated."""
        return (self.epochs >= self.max_epochs
                and self.max_epochs in self.metrics)

    @property
    def status(self) -> str:
        """'finished', or how far the run got."""
        if self.finished:
            return 'finished'
        if self.epochs:
            return f'unfinished ({self.epochs} of {self.max_epochs} epochs)'
        return 'not started'

    def final(self, name: str) -> Optional[float]:
        """A metric of the last epoch; None before the run is finished.

        COCO's -1 (no object of that kind) is None as well.
        """
        if not self.finished:
            return None
        value = self.metrics[self.max_epochs].get(name)
        return None if value is None or value < 0 else value

    def curve(self, name: str) -> Tuple[List[int], List[float]]:
        """Epochs and the values of a metric."""
        epochs = sorted(e for e in self.metrics if name in self.metrics[e])
        return epochs, [self.metrics[e][name] for e in epochs]


def read_run(work_dir: Path, max_epochs: int) -> Run:
    """Read the logs and checkpoints below a work directory.

    After a resume there are several logs; for an iteration or epoch that is
    in several of them the latest counts. Lines that an interruption cut are
    left out.

    Args:
        work_dir (Path): It need not exist.
        max_epochs (int): Epochs that the run is to train.

    Returns:
        Run: What is there.
    """
    work_dir = Path(work_dir)
    checkpoint = _last_checkpoint(work_dir)
    epochs = int(checkpoint.stem.split('_')[-1]) if checkpoint else 0
    iterations, metrics = {}, {}
    for log in sorted(work_dir.glob('*/vis_data/scalars.json')):
        for line in _read_lines(log):
            if 'loss' in line:
                iterations[line['step']] = line['time']
            else:  # without a single detection there are no metrics in it
                metrics[line['step']] = line
    # a line tells the mean time of the iterations since the line before it
    seconds, previous = 0., 0
    for step in sorted(iterations):
        seconds += iterations[step] * (step - previous)
        previous = step
    return Run(work_dir, max_epochs, checkpoint, epochs, metrics, seconds)


def _last_checkpoint(work_dir: Path) -> Optional[Path]:
    try:
        text = (work_dir / 'last_checkpoint').read_text().strip()
    except OSError:
        return None
    # the folder may have been moved since
    path = work_dir / Path(text).name
    return path if path.is_file() else None


def _read_lines(log: Path) -> List[dict]:
    lines = []
    for text in log.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and 'step' in line:
            lines.append(line)
    return lines
