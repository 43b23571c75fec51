"""The table that compares runs, as text and as plain types."""
import csv
import io
from statistics import mean, stdev
from typing import (Any, Callable, Dict, Iterator, List, NamedTuple, Optional,
                    Sequence, Tuple)

from mmengine.config import Config

from .benchmark import Timing
from .benchmark_report import MIB
from .complexity import Complexity
from .markdown import markdown_table
from .runs import MAP, Run

METRICS = {
    'mAP': 'coco/bbox_mAP',
    'AP50': 'coco/bbox_mAP_50',
    'AP75': 'coco/bbox_mAP_75',
    'APs': 'coco/bbox_mAP_s',
    'APm': 'coco/bbox_mAP_m',
    'APl': 'coco/bbox_mAP_l',
}
# what decides how a model trains and is judged; the rest repeats it
COMPARED_KEYS = ('model', 'train_cfg', 'optim_wrapper', 'param_scheduler',
                 'train_dataloader', 'val_dataloader', 'val_evaluator',
                 'custom_hooks', 'auto_scale_lr', 'randomness')


class Entry(NamedTuple):
    """One model of a comparison; the first one is the baseline.

    Attributes:
        name (str): Name of the model.
        runs (Sequence[Run]): Its trainings, several where seeds differ.
        complexity (Complexity | None): Its cost, if it could be counted.
        classes (dict[str, float | None]): AP by class, mean over the runs.
        speed (Timing | None): Time of one image.
        memory (int | None): Peak bytes of one image.
    """
    name: str
    runs: Sequence[Run]
    complexity: Optional[Complexity] = None
    classes: Dict[str, Optional[float]] = {}
    speed: Optional[Timing] = None
    memory: Optional[int] = None

    @property
    def finished(self) -> List[Run]:
        return [run for run in self.runs if run.finished]

    @property
    def status(self) -> str:
        """'finished', or the states of the runs that are not."""
        return ', '.join(
            dict.fromkeys(x.status for x in self.runs
                          if not x.finished)) or 'finished'

    @property
    def label(self) -> str:
        """Name, number of runs if several, and what is not finished."""
        done, runs = len(self.finished), len(self.runs)
        if runs == 1:
            return self.name if done else f'{self.name}, {self.status}'
        if done == runs:
            return f'{self.name} (n={runs})'
        return f'{self.name} (n={done} of {runs}), {self.status}'

    def values(self, metric: str) -> List[float]:
        """Final values of a metric, one of each finished run that has it."""
        found = (run.final(metric) for run in self.runs)
        return [x for x in found if x is not None]

    @property
    def params(self) -> Optional[int]:
        return self.complexity and self.complexity.params

    @property
    def flops(self) -> Optional[int]:
        return self.complexity and self.complexity.flops


def saved_percent(value: Optional[float],
                  baseline: Optional[float]) -> Optional[float]:
    """Percent less than the baseline: 20 is a fifth less."""
    if value is None or not baseline:
        return None
    return 100 * (1 - value / baseline)


def saving(value: Optional[float], baseline: Optional[float]) -> str:
    """Percent less than the baseline: '+20 %' is a fifth less."""
    percent = saved_percent(value, baseline)
    return '-' if percent is None else f'{percent:+.0f} %'


def _spread(values: Sequence[float]) -> str:
    """Mean, and sample standard deviation if there are several values."""
    if not values:
        return '-'
    text = f'{mean(values):.3f}'
    return f'{text} ± {stdev(values):.3f}' if len(values) > 1 else text


def _epochs(entry: Entry) -> str:
    found = []
    for run in entry.runs:
        total = run.schedule.total
        if run.finished:
            found.append(str(total))
        elif run.metrics:
            found.append(f'{max(run.metrics)} of {total}')
    return ', '.join(dict.fromkeys(found)) or '-'


def _best(entry: Entry) -> str:
    found = [run.best for run in entry.runs if run.best]
    text = _spread([value for value, _ in found])
    return f'{text} ({found[0][1]})' if len(found) == 1 else text


def _duration(entry: Entry) -> str:
    if not entry.finished:
        return '-'
    minutes = mean(run.seconds for run in entry.finished) / 60
    return f'{minutes:.1f} min' if minutes < 120 else f'{minutes / 60:.1f} h'


def _count(value: Optional[int], unit: float, name: str) -> str:
    return '-' if value is None else f'{value / unit:.3f} {name}'


def _row(entry: Entry, baseline: Entry) -> List[str]:
    same = entry is baseline
    macs = entry.complexity and entry.complexity.macs
    return [
        entry.label, *(_spread(entry.values(x)) for x in METRICS.values()),
        _epochs(entry), _best(entry), _count(entry.params, 1e6, 'M'),
        '' if same else saving(entry.params, baseline.params),
        _count(macs, 1e9, 'G'), _count(entry.flops, 1e9, 'G'),
        '' if same else saving(entry.flops, baseline.flops), _duration(entry)
    ]


def cells(entries: Sequence[Entry]) -> Tuple[List[str], List[List[str]]]:
    """Header and rows of the table; savings are relative to the first entry.

    What was not reached shows as '-', with the state of the run.
    """
    unit = entries[0].runs[0].schedule.unit
    header = [
        'model', *METRICS, unit, 'best mAP', 'parameters', 'saved', 'MACs',
        'FLOPs', 'saved', 'training'
    ]
    rows = [_row(entry, entries[0]) for entry in entries]
    if any(entry.speed for entry in entries):
        header += ['ms per image', 'memory']
        for row, e in zip(rows, entries):
            row += [
                f'{e.speed.median:.1f}' if e.speed else '-',
                '-' if e.memory is None else f'{e.memory / MIB:.1f} MiB'
            ]
    return header, rows


def class_cells(
        entries: Sequence[Entry]) -> Tuple[List[str], List[List[str]]]:
    """Header and rows of the AP by class, differences to the first entry."""
    names = dict.fromkeys(x for entry in entries for x in entry.classes)
    header = ['class', *(entry.label for entry in entries)]
    rows = []
    for name in names:
        base = entries[0].classes.get(name)
        row = [name]
        for entry in entries:
            value = entry.classes.get(name)
            text = '-' if value is None else f'{value:.3f}'
            if entry is not entries[0] and None not in (value, base):
                text += f' ({value - base:+.3f})'
            row.append(text)
        rows.append(row)
    return header, rows


def table(entries: Sequence[Entry],
          content: Callable[[Sequence[Entry]], tuple] = cells) -> str:
    """Markdown of :func:`cells` or :func:`class_cells`."""

    def escape(text):
        return ' '.join(text.replace('|', r'\|').split('\n'))

    header, rows = content(entries)
    return markdown_table([escape(x) for x in header],
                          [[escape(x) for x in row] for row in rows])


def _mean(values: Sequence[float]) -> Optional[float]:
    return mean(values) if values else None


def as_dict(entries: Sequence[Entry]) -> List[Dict[str, Any]]:
    """The comparison as plain types, None where there is no value.

    A value is the mean over the finished runs, ``*_std`` the sample standard
    deviation.
    """
    found = []
    for e in entries:
        row = dict(model=e.name, status=e.status, finished_runs=len(e.finished))
        for name, metric in METRICS.items():
            values = e.values(metric)
            row[name] = _mean(values)
            row[f'{name}_std'] = stdev(values) if len(values) > 1 else None
        row.update(
            params=e.params,
            params_saved_percent=saved_percent(e.params, entries[0].params),
            macs=e.complexity and e.complexity.macs,
            flops=e.flops,
            flops_saved_percent=saved_percent(e.flops, entries[0].flops),
            training_seconds=_mean([run.seconds for run in e.finished]),
            ms_per_image=e.speed and e.speed.median,
            ms_lower_quartile=e.speed and e.speed.lower,
            ms_upper_quartile=e.speed and e.speed.upper,
            peak_bytes=e.memory,
            AP_by_class=dict(e.classes),
            runs=[_run_dict(run) for run in e.runs])
        found.append(row)
    return found


def _run_dict(run: Run) -> Dict[str, Any]:
    best, best_at = run.best or (None, None)
    return dict(
        work_dir=str(run.work_dir),
        status=run.status,
        checkpoint=run.checkpoint and run.checkpoint.name,
        unit=run.schedule.unit,
        done=run.done,
        total=run.schedule.total,
        mAP=run.final(MAP),
        best_mAP=best,
        best_at=best_at,
        mAP_by_epoch=dict(zip(*run.curve(MAP))))


def as_csv(entries: Sequence[Entry]) -> str:
    """The plain numbers of :func:`as_dict`, a column for each class."""
    rows = []
    for row in as_dict(entries):
        del row['runs']
        row.update({
            f'AP {name}': value
            for name, value in row.pop('AP_by_class').items()
        })
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip('\n')


def _flatten(value: Any, key: str = '') -> Iterator[Tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _flatten(part, f'{key}.{name}' if key else str(name))
    elif (isinstance(value, (list, tuple))
          and any(isinstance(part, dict) for part in value)):
        for i, part in enumerate(value):
            yield from _flatten(part, f'{key}.{i}')
    else:
        yield key, list(value) if isinstance(value, tuple) else value


def config_diff(cfg: Config, baseline: Config) -> List[Tuple[str, str, str]]:
    """Settings of model, training and data that differ from the baseline.

    Returns:
        list[tuple]: Dotted key, the baseline's value, this value; '-' where
        a config does not have the key.
    """
    ours, base = ({
        key: repr(value)
        for name in COMPARED_KEYS if name in x
        for key, value in _flatten(x.to_dict()[name], name)
        if not key.rsplit('.', 1)[-1] == '_scope_'
    } for x in (cfg, baseline))
    return [(key, base.get(key, '-'), ours.get(key, '-'))
            for key in dict.fromkeys([*base, *ours])
            if base.get(key) != ours.get(key)]
